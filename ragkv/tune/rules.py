"""The rules: each makes questions of one kind from a main clause, or nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ragkv.tune.clauses import Clause, Phrase, Span
from ragkv.tune.nouns import bare, clear, counted, organisation, people, person, place, proper, specific
from ragkv.tune.words import DEFINED, INFLECTED, SYNONYMS, UNITS, Verb

_OWN = re.compile(
    r"\b(?:his|her|their|its|this|these|those|that|our|your|my|it|he|she|they|them|him|you|we|I|same|such|not|never|no|too|either|already|just|even|respectively|thine|thy|thou|thee|himself|itself|themselves|following|above|below|other|another)\b",
    re.I,
)
_AGENTIVE = frozenset(
    "write found invent argue say propose coin discover design develop create release publish introduce announce "
    "establish build compose paint direct translate conquer defeat kill appoint choose marry lead buy win".split()
)
NOUNS = {"found": "founder", "write": "author", "invent": "inventor", "create": "creator", "design": "designer",
         "develop": "developer", "discover": "discoverer", "translate": "translator", "build": "builder",
         "compose": "composer", "publish": "publisher", "direct": "director", "lead": "leader"}  # fmt: skip
_CAUSES = frozenset(
    "cause allow enable require permit want attempt learn prefer begin start continue help lead".split()
)
_HUMAN = frozenset(
    "become say go come send call speak die live reign fight flee marry bear take give bring join leave meet ask tell "
    "sing eat teach study travel arrive settle retire serve rule".split()
)
_NEEDED = frozenset("to into with from for of".split())
_STRANDED = frozenset("for from with into on to after".split())


@dataclass(frozen=True)
class Told:
    """A clause whose subject is known.

    Attributes:
        clause: As read.
        name: What to call its subject in a question.
        human: Whether the subject is a person or people.
    """

    clause: Clause
    name: str
    human: bool
    resolved: bool = False


@dataclass(frozen=True)
class Chunk:
    """A title, a text, and the clauses of the text whose subjects are known."""

    title: str
    text: str
    told: tuple[Told, ...]


@dataclass(frozen=True)
class Draft:
    """A question before its last touches.

    Attributes:
        text: With a capital and without a question mark.
        answer: Where it is answered.
        rule: Which rule made it.
        names: Parts of the question that name things.
        query: The same as typed into a search box, or "".
    """

    text: str
    answer: Span
    rule: str
    names: tuple[str, ...] = ()
    query: str = ""
    verb: str = ""


def drafts(rng: random.Random, told: Told) -> list[Draft]:
    """All questions that the rules make of a clause."""
    rules: Sequence[Callable[[random.Random, Told], Iterator[Draft]]] = (
        _subject, _object, _count, _when, _where, _agent, _why, _define, _identify, _stranded,
    )  # fmt: skip
    if told.clause.goal and told.clause.verb and told.clause.verb.base in _CAUSES:
        return []
    return [draft for rule in rules for draft in rule(rng, told) if _sound(draft)]


def _sound(draft: Draft) -> bool:
    """Whether the question does not give its answer away and reads as one."""
    low, answer = f" {draft.text.lower()} ", draft.answer.text.lower()
    size = len(draft.text.split())
    return (
        3 <= size <= 22 and 0 < len(answer.split()) <= 11 and f" {answer} " not in low
        and not re.search(r", (?:an?|the) |\b(\w+) \1\b", draft.text)
        and not any(mark in draft.text for mark in "()[]{};:\"“”<>|=\\")
        and draft.answer.text[-1] not in ",.;:(" and draft.answer.text.count("(") == draft.answer.text.count(")")
    )  # fmt: skip


def carried(text: str) -> bool:
    """Whether words of a clause may stand in a question: nothing in them points elsewhere."""
    return not _OWN.search(text) and len(text) < 90


def _verb(rng: random.Random, verb: Verb, thing: bool) -> Verb:
    """The verb or, with an object, sometimes another one."""
    others = SYNONYMS.get(verb.base, ())
    if thing and others and rng.random() < 0.4:
        base, _, particle = rng.choice(others).partition(" ")
        found = INFLECTED.get(base)
        if found:
            more = f" {particle}" if particle else ""
            return Verb(found.base + more, found.past + more, found.participle + more, found.third + more)
    return verb


def _rest(rng: random.Random, told: Told, without: Phrase | None = None, least: int = 0) -> str:
    """Object and phrases as a question repeats them; some phrases are left out."""
    clause = told.clause
    kept = [clause.object.text] if clause.object else []
    most = max(least, rng.choice((0, 1, 1, 2, 3)))
    for each in clause.phrases:
        if each is without or (each.kind == "agent" and without is not None):
            continue
        if (
            not carried(each.body.text)
            or len(each.body.text.split()) > 8
            or (most <= 0 and each.preposition not in _NEEDED)
        ):
            break
        kept.append(f"{each.preposition} {each.body.text}")
        most -= 1
    return " ".join(kept)


def asked(rng: random.Random, told: Told, rest: str) -> str:
    """Auxiliary, subject, verb and rest, in the order of a question."""
    clause = told.clause
    if clause.verb is None or clause.tense == "be":
        return f"{clause.auxiliary} {told.name} {rest}".strip()
    if clause.tense in ("passive", "perfect"):
        return f"{clause.auxiliary} {told.name} {clause.verb.participle} {rest}".strip()
    if clause.tense == "modal":
        return f"{clause.auxiliary} {told.name} {clause.verb.base} {rest}".strip()
    support = {"past": "did", "third": "does", "base": "do"}[clause.tense]
    return f"{support} {told.name} {_verb(rng, clause.verb, clause.object is not None).base} {rest}".strip()


def predicate(rng: random.Random, told: Told, rest: str, plain: bool = False) -> str:
    """Verb and rest as they follow "who", "what" or "that"."""
    clause = told.clause
    if clause.verb is None or clause.tense == "be":
        return f"{clause.auxiliary} {rest}".strip()
    verb = clause.verb if plain else _verb(rng, clause.verb, clause.object is not None)
    if clause.tense == "passive":
        return f"{'was' if clause.auxiliary in ('was', 'were') else 'is'} {clause.verb.participle} {rest}".strip()
    if clause.tense == "perfect":
        return f"has {verb.participle} {rest}".strip()
    if clause.tense == "modal":
        return f"{clause.auxiliary} {verb.base} {rest}".strip()
    return f"{verb.past if clause.tense == 'past' else verb.third} {rest}".strip()


def _whole(told: Told) -> bool:
    """Whether object and verb may be repeated in a question."""
    thing = told.clause.object
    return thing is None or (carried(thing.text) and clear(thing.text) and len(thing.text.split()) <= 8)


def _subject(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause = told.clause
    if told.resolved or clause.tense == "be" or clause.verb is None or not _whole(told):
        return
    answer = bare(clause.subject)
    named = proper(answer.text) and not people(answer.text)
    if not clear(clause.subject.text) or len(answer.text.split()) > 6 or not (named or specific(clause.subject.text)):
        return
    rest = _rest(rng, told, least=1)
    content = [word for word in rest.split() if len(word) > 3 or word[:1].isupper() or word[:1].isdigit()]
    if len(content) < (2 if named else 3) or (
        clause.tense == "passive" and not any(w[:1].isupper() or w[:1].isdigit() for w in content)
    ):
        return
    noun = organisation(answer.text)
    who = told.human or (
        named
        and clause.tense != "passive"
        and (clause.verb.base in _AGENTIVE or (clause.tense == "past" and clause.verb.base in _HUMAN))
    )
    opening = f"Which {noun}" if noun and rng.random() < 0.6 else "Who" if who else "What"
    says = predicate(rng, told, rest)
    noun_of = NOUNS.get(clause.verb.base)
    query = (
        f"{noun_of} of {clause.object.text}"
        if noun_of and clause.object and clause.tense == "past"
        else f"{'who' if who else 'what'} {says}"
    )
    names = tuple(
        each.text for each in (clause.object, *(phrase.body for phrase in clause.phrases)) if each and each.text in rest
    )
    yield Draft(f"{opening} {says}", answer, "subject", names, query, clause.verb.base)
    if noun_of and clause.object and who and clause.tense == "past" and specific(clause.object.text):
        yield Draft(
            f"Who {'is' if rng.random() < 0.4 else 'was'} the {noun_of} of {clause.object.text}",
            answer,
            "subject",
            (clause.object.text,),
            query,
            clause.verb.base,
        )


def _object(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause, thing = told.clause, told.clause.object
    if thing is None or clause.verb is None or clause.tense in ("passive", "be", "modal") or not clear(thing.text):
        return
    if (
        not carried(thing.text)
        or counted(thing.text)
        or clause.verb.base
        in ("have", "become", "want", "remain", "appear", "get", "put", "go", "come", "look", "die", "live")
    ):
        return
    answer = bare(thing)
    if (
        len(answer.text.split()) > 7
        or answer.text.lower().endswith(("ly", "ing", "ed"))
        or answer.text.split()[0].endswith("ly")
    ):
        return
    if not (proper(answer.text) or len(answer.text) > 4) or re.match(
        r"(?:to|not|very|more|less|so|too|well|able) ", answer.text
    ):
        return
    extra = [
        each
        for each in clause.phrases
        if carried(each.body.text) and len(each.body.text.split()) < 7 and each.kind != "agent"
    ]
    said = " ".join(f"{each.preposition} {each.body.text}" for each in extra[:2])
    if (not said and not (proper(told.name) and clause.tense == "past" and clause.verb.base in _AGENTIVE)) or (
        clause.listed and not clause.phrases
    ):
        return
    who = person(answer.text)
    support = asked(rng, Told(_without(clause), told.name, told.human), said)
    names = (told.name, *(each.body.text for each in extra[:2]))
    yield Draft(
        f"{'Who' if who else 'What'} {support}",
        answer,
        "object",
        names,
        f"{told.name} {clause.verb.base} {said}".strip(),
        clause.verb.base,
    )
    if clause.tense == "past" and proper(told.name) and not who and clause.verb.base in _AGENTIVE:
        yield Draft(
            f"What was {clause.verb.participle} by {told.name} {said}".strip(),
            answer,
            "object",
            names,
            "",
            clause.verb.base,
        )


def _without(clause: Clause) -> Clause:
    return Clause(clause.sentence, clause.subject, clause.auxiliary, clause.verb, clause.tense, None, ())


def _count(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause = told.clause
    sources = [(clause.object, ""), *((each.body, each.preposition) for each in clause.phrases)]
    for span, preposition in sources:
        if span is None or not (found := counted(span.text)):
            continue
        number, noun = found
        answer = Span(number, span.start + span.text.find(number))
        more = span.text[span.text.find(noun, span.text.find(number)) + len(noun) :].strip()
        others = [
            e
            for e in clause.phrases
            if e.body is not span and carried(e.body.text) and len(e.body.text.split()) < 7 and e.kind != "agent"
        ]
        said = " ".join(f"{e.preposition} {e.body.text}" for e in others[:1])
        if (more and (not more.startswith("of ") or not carried(more))) or clause.tense == "be":
            continue
        base = Told(_without(clause), told.name, told.human)
        if preposition in ("for", "") and noun.split()[0] in UNITS and noun.split()[-1] == noun and not more:
            if preposition == "for" or (
                clause.verb and clause.verb.base in ("live", "spend", "last", "take", "wait", "serve")
            ):
                thing = clause.object.text if clause.object and clause.object is not span else ""
                if carried(thing):
                    yield Draft(
                        f"How long {asked(rng, base, f'{thing} {said}'.strip())}",
                        Span(f"{number} {noun}", answer.start),
                        "long",
                        (told.name,),
                        f"how long {told.name} {clause.verb.past if clause.verb else ''}",
                        clause.verb.base if clause.verb else "",
                    )
            continue
        if preposition == "" and clause.verb:
            body = f"{noun} {more}".strip()
            yield Draft(
                f"How many {body} {asked(rng, base, said)}",
                answer,
                "count",
                (told.name, noun),
                f"number of {body} {told.name}",
                clause.verb.base,
            )


def _when(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause = told.clause
    for each in clause.phrases:
        if each.kind != "date" or each.preposition not in ("in", "on", "during") or not _whole(told):
            continue
        if clause.tense in ("be", "modal") or clause.verb is None:
            continue
        agents = [
            other
            for other in clause.phrases
            if other.kind == "agent" and clear(other.body.text) and len(other.body.text.split()) < 6
        ]
        rest = _rest(rng, told, each)
        if re.search(
            r"\d{4}| and [A-Z]?[a-z]+ \d",
            " ".join((rest, *(other.body.text for other in clause.phrases if other is not each))),
        ):
            continue
        if not rest and clause.verb.base not in (
            "die",
            "bear",
            "release",
            "found",
            "publish",
            "begin",
            "end",
            "start",
            "create",
            "establish",
            "introduce",
            "complete",
            "develop",
            "write",
            "invent",
            "build",
            "launch",
            "destroy",
            "close",
            "open",
            "retire",
            "win",
            "form",
            "appear",
        ):
            continue
        if agents and rng.random() < 0.4:
            rest = f"{rest} by {agents[0].body.text}".strip()
        year = bool(re.fullmatch(r"\d{4}", each.body.text))
        opening = (
            rng.choice(("In what year", "In which year", "What year", "When", "When", "When"))
            if year
            else "On what date"
            if re.search(r"\d{4}", each.body.text)
            and re.match(r"\d|[A-Z]\w+ \d{1,2}\b", each.body.text)
            and rng.random() < 0.3
            else "When"
        )
        says = asked(rng, told, rest)
        thing = clause.object.text if clause.object else ""
        query = f"when {says.split(' ', 1)[0]} {told.name} {clause.verb.participle if clause.tense == 'passive' else clause.verb.base} {thing}".strip()
        names = tuple(part for part in (told.name, thing) if part)
        answer = Span(
            re.sub(r"^the ", "", each.body.text), each.body.start + (4 if each.body.text.startswith("the ") else 0)
        )
        yield Draft(f"{opening} {says}", answer, "when", names, query, clause.verb.base)


def _where(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause = told.clause
    for each in clause.phrases:
        if each.kind != "place" or clause.tense in ("be", "modal") or clause.verb is None or not _whole(told):
            continue
        known = place(each.body.text) or clause.verb.base in (
            "locate",
            "bear",
            "die",
            "live",
            "settle",
            "bury",
            "hold",
            "study",
        )
        rest = _rest(rng, told, each)
        if not known or (
            not rest
            and clause.verb.base
            not in (
                "locate",
                "bear",
                "die",
                "live",
                "hold",
                "settle",
                "begin",
                "originate",
                "build",
                "find",
                "arrive",
                "found",
                "publish",
                "develop",
            )
        ):
            continue
        yield Draft(
            f"Where {asked(rng, told, rest)}",
            bare(each.body),
            "where",
            (told.name,),
            f"where {told.name} {clause.verb.past}",
            clause.verb.base,
        )


def _agent(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause = told.clause
    if clause.tense != "passive" or clause.verb is None or clause.object is not None:
        return
    for at, each in enumerate(clause.phrases):
        answer = bare(each.body)
        if at > 1 or (at == 1 and not clause.phrases[0].kind):
            return
        if (
            each.kind != "agent"
            or not clear(each.body.text)
            or not carried(each.body.text)
            or len(answer.text.split()) > 6
            or answer.text.split()[0].endswith("ing")
        ):
            continue
        if (clause.listed and each is clause.phrases[-1]) or answer.text in ("default", "means", "definition", "hand"):
            continue
        if " and " in answer.text and not (
            people(answer.text) or all(proper(p.strip()) for p in answer.text.split(" and "))
        ):
            continue
        if " " not in answer.text and answer.text.islower() and answer == each.body:
            continue
        leading = re.match(r"(?:[a-z]+ ){1,3}(?=[A-Z][\w.]+ [A-Z])", answer.text)
        if leading and clause.verb.base in _AGENTIVE and not re.search(r"\b(?:of|and)\b", leading[0]):
            answer = Span(answer.text[leading.end() :], answer.start + leading.end())
        noun = organisation(answer.text) or ("company" if answer.text.endswith(" company") else "")
        who = person(answer.text) or people(answer.text) or (clause.verb.base in _AGENTIVE and proper(answer.text))
        rest = " ".join(
            f"{o.preposition} {o.body.text}"
            for o in clause.phrases
            if o is not each and carried(o.body.text) and len(o.body.text.split()) < 7 and rng.random() < 0.5
        )
        verb = _verb(rng, clause.verb, True)
        was, active = clause.auxiliary, verb.past if clause.auxiliary in ("was", "were") else verb.third
        opening = f"Which {noun}" if noun and rng.random() < 0.6 else "Who" if who else "What"
        noun_of = NOUNS.get(clause.verb.base)
        query = f"{noun_of} of {told.name}" if noun_of else f"{told.name} {clause.verb.participle} by"
        yield Draft(
            f"{opening} {active} {told.name} {rest}".strip(), answer, "agent", (told.name,), query, clause.verb.base
        )
        if who:
            yield Draft(
                f"By whom {was} {told.name} {clause.verb.participle} {rest}".strip(),
                answer,
                "agent",
                (told.name,),
                "",
                clause.verb.base,
            )
        if noun_of and who:
            yield Draft(f"Who was the {noun_of} of {told.name}", answer, "agent", (told.name,), query, clause.verb.base)


def _why(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause = told.clause
    if clause.because is None or (not _whole(told) and clause.tense != "be"):
        return
    if clause.object and not carried(clause.object.text):
        return
    yield Draft(
        f"Why {asked(rng, told, _rest(rng, told, least=2))}",
        clause.because,
        "why",
        (told.name,),
        f"why {told.name} {clause.object.text if clause.object else ''}".strip(),
        clause.verb.base if clause.verb else "",
    )


def _define(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause, thing = told.clause, told.clause.object
    if (
        clause.tense != "be"
        or thing is None
        or not re.match(r"(?:an?|the) ", thing.text)
        or clause.auxiliary not in ("is", "was")
    ):
        return
    answer = bare(thing)
    parts = re.split(r" of | to |, ", answer.text)[0].split()
    if (
        not 1 <= len(answer.text.split()) <= 9
        or parts[-1].lower() in DEFINED
        or not carried(answer.text)
        or not clear(thing.text)
    ):
        return
    if (len(parts) < 2 and " of " not in answer.text) or answer.text.endswith(
        (" and", " or", "er than", "ly", "ed", "est")
    ):
        return
    low = told.name.split()
    if not (proper(told.name) or (low[0] in ("a", "an") and len(low) <= 5) or told.resolved):
        return
    name = told.name
    who = told.human or person(name)
    forms = (
        (f"Who {clause.auxiliary} {name}",)
        if who
        else (
            f"What {clause.auxiliary} {name}",
            f"What {clause.auxiliary} {name}",
            f"What kind of thing is {name}",
            f"What is meant by {name}",
        )
    )
    answer = longer(clause, answer)
    yield Draft(
        rng.choice(forms),
        answer,
        "define",
        (name,),
        rng.choice((f"{name} meaning", f"define {name}", f"what is {name}", name)),
    )


def longer(clause: Clause, answer: Span) -> Span:
    """A definition with the phrase after its noun, if that is short."""
    if clause.phrases and not clause.listed:
        each = clause.phrases[0]
        gap = each.body.start - answer.end
        if gap == len(each.preposition) + 2 and clear(each.body.text) and carried(each.body.text):
            longer = clause.sentence.text[answer.start - clause.sentence.start : each.body.end - clause.sentence.start]
            if len(longer.split()) <= 8:
                return Span(longer, answer.start)
    return answer


def _identify(rng: random.Random, told: Told) -> Iterator[Draft]:
    """ "Paris is the capital of France": which city is it?"""
    clause, thing = told.clause, told.clause.object
    if clause.tense != "be" or thing is None or told.resolved or not carried(thing.text) or not clear(thing.text):
        return
    said = " ".join(
        (thing.text, *(f"{e.preposition} {e.body.text}" for e in clause.phrases[:1] if carried(e.body.text)))
    )
    content = [word for word in said.split() if word[:1].isupper() or len(word) > 4]
    if thing.text.startswith("the ") and proper(clause.subject.text) and len(content) >= 3 and " of " in f" {said} ":
        who = person(clause.subject.text)
        yield Draft(
            f"{'Who' if who else 'What'} {clause.auxiliary} {said}",
            bare(clause.subject),
            "identify",
            (thing.text,),
            said.removeprefix("the "),
        )
    if (
        clause.subject.text.startswith("The ")
        and " of " in clause.subject.text
        and (proper(thing.text) or thing.text[:1].isdigit())
    ):
        who = person(thing.text)
        yield Draft(
            f"{'Who' if who else 'What'} {clause.auxiliary} {told.name}",
            bare(thing),
            "identify",
            (told.name,),
            told.name.removeprefix("the "),
        )


def _stranded(rng: random.Random, told: Told) -> Iterator[Draft]:
    """ "UNIX was derived from MULTICS": what was it derived from?"""
    clause = told.clause
    if clause.tense != "passive" or clause.verb is None or clause.object is not None or not clause.phrases:
        return
    each = clause.phrases[0]
    answer = bare(each.body)
    if each.preposition not in _STRANDED or each.kind or not clear(each.body.text) or not carried(each.body.text):
        return
    if clause.listed and len(clause.phrases) == 1:
        return
    if (
        len(answer.text.split()) > 7
        or answer.text.split()[0].endswith("ing")
        or (
            each.preposition == "to"
            and answer.text.split()[0].islower()
            and not each.body.text.startswith(("the ", "a "))
        )
    ):
        return
    opening = "Who" if person(answer.text) else "What"
    yield Draft(
        f"{opening} {clause.auxiliary} {told.name} {clause.verb.participle} {each.preposition}",
        answer,
        "stranded",
        (told.name,),
        f"{told.name} {clause.verb.participle} {each.preposition}",
        clause.verb.base,
    )
