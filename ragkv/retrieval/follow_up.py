"""Follow-up questions: what is searched for when a question refers to earlier turns ("And when was it built?").

The words of such a question find any building. A name takes the place of its pronoun, if the latest question that
stands alone has one, or its answer; a model that quotes spans reads the question so, too. Otherwise that question is
put before it, with its answer, for the search alone. English, like the models that ship with ragkv.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ragkv.normalisation import folded
from ragkv.passages import PUNCTUATION, is_unknown
from ragkv.types import Hit

LONGEST = 2000
"""Characters that are put before a question. A longer text is left out."""

NAMES_NOTHING = frozenset(
    "a about after all also am an and any are as at be been before being but by can could did do does doing done down "
    "else ever exactly far for from had has have he her hers him his how i if in into is it its just long many may me "
    "might more most much must my name no nor not of off often old on one only or other our out over own please "
    "really same shall she should since so some soon still such tell than that the their them then there these they "
    "this those through to too under until up us very was we were what when where which while who whom whose why will "
    "with would yes you your".split()
)
"""Words of a question that name nothing."""
OWN = "'s"
"""Ending of a name that owns something."""
LONGEST_NAME = 60
"""Characters of an answer that may be a name."""

_PRONOUN = re.compile(r"\b(he|him|his|she|hers?|it|its|they|them|theirs?)\b", re.IGNORECASE)
_PERSONAL = frozenset({"he", "him", "his", "she", "her", "hers"})
_SEVERAL = frozenset({"they", "them", "their", "theirs"})
_OWNERS = frozenset({"his", "its", "their", "hers", "theirs"})
_OBJECT = re.compile(
    r"\s*(?:$|[.,;:?!]|(?:to|in|on|at|from|for|with|by|of|and|or|when|before|after|as|during)\b)", re.IGNORECASE
)
"""What stands behind a pronoun that is no subject and owns nothing ("Who sold it?", "Who met her in Tarn?")."""
_NAME_PATTERN = r"(?:the )?[A-ZÀ-Þ][\w.-]*(?:[ ’'](?:(?:of|de|von|van|and|the) )?(?:[A-ZÀ-Þ][\w.-]*|\d+))*"
_NAME = re.compile(_NAME_PATTERN)
_ANOTHER = re.compile(
    rf"(?i:and|but|(?:and )?(?:what|how) about)(?: (for|of|in|on|at|to))? ({_NAME_PATTERN}|\d{{1,4}})\s?\??"
)
"""A question that asks the one before it of another name or number ("And in 2023?")."""
_NUMBER = re.compile(r"\b\d{1,4}\b")
_PARTICLES = frozenset("al and bin da de del den der di du la le of the van von".split())
"""Words of names that are written small."""
_PERSON = re.compile(r"(?<![\w.’'-])[A-ZÀ-Þ][\w.’'-]*+(?: (?:de |von |van )?[A-ZÀ-Þ][\w.’'-]*+)++")
_THING = re.compile(r"the (?:[a-z][\w-]* ){1,3}of (?:the )?$")
"""What a name may belong to ("the old harbour of ")."""
_AUXILIARY = re.compile(r"\b(?:did|does|do|was|were|is|are|has|have|had|will|would|can|could|must|should) $")
_ASKS_PERSON = re.compile(r"(?:\w+ )?(?:who|whom|whose)\b", re.IGNORECASE)
_ASKS_COUNT = re.compile(r"(?:\w+ )?how many\b", re.IGNORECASE)
_ASKS_NO_PERSON = re.compile(
    r"(?:\w+ )?(?:where|when|how|why|(?:which|what) (?:country|city|town|village|place|island|river|year|day))\b",
    re.IGNORECASE,
)
_EXPLETIVE = re.compile(
    r"\b(?:is|was|does|did) it (?:true|possible|take|rain|snow|mean|matter|necessary|allowed)\b", re.IGNORECASE
)
"""Where `it` stands for nothing."""
_EMAIL = re.compile(r"\be-?mail address\b|\be-mail\b", re.IGNORECASE)
_WORD = re.compile(r"\w+")


def refers_back(question: str) -> bool:
    """Return whether a question has a pronoun, no word that names anything ("And since when?"), or nothing but a name.

    A pronoun behind a name is that name's ("How old was Ada Brook when she died?"), unless it is an object.
    """
    question = folded(question)
    if _ANOTHER.fullmatch(question.strip()):
        return True
    named = _names(question)[:1]
    for pronoun in _PRONOUN.finditer(question):
        if not named or pronoun.start() < named[0][0] or _OBJECT.match(question, pronoun.end()):
            return True
    return NAMES_NOTHING.issuperset(_WORD.findall(question.lower()))


def search_text(question: str, turns: Sequence[tuple[str, str]]) -> str:
    """Return what is searched for.

    Args:
        question: The question.
        turns: Earlier (question, answer), in order.
    """
    alone = _alone(turns)
    question = _resolved(question, alone)
    if alone is None or not refers_back(question):
        return question
    asked, answer = (each.strip() for each in alone)
    said = "" if is_unknown(answer) else answer
    before = " ".join(each if each[-1] in ".?!" else f"{each}." for each in (asked, said) if each)
    return f"{before} {question}" if len(before) <= LONGEST else question


def resolved(question: str, turns: Sequence[tuple[str, str]]) -> str:
    """Return a question with a name in place of its pronoun, where the latest turn that stands alone has one.

    A turn with a pronoun stands alone once a name took its place ("Who built it?" – "When was she born?").

    "And in 2023?" is that turn's question with 2023 in place of its last number, and likewise with names.

    An e-mail address is `email` then, which the default model reads better (docs/lab-notes.md).

    Args:
        question: The question.
        turns: Earlier (question, answer), in order.
    """
    return _resolved(question, _alone(turns))


def _alone(turns: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the latest turn that stands alone, with the question as it is read; None of none."""
    latest: tuple[str, str] | None = None
    for asked, answer in turns:
        read = _resolved(asked, latest)
        latest = latest if refers_back(read) else (read, answer)
    return latest


def _resolved(question: str, alone: tuple[str, str] | None) -> str:
    pronoun = _PRONOUN.search(question)
    if alone is not None and (another := _ANOTHER.fullmatch(question.strip())):
        return _asked_of(another[2], another[1] or "", alone[0].strip()) or question
    if pronoun is None or alone is None or not refers_back(question) or _EXPLETIVE.search(question):
        return question
    word, (asked, answer) = pronoun[0].lower(), (each.strip() for each in alone)
    answer = "" if is_unknown(answer) else answer.strip(PUNCTUATION)
    named = _several(asked, answer) if word in _SEVERAL else ""
    named = named or (_person if word in _PERSONAL else _thing)(asked, answer)
    if word in _SEVERAL and _ASKS_COUNT.match(asked):  # what was counted
        return question
    if not named or named.casefold() in question.casefold():
        return question
    owned = word in _OWNERS or (word == "her" and _OBJECT.match(question, pronoun.end()) is None)
    asks = f"{question[: pronoun.start()]}{named}{OWN if owned else ''}{question[pronoun.end() :]}"
    return _EMAIL.sub("email", asks)


def _asked_of(other: str, before: str, asked: str) -> str:
    """Return a question with another name, or number, in place of its last one; "" where it has none.

    before: The preposition of the other one, which the last one needs as well.
    """
    pattern, behind = (_NUMBER, 0) if other.isdigit() else (_NAME, asked.find(" ") + 1)
    last = next(reversed(list(pattern.finditer(asked, behind))), None)
    if last is None or not asked[: last.start()].rstrip().endswith(before):
        return ""
    return f"{asked[: last.start()]}{other}{asked[last.end() :]}"


def _several(asked: str, answer: str) -> str:
    """Return whom `they` stands for: several people who answered, or one where the question names nothing else."""
    several = " and " in answer or "," in answer
    return answer if _ASKS_PERSON.match(asked) and _is_name(answer) and (several or not _names(asked)) else ""


def _person(asked: str, answer: str) -> str:
    """Return whom `he` or `she` stands for: a name that answered, the subject of the question, or a name in it."""
    names = [(at, name) for at, name in _names(asked) if not name.startswith("the ")]
    if _ASKS_PERSON.match(asked):
        answer = re.sub("['’]s$", "", answer)
        told = {answer} if _is_name(answer) else {each[0] for each in _PERSON.finditer(answer[: LONGEST_NAME + 1])}
        if len(told) == 1 and len(answer) <= LONGEST_NAME:
            return told.pop()
    elif not _ASKS_NO_PERSON.match(asked) and " " in answer.removeprefix("the ") and _is_name(answer):
        return answer
    return next(
        (name for at, name in names if _AUXILIARY.search(asked, max(0, at - 10), at)), names[-1][1] if names else ""
    )


def _thing(asked: str, answer: str) -> str:
    """Return what `it` or `they` stands for: the subject of the question, a name that answered, or a name in it."""
    names = _names(asked)
    subject = next((name for at, name in names if _AUXILIARY.search(asked, max(0, at - 10), at)), "")
    if subject and not _PERSON.fullmatch(subject):
        return subject
    if _is_name(answer) and not _ASKS_PERSON.match(asked):
        return answer if not _ASKS_NO_PERSON.match(asked) or not names else names[-1][1]
    if subject and answer.startswith(("the ", "a ", "an ")):  # what a person made or has
        return ""
    return names[-1][1] if names else ""


def _names(asked: str) -> list[tuple[int, str]]:
    """Return (start, name) of each name in a question, with the thing that belongs to it ("the harbour of Tarn")."""
    found = list[tuple[int, str]]()
    for name in _NAME.finditer(asked, asked.find(" ") + 1):
        thing = _THING.search(asked, max(0, name.start() - LONGEST_NAME), name.start())
        at = name.start() if thing is None else thing.start()
        found.append((at, asked[at : name.end()].rstrip(".-")))
    return found


def _is_name(text: str) -> bool:
    """Whether a short text is nothing but names: "Otto Lind", "the Pale Heron", "Maria de la Cruz and Łukasz Żak"."""
    words = text.removeprefix("the ").replace(",", " ").split()
    fits = (word[0].isupper() or word[0].isdigit() or word[2:3].isupper() or word in _PARTICLES for word in words)
    return bool(words) and words[0][0].isupper() and len(text) <= LONGEST_NAME and all(fits)


def own_raised(hits: Sequence[Hit], own: Collection[str], most: int) -> list[Hit]:
    """Return the best `most` hits, after those of the conversation's own documents rose by half as many places.

    A document of its own so comes before one that is about something else with the same words, and not before the
    best of what is new.

    Args:
        hits: Best first, about twice as many as are wanted.
        own: Ids of the documents that earlier turns read.
        most: How many are wanted.
    """
    places = {id(hit): place - (most / 2 if hit.chunk.document_id in own else 0) for place, hit in enumerate(hits)}
    return sorted(hits, key=lambda hit: places[id(hit)])[:most]
