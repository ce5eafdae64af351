"""What the rules share: what is told, what is asked, and how words of a clause stand in a question."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from ragkv.evaluation.clauses import Clause, Phrase, Span
from ragkv.evaluation.lexicon import INFLECTED, SYNONYMS, Verb
from ragkv.evaluation.noun_phrases import clear

_OWN = re.compile(
    r"\b(?:his|her|their|its|this|these|those|that|our|your|my|it|he|she|they|them|him|you|we|I|same|such|not|never|no|"
    r"too|either|already|just|even|respectively|thine|thy|thou|thee|himself|itself|themselves|following|above|below|"
    r"other|another)\b",
    re.I,
)
_ODD = re.compile(
    r"\b(?:and|or|the|an?|than|of|which|is|are|was|were)$|, (?:an?|the) |\b(\w+) \1\b"
    r"|^\w+ (?:is|are|was|were)$"
)
AGENTIVE = frozenset(
    "write found invent argue say propose coin discover design develop create release publish introduce announce "
    "establish build compose paint direct translate conquer defeat kill appoint choose marry lead buy win".split()
)
NOUNS = {"found": "founder", "write": "author", "invent": "inventor", "create": "creator", "design": "designer",
         "develop": "developer", "discover": "discoverer", "translate": "translator", "build": "builder",
         "compose": "composer", "publish": "publisher", "direct": "director", "lead": "leader"}  # fmt: skip
CAUSES = frozenset("cause allow enable require permit want attempt learn prefer begin start continue help lead".split())
HUMAN = frozenset(
    "become say go come send call speak die live reign fight flee marry bear take give bring join leave meet ask tell "
    "sing eat teach study travel arrive settle retire serve rule".split()
)
NEEDED = frozenset("to into with from for of".split())
STRANDED = frozenset("for from with into on to after".split())


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
class ParsedChunk:
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


def sound(draft: Draft) -> bool:
    """Whether the question does not give its answer away and reads as one."""
    low, answer = f" {draft.text.lower()} ", draft.answer.text.lower()
    size = len(draft.text.split())
    return (
        3 <= size <= 22 and 0 < len(answer.split()) <= 11 and f" {answer} " not in low
        and not _ODD.search(draft.text)
        and not any(mark in draft.text for mark in "()[]{};:\"“”<>|=\\")
        and draft.answer.text[-1] not in ",.;:(" and draft.answer.text.count("(") == draft.answer.text.count(")")
    )  # fmt: skip


def carried(text: str) -> bool:
    """Whether words of a clause may stand in a question: nothing in them points elsewhere."""
    return not _OWN.search(text) and len(text) < 90


def other_verb(rng: random.Random, verb: Verb, thing: bool) -> Verb:
    """The verb or, with an object, sometimes another one."""
    others = SYNONYMS.get(verb.base, ())
    if thing and others and rng.random() < 0.4:
        base, _, particle = rng.choice(others).partition(" ")
        found = INFLECTED.get(base)
        if found:
            more = f" {particle}" if particle else ""
            return Verb(found.base + more, found.past + more, found.participle + more, found.third + more)
    return verb


def rest_of(rng: random.Random, told: Told, without: Phrase | None = None, least: int = 0) -> str:
    """Object and phrases as a question repeats them; some phrases are left out."""
    clause = told.clause
    kept = [clause.object.text] if clause.object else []
    most = max(least, rng.choice((0, 1, 1, 2, 3)))
    for phrase in clause.phrases:
        if phrase is without or (phrase.kind == "agent" and without is not None):
            continue
        if (
            not carried(phrase.body.text)
            or re.search(r"\d and [a-z]+ \d", phrase.body.text)
            or len(phrase.body.text.split()) > 8
            or (most <= 0 and phrase.preposition not in NEEDED)
            or phrase.body.text.split()[0].endswith("ing")
        ):
            break
        kept.append(f"{phrase.preposition} {phrase.body.text}")
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
    return f"{support} {told.name} {other_verb(rng, clause.verb, clause.object is not None).base} {rest}".strip()


def predicate(rng: random.Random, told: Told, rest: str, plain: bool = False) -> str:
    """Verb and rest as they follow "who", "what" or "that"."""
    clause = told.clause
    if clause.verb is None or clause.tense == "be":
        return f"{clause.auxiliary} {rest}".strip()
    verb = clause.verb if plain else other_verb(rng, clause.verb, clause.object is not None)
    if clause.tense == "passive":
        return f"{'was' if clause.auxiliary in ('was', 'were') else 'is'} {clause.verb.participle} {rest}".strip()
    if clause.tense == "perfect":
        return f"has {verb.participle} {rest}".strip()
    if clause.tense == "modal":
        return f"{clause.auxiliary} {verb.base} {rest}".strip()
    return f"{verb.past if clause.tense == 'past' else verb.third} {rest}".strip()


def repeatable(told: Told) -> bool:
    """Whether object and verb may be repeated in a question."""
    thing = told.clause.object
    return thing is None or (carried(thing.text) and clear(thing.text) and len(thing.text.split()) <= 8)


def leading(clause: Clause) -> list[Phrase]:
    """The first phrases that a question may repeat."""
    kept: list[Phrase] = []
    for phrase in clause.phrases:
        if not carried(phrase.body.text) or len(phrase.body.text.split()) > 6 or phrase.kind == "agent":
            break
        kept.append(phrase)
    return kept


def without_object(clause: Clause) -> Clause:
    return Clause(clause.sentence, clause.subject, clause.auxiliary, clause.verb, clause.tense, None, ())
