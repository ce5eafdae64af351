"""Sentences, words and dates with their places, and what a main clause is made of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ragkv.evaluation.lexicon import MONTHS, PREPOSITIONS, VERBS, Verb

_ABBREVIATED = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Prof|Jr|Sr|vs|etc|e\.g|i\.e|cf|pp?|No|vol|ed|eds|Vol|ca|approx|Inc|Ltd|Co|Corp|op|al|Gen|Col"
    r"|Jan|Feb|Aug|Sept|Oct|Nov|Dec|n|v|a|U\.S|U\.K|ibid|fig|Fig)|\b[A-Z])\.$"
)
_END = re.compile(r"[.!?][\"”’')\]]*(?=\s+[\"“‘'(\[]?[A-Z0-9])|\n\s*\n?")
_WORD = re.compile(
    r"(?:Dr|Mr|Mrs|Ms|St|Prof|Jr)\.|(?:[A-Z]\.){2,}|[A-Z]\.(?=\s[A-Z])|\d+(?:,\d+)*(?:\.\d+)*(?:%|[\w-]*\w)?"
    r"|\w(?:[\w'’+#&/-]|\.(?=\w))*\+*|[^\s\w]"
)
YEAR = r"(?:1[0-9]\d\d|20[0-4]\d)"
_DATE = re.compile(
    rf"(?:\d{{1,2}}(?:st|nd|rd|th)?(?: of)? (?:{MONTHS}),? {YEAR}|(?:{MONTHS}) \d{{1,2}}(?:st|nd|rd|th)?,? {YEAR}"
    rf"|(?:{MONTHS}),? (?:of )?{YEAR}|(?:{MONTHS}) \d{{1,2}}(?:st|nd|rd|th)?|\d{{1,2}}(?:st|nd|rd|th)? (?:{MONTHS})"
    rf"|(?:the )?(?:early |late |mid-?)?{YEAR}s|{YEAR}|(?:the )?(?:early |late |mid-?)?"
    rf"(?:\d{{1,2}}(?:st|nd|rd|th)|[a-z]+teenth|twentieth|tenth|twelfth) century(?: (?:BC|BCE|AD|CE))?)"
)
_PARTICLES = frozenset("to up out off down over".split())


@dataclass(frozen=True)
class Span:
    """A piece of a text: text == source[start:end]."""

    text: str
    start: int

    @property
    def end(self) -> int:
        """The place after its last character."""
        return self.start + len(self.text)


@dataclass(frozen=True)
class Phrase:
    """A preposition and what it governs. kind: "date", "place", "agent" or ""."""

    preposition: str
    body: Span
    kind: str


@dataclass(frozen=True)
class Clause:
    """The main clause of a sentence.

    Attributes:
        sentence: The sentence it stands in.
        subject: Its noun phrase.
        auxiliary: "was", "has", "can", …; "" for a plain verb.
        verb: The verb; none where a form of "be" is the verb.
        tense: "past" or "third" or "base" for a plain verb; "passive", "perfect", "modal" or "be".
        object: What follows the verb before the first preposition.
        phrases: Prepositional phrases in order.
        because: A reason clause.
        listed: Whether its last phrase is the first of a list.
        goal: Whether an infinitive follows.
    """

    sentence: Span
    subject: Span
    auxiliary: str
    verb: Verb | None
    tense: str
    object: Span | None
    phrases: tuple[Phrase, ...]
    because: Span | None = None
    listed: bool = False
    goal: bool = False


def sentences(text: str) -> Iterator[Span]:
    """The sentences of a text."""
    start = 0
    for match in _END.finditer(text):
        piece = text[start : match.end()]
        if "\n" not in match[0] and _ABBREVIATED.search(text[max(0, start) : match.start() + 1]):
            continue
        if piece.strip():
            yield _trim(text, start, match.end())
        start = match.end()
    if text[start:].strip():
        yield _trim(text, start, len(text))


def _trim(text: str, start: int, end: int) -> Span:
    piece = text[start:end]
    return Span(piece.strip(), start + len(piece) - len(piece.lstrip()))


def words(span: Span) -> list[Span]:
    """Words and marks of a piece with their places in the source."""
    return [Span(found[0], span.start + found.start()) for found in _WORD.finditer(span.text)]


def dated(text: str) -> str:
    """The date that a text begins with, or ""."""
    found = _DATE.match(text)
    return found[0] if found and not text[found.end() : found.end() + 1].isalnum() else ""


def between(sentence: Span, start: int, end: int) -> Span:
    """A piece without the marks and spaces around it."""
    piece = sentence.text[start - sentence.start : end - sentence.start]
    left = len(piece) - len(piece.lstrip(" ,;:([\"'"))
    return Span(piece[left:].rstrip(" ,;:.([\"'-–—"), start + left)


def phrase_of(preposition: str, body: Span) -> Phrase:
    """A phrase with its kind."""
    kind, text = "", body.text
    found = dated(text)
    if found and preposition in ("in", "on", "during", "since", "until", "by", "around"):
        if len(found) == len(text):
            kind = "date"
    elif preposition == "by":
        kind = "agent"
    elif preposition in ("in", "at", "near") and re.fullmatch(
        r"(?:the )?(?:[A-Z][\w'’.-]+)(?:(?:,? | of | of the )[A-Z][\w'’.-]+){0,4}", text
    ):
        kind = "place"
    return Phrase(preposition, body, kind)


def tail(sentence: Span, tokens: list[Span]) -> tuple[Span | None, list[Phrase]]:
    """The object and the phrases in what follows a verb."""
    cuts = [
        n for n, each in enumerate(tokens)
        if each.text in PREPOSITIONS and each.text not in ("of", "than", "as", "per", "like")
        and not (each.text in _PARTICLES and n + 1 < len(tokens) and tokens[n + 1].text in VERBS)
    ]  # fmt: skip
    first = cuts[0] if cuts else len(tokens)
    thing = between(sentence, tokens[0].start, tokens[first - 1].end) if first else None
    phrases: list[Phrase] = []
    particle = ""
    for n, cut in enumerate(cuts):
        end = cuts[n + 1] if n + 1 < len(cuts) else len(tokens)
        preposition, particle = f"{particle} {tokens[cut].text}".strip(), ""
        if end > cut + 1:
            phrases.append(phrase_of(preposition, between(sentence, tokens[cut + 1].start, tokens[end - 1].end)))
        else:
            particle = preposition
    return (thing if thing and thing.text else None), phrases
