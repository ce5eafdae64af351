"""Cuts sections into passages of a fair length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tools.prose.sections import Section, prose

LEAST, MOST, GOOD = 60, 350, 160
"""Words of a passage: at least, at most, and enough to end it at a paragraph."""
_SENTENCE = re.compile(r"(?<=[a-z0-9)\"”][.!?])\s+(?=[A-Z\"“])")


@dataclass(frozen=True)
class Passage:
    """A title and 60-350 words of one document."""

    document: str
    title: str
    text: str


def passages(sections: Iterable[Section], least: int = LEAST) -> Iterator[Passage]:
    """Passages in the order of the document; what does not read as prose is left out."""
    for section in sections:
        if len(section.title) > 120:
            continue
        kept: list[str] = []
        for paragraph in section.paragraphs:
            if prose(paragraph):
                kept += _pieces(paragraph)
        yield from _grouped(section, kept, least)


def _pieces(paragraph: str) -> list[str]:
    """The paragraph, cut between sentences where it is too long."""
    if len(paragraph.split()) <= MOST - LEAST:
        return [paragraph]
    pieces: list[str] = [""]
    for sentence in _SENTENCE.split(paragraph):
        if len(pieces[-1].split()) + len(sentence.split()) > GOOD + LEAST:
            pieces.append("")
        pieces[-1] = f"{pieces[-1]} {sentence}".strip()
    return pieces


def _grouped(section: Section, paragraphs: list[str], least: int) -> Iterator[Passage]:
    held: list[str] = []
    size = 0
    for paragraph in paragraphs:
        words = len(paragraph.split())
        if held and (size >= GOOD or size + words > MOST):
            if size >= least:
                yield Passage(section.document, section.title, "\n\n".join(held))
            held, size = [], 0
        if words <= MOST:
            held.append(paragraph)
            size += words
    if size >= least:
        yield Passage(section.document, section.title, "\n\n".join(held))
