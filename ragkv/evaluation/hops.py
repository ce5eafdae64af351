"""Questions over two sentences: a name described by another sentence, and comparisons of two chunks."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ragkv.evaluation.drafts import NOUNS, Draft, ParsedChunk, Told, carried, predicate
from ragkv.evaluation.lexicon import AUXILIARIES, DEFINED
from ragkv.evaluation.noun_phrases import bare, clear, organisation, person, proper
from ragkv.evaluation.who import longer

_WEAK = frozenset(
    "have be use see say contain include make give take get come go call name become want keep put".split()
)

_ENTRY = re.compile(r"(?:An?|The) ([^.,;:()\[\]\"“]{15,110})[.,;(]")
_BRIDGED = frozenset("subject agent when where object count long why stranded who stands".split())
_ADJECTIVES = ("ed", "ing", "ly", "al", "ic", "ous", "ble", "ive")


def kinds(chunks: Sequence[ParsedChunk]) -> dict[str, tuple[str, int]]:
    """What things are, with the number of the chunk that says so: "language" for "X is a programming language"."""
    found: dict[str, tuple[str, int]] = {}
    for n, chunk in enumerate(chunks):
        for told in chunk.told:
            thing = told.clause.object
            if told.clause.tense != "be" or thing is None or not proper(told.name) or not re.match(r"an? ", thing.text):
                continue
            words = re.split(r" of | to ", thing.text)[0].split()
            noun = words[-1].isalpha() and words[-1].islower() and words[-1] not in DEFINED
            if 2 <= len(words) <= 5 and noun and not words[-1].endswith(_ADJECTIVES):
                found[told.name] = (words[-1], n)
    return found


@dataclass(frozen=True)
class Description:
    """What a sentence says of a name, as a noun phrase. chunk, start, end: where the sentence stands."""

    said: str
    chunk: int
    start: int
    end: int


def bridges(
    rng: random.Random, chunks: Sequence[ParsedChunk], asked: Sequence[tuple[Draft, int]], most: int = 12
) -> list[tuple[Draft, int]]:
    """Questions with a name replaced by what another sentence says of it.

    Args:
        rng: Chooses.
        chunks: The context.
        asked: Questions about it with the numbers of their chunks.
        most: How many to make.
    """
    described = _descriptions(rng, chunks)
    found: list[tuple[Draft, int]] = []
    for draft, n in asked:
        if draft.rule not in _BRIDGED:
            continue
        for name in described.keys() & set(draft.names):
            for fact in described[name]:
                if (fact.chunk != n or not fact.start <= draft.answer.start < fact.end) and (
                    new := _renamed(draft, name, fact.said)
                ):
                    found.append((new, n))
    return rng.sample(found, min(most, len(found)))


def _descriptions(rng: random.Random, chunks: Sequence[ParsedChunk]) -> dict[str, list[Description]]:
    types = kinds(chunks)
    found: dict[str, list[Description]] = defaultdict(list)
    for n, chunk in enumerate(chunks):
        head = _ENTRY.match(chunk.text)
        if head and ": " not in chunk.title and proper(chunk.title) and _exact(head[1]):
            found[chunk.title].append(Description(f"the {head[1]}", n, 0, head.end()))
        for told in chunk.told:
            sentence = told.clause.sentence
            pairs = _made(told)
            if proper(told.name) and not told.name.startswith("the ") and told.clause.tense != "modal":
                pairs.append((told.name, _described(rng, told, types.get(told.name, ("", 0))[0])))
            for name, said in pairs:
                if said:
                    found[name].append(Description(said, n, sentence.start, sentence.end))
    return found


def _exact(said: str) -> bool:
    """Whether the first words of an entry tell it from others."""
    words = said.split()
    return (
        4 <= len(words) <= 13 and not set(words) & AUXILIARIES and bool(re.search(r"[A-Z\d]", said)) and carried(said)
    )


def _renamed(draft: Draft, name: str, said: str) -> Draft | None:
    """A question about a name with its description in its place."""
    pattern = re.compile(rf"(?:\b[Tt]he )?(?<!\w){re.escape(name)}(?![\w'’-])")
    if (
        len(pattern.findall(draft.text)) != 1
        or draft.answer.text.lower() in said.lower()
        or name.lower() in said.lower()
    ):
        return None
    text = pattern.sub(lambda _: said, draft.text)
    shared = {word for word in said.lower().split() if len(word) > 4} & set(pattern.sub("", draft.text).lower().split())
    return replace(draft, text=text, query="", names=()) if len(text.split()) <= 24 and len(shared) < 2 else None


def _described(rng: random.Random, told: Told, kind: str) -> str:
    """ "the person who wrote X", from a sentence with this subject."""
    clause, thing = told.clause, told.clause.object
    if clause.tense == "be" and thing and not told.resolved and carried(thing.text) and clear(thing.text):
        said = longer(clause, bare(thing)).text
        if (
            re.search(r" (?:of|in|for|from) .*[A-Z]", f" {said}")
            and not said.endswith((" and", "ed"))
            and not clause.listed
        ):
            return f"the {said}"
    if clause.verb is None or clause.verb.base in _WEAK or clause.tense not in ("past", "passive"):
        return ""
    place = clause.phrases[0].body.text if clause.phrases else ""
    exact = thing.text if thing else place
    if not re.search(r"[A-Z]\w|\d{4}", exact) or not carried(exact) or len(exact.split()) > 7:
        return ""
    if thing and thing.text.split()[0].lower() in ("a", "an") and not place:
        return ""
    said = predicate(rng, told, thing.text if thing else f"{clause.phrases[0].preposition} {place}", plain=True)
    if thing and clause.verb.base in NOUNS and person(told.name) and rng.random() < 0.5:
        return f"the {NOUNS[clause.verb.base]} of {thing.text}"
    if told.human and person(told.name):
        return f"the person who {said}"
    noun = organisation(told.name) or kind
    return f"the {noun} that {said}" if noun else ""


def _made(told: Told) -> list[tuple[str, str]]:
    """(name, description) of what a sentence says was made by somebody."""
    clause = told.clause
    if clause.tense != "passive" or clause.verb is None or clause.object is not None or told.resolved:
        return []
    for phrase in clause.phrases:
        name = phrase.body.text
        if (
            phrase.kind == "agent"
            and proper(name)
            and not name.startswith("the ")
            and re.search(r"[A-Z]", told.name)
            and not clause.listed
        ):
            if person(name) and clause.verb.base in NOUNS:
                return [(name, f"the {NOUNS[clause.verb.base]} of {told.name}")]
            noun = "person who" if person(name) else f"{organisation(name)} that" if organisation(name) else ""
            if noun:
                return [(name, f"the {noun} {clause.verb.past} {told.name}")]
    return []


def comparisons(rng: random.Random, chunks: Sequence[ParsedChunk]) -> list[tuple[str, str, int]]:
    """(question, answer, chunk): which of two was first, and whether two were of one year or one kind."""
    dated: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for n, chunk in enumerate(chunks):
        for told in chunk.told:
            clause = told.clause
            years = [
                p.body.text for p in clause.phrases if p.kind == "date" and re.fullmatch(r"1\d{3}|20\d\d", p.body.text)
            ]
            whole = clause.tense == "passive" and clause.verb is not None and clause.object is None
            if len(years) == 1 and whole and clause.verb and proper(told.name) and clause.subject.text.count(" ") < 4:
                dated[clause.verb.participle].append((told.name, int(years[0]), n))
    made = _alike(kinds(chunks), chunks)
    for verb, rows in sorted(dated.items()):
        for first in rows:
            for second in rows:
                if first[0] != second[0] and first[2] != second[2] and first[1] != second[1]:
                    made += _which(rng, verb, first, second)
    return made


def _alike(types: dict[str, tuple[str, int]], chunks: Sequence[ParsedChunk]) -> list[tuple[str, str, int]]:
    """Whether two things of two chunks are of one kind."""
    made = []
    rows = sorted(types.items())
    for name, (kind, n) in rows:
        for other, (same, m) in rows:
            if name == other or n == m:
                continue
            if kind == same or kind not in chunks[m].text.lower():
                several = (
                    f"{kind[:-1]}ies"
                    if kind.endswith("y") and kind[-2] not in "aeo"
                    else f"{kind}es"
                    if kind.endswith(("s", "x", "ch", "sh"))
                    else f"{kind}s"
                )
                made.append((f"Are {name} and {other} both {several}?", "yes" if kind == same else "no", n))
    return made


def _which(
    rng: random.Random, verb: str, first: tuple[str, int, int], second: tuple[str, int, int]
) -> list[tuple[str, str, int]]:
    early = rng.random() < 0.6
    one = min(first, second, key=lambda row: row[1]) if early else max(first, second, key=lambda row: row[1])
    order = "first" if early else "later"
    return [
        (f"Which was {verb} {order}, {first[0]} or {second[0]}?", re.sub("^the ", "", one[0]), one[2]),
        (f"Were {first[0]} and {second[0]} {verb} in the same year?", "no", first[2]),
    ]
