"""Questions that keep the order of the sentence: a part of it with a date, a number or a name asked for."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from ragkv.evaluation.clauses import Span, dated, sentences
from ragkv.evaluation.drafts import Draft, ParsedChunk, carried
from ragkv.evaluation.lexicon import AUXILIARIES, MONTHS, NUMBERS, PAST, SUBORDINATORS, THIRD, VERBS
from ragkv.evaluation.noun_phrases import counted, person

_PART = re.compile(
    r"(?:^|(?<=[,;:] )|(?<=— ))(?:(?:and|but|so|when|while|after|before|because|although|that|where|since) )?"
    r"([^,;:()\[\]\"“”—]{25,110})(?=[,;:.!]|$| —)"
)
_BEFORE = frozenset("about nearly almost over with for into by have approximately exactly least most".split())
_DATED = re.compile(rf"\b(?:in|on|since|until|by|from) (?=(?:{MONTHS}|the )?.{{0,3}}\d)")
_NUMBER = re.compile(rf"(?<![\d.,$-])\b(?:\d[\d,]*|{'|'.join(NUMBERS)}) [a-z]")
_PERSON = re.compile(r"(?:[A-Z][a-z]+|[A-Z]\.)(?: (?:[A-Z][a-z]+|[A-Z]\.|de|von|van)){1,3}")


def blanks(rng: random.Random, chunk: ParsedChunk, most: int = 3) -> list[Draft]:
    """Some questions of this kind, each from another sentence."""
    found = [draft for sentence in sentences(chunk.text) for draft in _of(rng, sentence)]
    return rng.sample(found, min(most, len(found)))


def _of(rng: random.Random, sentence: Span) -> Iterator[Draft]:
    if '"' in sentence.text or "“" in sentence.text or sentence.text.endswith("?"):
        return
    for match in _PART.finditer(sentence.text):
        part, start = match[1].strip().rstrip("."), sentence.start + match.start(1)
        words = part.split()
        if not 5 <= len(words) <= 16 or not carried(part) or not _said(words) or words[0].lower() in SUBORDINATORS:
            continue
        if words[0].endswith(("ing", "ed", "ly", "n't", "n’t")) or (
            words[0].islower() and words[0] not in ("the", "a", "an")
        ):
            continue
        if match.start(1) == 0 and words[0].lower() not in ("the", "a", "an") and not words[0][:1].isupper():
            continue
        if words[0].split("-")[0] in ("The", "A", "An"):
            part = part[0].lower() + part[1:]
        yield from _date(rng, part, start)
        yield from _number(part, start)
        yield from _person(rng, part, start)


def _said(words: list[str]) -> bool:
    """Whether there is a verb."""
    return any(word in AUXILIARIES or word in PAST or word in THIRD for word in words[1:])


def _date(rng: random.Random, part: str, start: int) -> Iterator[Draft]:
    for match in _DATED.finditer(part):
        value = dated(part[match.end() :])
        if not value or not re.search(r"\d", value) or part[match.end() + len(value) :].startswith(("-", "–")):
            continue
        answer = Span(value.removeprefix("the "), start + match.end() + 4 * value.startswith("the "))
        before, after = part[: match.start()].strip(), part[match.end() + len(value) :]
        if re.search(r"\d{4}", before + after) or len(before.split()) < 3 or len(after.split()) > 8:
            continue
        asks = (
            "what year"
            if re.fullmatch(r"\d{4}", value)
            else "what date"
            if re.search(r"\d (?:of )?[A-Z]|[a-z] \d{1,2}\b", value)
            else ""
        )
        text = f"{before} {match[0].strip()} {asks}{after}" if asks else f"{before} when{after}"
        yield Draft(
            text[:1].upper() + text[1:], answer, "blank", (), f"{before}{after} {rng.choice(('year', 'date', 'when'))}"
        )


def _number(part: str, start: int) -> Iterator[Draft]:
    for match in _NUMBER.finditer(part):
        pair = counted(part[match.start() :])
        before = part[: match.start()].strip()
        last = before.split()[-1] if before else ""
        if pair and not (last in AUXILIARIES or last in PAST or last in THIRD or last in VERBS or last in _BEFORE):
            continue
        if (
            pair
            and len(before.split()) >= 2
            and before.split()[-1]
            not in ("of", "the", "and", "or", "to", "page", "version", "chapter", "verse", "than")
        ):
            rest = part[match.start() + len(pair[0]) :]
            text = f"{before} how many{rest}"
            if before in ("There are", "There were"):
                noun = pair[1].split()
                text = f"How many {' '.join(noun)} {before.split()[1]} there{rest[len(pair[1]) + 1 :]}"
            yield Draft(
                text[:1].upper() + text[1:],
                Span(pair[0], start + match.start()),
                "blank",
                (),
                f"how many{rest} {before}",
            )


def _person(rng: random.Random, part: str, start: int) -> Iterator[Draft]:
    for match in _PERSON.finditer(part):
        if not person(match[0]):
            continue
        before, after = part[: match.start()].strip(), part[match.end() :]
        answer = Span(match[0], start + match.start())
        following = after.split()[0] if after.split() else ""
        if not before and (following in AUXILIARIES or following in PAST):
            yield Draft(f"Who{after}", answer, "who", (), f"who{after}")
        elif before.endswith(" by") and not after:
            text = f"{before} whom" if rng.random() < 0.5 else f"{before} who"
            yield Draft(text[:1].upper() + text[1:], answer, "blank", (), f"{before} who")
