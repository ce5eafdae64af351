"""What a chunk tells: clauses with known subjects, and patterns that need no clause."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache

from ragkv.evaluation.blanks import blanks
from ragkv.evaluation.clauses import Clause, Span, sentences, tail, words
from ragkv.evaluation.drafts import Draft, ParsedChunk, Told
from ragkv.evaluation.lexicon import ADVERBS, AUXILIARIES, DETERMINERS, LEADS, PAST, VAGUE
from ragkv.evaluation.noun_phrases import clear, lowered, people, person, proper, specific
from ragkv.evaluation.parse import passive, read
from ragkv.evaluation.rules import drafts

_LINKED = r"(?:[A-Z][\w-]*|of|for|and|the|to|in|on)"
_SHORT = re.compile(rf"({_LINKED}(?: {_LINKED}){{1,6}}) \(([A-Z][A-Za-z]{{1,6}})\)")
_STANDS = re.compile(
    r"\b([A-Z][A-Z0-9]{1,7}) (?:stands|stood|is short|is an acronym|is an abbreviation) for [\"“]?"
    rf"({_LINKED}(?: {_LINKED}){{1,7}})"
)
_ALSO = re.compile(
    r"\b((?:[Tt]he |[Aa]n? )?[A-Za-z][\w-]+(?: [A-Za-z][\w-]+){0,3}),? "
    r"\(?(?:also|sometimes|formerly|originally|commonly|previously|better) (?:called|known as|named) "
    r"(?:the |an? |[\"“])?([A-Z]?[\w-]+(?: [A-Z][\w-]+){0,3})"
)
_FRAGMENT = re.compile(
    r"(?:An?|The) ((?:[a-zA-Z][\w'’-]* ){0,5}?[a-z][\w'’-]+)"
    r"(?= (?:that|which|who|for|from|in|on|by|with|where|to|at|and|"
    r"whose|between|of|\w+(?:ed|ing) (?:the|an?|by|in|on|at|of|for|from|to|with|as)|"
    r"given|found|made|known|written|built|sold|sent)\b|[.,;:(])"
)
_REDUCED = re.compile(
    r"((?:[A-Z][\w'’.&+-]*)(?: (?:(?:of|de|von|van|the) )*[A-Z0-9][\w'’.&+-]*){0,4}), "
    r"(?:\(?(?:originally|first|later|also) )?(founded|written|developed|published|created|released|born|designed|"
    r"built|invented|established|introduced|discovered|composed|directed|formed|edited|translated|produced|owned|"
    r"located|launched|completed) (?=by|in|on|at|for|from|with)"
)
_HEADED = re.compile(
    r"(?:An?|The) [^.,;:()]{4,80}?,? (founded|written|developed|published|created|released|designed|built|invented|"
    r"established|introduced|discovered|produced|launched|proposed|defined|used|made|supported|sold) "
    r"(?=by|in|on|at|for|from|with)"
)
_APPOSED = re.compile(
    r"((?:[A-Z][\w'’.&+-]*)(?: (?:(?:of|de|von|van|the) )*[A-Z][\w'’.&+-]*){0,4}), ((?:the|an?) [^,.;:()]{6,70}),"
)


def reduced(sentence: Span, title: str) -> list[Told]:
    """Clauses without their "was": "X, founded in 1953 by Y", "X, the capital of Z", "A language developed at Z"."""
    found = _REDUCED.search(sentence.text)
    told: list[Told] = []
    if found and found[1].lower() not in VAGUE and proper(found[1]) and found.start() == 0:
        clause = passive(sentence, Span(found[1], sentence.start + found.start(1)), found.start(2))
        if clause:
            told.append(Told(clause, found[1], person(found[1])))
    head = _HEADED.match(sentence.text)
    away = (
        r"\b(?:is|was|are|that|which|who)\b"
        if head and "," in head[0]
        else r"\b(?:is|was|are|that|which|who|based|on|from|with|for|in|to)\b"
    )
    if head and title and sentence.start == 0 and not re.search(away, head[0][: head.start(1)]):
        clause = passive(sentence, Span(sentence.text[: head.start(1)].strip(" ,"), sentence.start), head.start(1))
        if clause:
            told.append(Told(clause, title, False, True))
    said = _APPOSED.search(sentence.text)
    if said and (
        said[1].split()[0].endswith(("ing", "ly"))
        or said[1].split()[0] in LEADS
        or said[1].split()[0].lower() in VAGUE | ADVERBS
    ):
        said = None
    if said and any(word in AUXILIARIES or word in PAST for word in said[2].split()):
        said = None
    lists = (
        bool(said and re.match(r" (?:and|or) |[^,]*, (?:and|or) ", sentence.text[said.end() :]))
        or sentence.text.count(", the ") + sentence.text.count(", a ") > 1
    )
    if (
        said
        and proper(said[1])
        and said[1].split()[0] not in ("As", "Like", "Unlike", "See", "To")
        and clear(said[2])
        and not lists
        and (said.start() == 0 or (" " in said[1] and person(said[1]) and sentence.text[said.start() - 2] != ","))
    ):
        subject = Span(said[1], sentence.start + said.start(1))
        thing, phrases = tail(sentence, words(Span(said[2], sentence.start + said.start(2))))
        if thing and thing.text and not re.match(r"(?:the|an?) (?:first|last|second|same|other|one)\b", thing.text):
            is_ = Clause(sentence, subject, "was" if person(said[1]) else "is", None, "be", thing, tuple(phrases))
            told.append(Told(is_, said[1], person(said[1])))
    return told


@lru_cache(maxsize=4096)
def facts(title: str, text: str) -> ParsedChunk:
    """The clauses of a chunk whose subjects are known."""
    told: list[Told] = []
    topic = title if ": " not in title and len(title.split()) <= 4 and proper(title) else ""
    entry = ": " not in title and 0 < len(title.split()) <= 4 and bool(_FRAGMENT.match(text))
    last, since = "", 9
    for sentence in sentences(text):
        since += 1
        told += reduced(sentence, topic or (title if ": " not in title else ""))
        clauses = read(sentence)
        if not clauses:
            continue
        clause = clauses[0]
        subject = clause.subject.text
        if specific(subject) and not (subject.endswith("s") and subject.split()[0] in ("Some", "Many")):
            name = lowered(clause.subject, sentence)
            human = person(subject) or people(subject)
            told += [Told(each, name, human) for each in clauses]
            last, since = (subject, 0) if proper(subject) and not people(subject) else ("", 9)
        elif subject in ("He", "She"):
            who = last if last and since <= 2 else topic if person(topic) else ""
            if who and (person(who) or proper(who)) and not who.lower().startswith("the "):
                told += [Told(each, who, True, True) for each in clauses]
                last, since = who, 0
        elif subject == "It" and last and since == 1 and not person(last):
            if clause.tense in ("passive", "past", "be") and clause.phrases:
                told.append(Told(clause, f"the {last[4:]}" if last.startswith("The ") else last, False, True))
        elif subject == "It" and entry and clause.tense in ("passive", "past", "third") and since > 3:
            told += [Told(each, title, False, True) for each in clauses]
    return ParsedChunk(title, text, tuple(told))


def patterns(rng: random.Random, chunk: ParsedChunk) -> Iterator[Draft]:
    """Questions about short forms, other names, and dictionary entries."""
    text = chunk.text
    for match in _SHORT.finditer(text):
        full, short = match[1], match[2]
        cut = _initials(full, short)
        if cut is not None:
            span = Span(full[cut:], match.start(1) + cut)
            yield from _stands(rng, short, span, Span(short, match.start(2)))
    for match in _STANDS.finditer(text):
        if _initials(match[2], match[1]) == 0:
            yield from _stands(rng, match[1], Span(match[2], match.start(2)), None)
    yield from _other_names(rng, text)
    yield from _entry(rng, chunk)


def _other_names(rng: random.Random, text: str) -> Iterator[Draft]:
    for match in _ALSO.finditer(text):
        name, other = match[1], Span(match[2], match.start(2))
        low = name.lower().split()
        article = low[0] in ("the", "a", "an")
        if (article or proper(name)) and specific(name) and not set(low) & AUXILIARIES:
            if len(other.text) < 3 or other.text in DETERMINERS:
                continue
            name = name[:1].lower() + name[1:] if article else name
            forms = ("What is another name for {}", "What is {} also called", "By what other name is {} known")
            yield Draft(rng.choice(forms).format(name), other, "also", (name,), f"another name for {name}")


def _entry(rng: random.Random, chunk: ParsedChunk) -> Iterator[Draft]:
    """ "A small language for …" under a headword: what is it?"""
    text, title = chunk.text, chunk.title
    found = _FRAGMENT.match(text)
    if not found or ": " in title or not 0 < len(title.split()) <= 4 or title.lower() in text[:80].lower():
        return
    parts = found[1].split()
    if len(parts) < 2 or parts[-1].endswith("ly") or set(parts) & PAST.keys():
        return
    if set(text[: found.end() + 25].split()) & AUXILIARIES:
        return
    common = title.replace(" ", "").isalpha() and title.split()[-1].islower() and not title.endswith("s")
    if text.startswith("A") and common:
        title = f"{'an' if title[0].lower() in 'aeiou' else 'a'} {title[:1].lower()}{title[1:]}"
    forms = [f"What is {title}", f"What kind of thing is {title}"]
    queries = [f"what is {title}"]
    if chunk.title.islower():
        forms += [f"What does {chunk.title} mean", f"What is meant by {chunk.title}"]
        queries += [f"define {chunk.title}", f"{chunk.title} meaning"]
    yield Draft(rng.choice(forms), Span(found[1], found.start(1)), "entry", (title,), rng.choice(queries))


def _initials(full: str, short: str) -> int | None:
    """Where in `full` the words begin whose initials are `short`."""
    starts = [found.start() for found in re.finditer(r"(?<![\w])\w|(?<=-)\w", full)]
    for start in starts:
        if full[start] == short[0] and full[start].isupper():
            part = full[start:]
            capitals = "".join(re.findall(r"\b[A-Z]", part))
            every = "".join(re.findall(r"\b\w", part))
            if short.upper() in (capitals.upper(), every.upper()):
                return start
    return None


def _stands(rng: random.Random, short: str, full: Span, back: Span | None) -> Iterator[Draft]:
    yield Draft(
        rng.choice((f"What does {short} stand for", f"What is {short} short for", f"What is the full name of {short}")),
        full,
        "stands",
        (short,),
        f"{short} stands for",
    )
    if back:
        yield Draft(
            rng.choice((f"What is the abbreviation for {full.text}", f"What is the acronym of {full.text}")),
            back,
            "stands",
            (full.text,),
            f"{full.text} abbreviation",
        )


def ask(rng: random.Random, chunk: ParsedChunk) -> list[Draft]:
    """Some questions about a chunk, in a random order."""
    found = list(patterns(rng, chunk))
    found = rng.sample(found, min(len(found), 2)) + blanks(rng, chunk)
    for fact in chunk.told:
        found += drafts(rng, fact)
    rng.shuffle(found)
    return found
