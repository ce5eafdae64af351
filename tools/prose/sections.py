"""What every reader gives: sections of documents, made of paragraphs."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

_TAG = re.compile(r"<[^>]+>")
_NOTE = re.compile(r"\s?\[(?:\d{1,3}|[a-z])\](?!\w)")
_SPACE = re.compile(r"\s+")
_DOTS = re.compile(r"(?:\. ?){4,}|_{4,}|={4,}|-{4,}|\*{3,}")


@dataclass(frozen=True)
class Section:
    """Paragraphs under one heading.

    Attributes:
        document: Names the document inside its package.
        title: The title of a chunk of this section.
        paragraphs: Its text in order.
    """

    document: str
    title: str
    paragraphs: tuple[str, ...]


def clean(text: str) -> str:
    """Text on one line, without footnote marks and entities."""
    text = html.unescape(text).replace("\u00ad", "").replace("\u200b", "").replace("\ufeff", "")
    return re.sub(r" ([,.])(?=\s|$)", r"\1", _SPACE.sub(" ", _NOTE.sub("", text))).strip()


def untag(markup: str) -> str:
    """The text of a piece of markup."""
    return clean(_TAG.sub(" ", markup))


def entitled(book: str, section: str) -> str:
    """A title as a search index shows it: the book, then the section."""
    book, section = clean(book).strip(" :-#¶"), clean(section).strip(" :-#¶")
    section = re.sub(r"^(?:chapter |appendix )?[A-Z]?[\d.]*\d\.?\s+(?=[A-Z])", "", section, flags=re.I)
    if not book or not section or section.lower() in book.lower():
        return book or section
    return section if book.lower() in section.lower() else f"{book}: {section}"


def prose(paragraph: str) -> bool:
    """Whether a paragraph reads as sentences, not as a table, code or a list of names."""
    words = paragraph.split()
    if len(words) < 6 or _DOTS.search(paragraph) or "copyright (c)" in paragraph.lower():
        return False
    plain = sum(word.strip(".,;:!?()\"'“”‘’").replace("'", "").replace("-", "").isalpha() for word in words)
    letters = sum(char.isalpha() or char.isspace() for char in paragraph)
    capitals = sum(word.isupper() and len(word) > 1 for word in words)
    return (
        plain / len(words) > 0.78
        and letters / len(paragraph) > 0.86
        and capitals / len(words) < 0.35
        and paragraph.isascii() + sum(char.isascii() for char in paragraph) / len(paragraph) > 0.9
        and bool(re.search(r"\b(?:the|a|of|is|was|and|to|in|are)\b", paragraph))
    )
