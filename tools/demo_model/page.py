"""Pages: natural documents with slots and choices, each a thousand documents. Plain text, see pages/*.txt.

page GENRE
  title: one | other                            a document; another title begins the page's next one
  piece: prose with {person}, {year2}, <one/other>, <w1:red/blue> and again <w1>; empty lines part paragraphs
  one: question | other wording = answer        kinds: one, coref, two; none has no answer
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tools.demo_model.bank import BankError
from tools.demo_model.inflect import tidy
from tools.demo_model.swap import Pool, pool, put, shared, swaps, words
from tools.demo_model.values import Values, knows

PAGES = Path(__file__).parent / "pages"
KINDS = ("one", "coref", "two", "none")
_KEY = re.compile(rf"\s*(title|piece|{'|'.join(KINDS)}): ?(.*)")
_MARK = re.compile(r"\{(\w+)\}|<([^<>]*)>")
_LABEL = re.compile(r"([A-Za-z]+\d+)(?::(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Choice:
    """One of several texts; the same one wherever the label stands."""

    label: str
    options: tuple[Text, ...]


@dataclass(frozen=True)
class Slot:
    """A value of a type; the same one wherever the name stands."""

    name: str


Text = tuple["str | Slot | Choice", ...]


@dataclass(frozen=True)
class PageLine:
    """A question in several wordings, and its answer; empty for kind none."""

    kind: str
    wordings: tuple[Text, ...]
    answer: Text


@dataclass(frozen=True)
class Sheet:
    """One document of a page."""

    titles: tuple[Text, ...]
    pieces: tuple[Text, ...]


@dataclass(frozen=True)
class Page:
    """A document, or several that know of each other, with everything that varies left open."""

    genre: str
    sheets: tuple[Sheet, ...]
    lines: tuple[PageLine, ...]

    @property
    def pieces(self) -> tuple[Text, ...]:
        """The pieces of all documents, in order."""
        return tuple(piece for sheet in self.sheets for piece in sheet.pieces)

    @property
    def titles(self) -> tuple[Text, ...]:
        """All titles."""
        return tuple(title for sheet in self.sheets for title in sheet.titles)

    @cached_property
    def prose(self) -> str:
        """What titles and pieces say whatever fills them."""
        return " ".join(_literal(text) for text in (*self.titles, *self.pieces))

    @cached_property
    def common(self) -> tuple[str, ...]:
        """Words that prose and questions share."""
        return shared(self.prose, " ".join(_literal(text) for line in self.lines for text in line.wordings))

    @cached_property
    def taken(self) -> frozenset[str]:
        """Every word of the page."""
        asked = (_literal(text) for line in self.lines for text in (*line.wordings, line.answer))
        return frozenset(words(" ".join((self.prose, *asked))))


@cache
def load(known: frozenset[str], folder: Path = PAGES) -> tuple[Page, ...]:
    """Every page of a folder. known: names of word lists. Raises BankError."""
    for number, (name, page) in enumerate(_read(folder), 1):
        _check(page, known, f"{name}, page {number} ({page.genre})")
    return tuple(page for _, page in _read(folder))


@cache
def _read(folder: Path) -> tuple[tuple[str, Page], ...]:
    """Every page of a folder, with the name of its file."""
    return tuple(
        (path.name, _page(block))
        for path in sorted(folder.glob("*.txt"))
        for block in re.split(r"^page +", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    )


@cache
def stock(known: frozenset[str], folder: Path = PAGES) -> Pool:
    """The words of all pages of a folder, which stand in for one another. Raises BankError."""
    return pool(page.prose for page in load(known, folder))


def _page(block: str) -> Page:
    genre, _, body = block.partition("\n")
    fields: list[tuple[str, str]] = []
    for raw in body.splitlines():
        key = _KEY.fullmatch(raw)
        if key:
            fields.append((key[1], key[2]))
        elif fields and not raw.lstrip().startswith("#"):
            fields[-1] = (fields[-1][0], f"{fields[-1][1]}\n{raw.strip()}")
    labels: dict[str, Choice] = {}
    for _, text in fields:  # a label may stand before its choice does
        _text(text, labels)
    sheets: list[tuple[str, list[str]]] = []
    lines = []
    for kind, text in fields:
        if kind == "title":
            sheets.append((text, []))
        elif kind == "piece":
            sheets[-1][1].append(re.sub(r"\n{2,}", "\n\n", text.strip()))
        if kind in KINDS:
            asked, _, answer = text.strip().partition(" = ")
            wordings = tuple(_text(q.strip(), labels) for q in asked.split("|") if q.strip())
            lines.append(PageLine(kind, wordings, _text(answer.strip(), labels)))
    filled = (
        Sheet(*(tuple(_text(text.strip(), labels) for text in texts) for texts in (titles.split("|"), pieces)))
        for titles, pieces in sheets
    )
    return Page(genre.strip(), tuple(filled), tuple(lines))


def _text(text: str, labels: dict[str, Choice]) -> Text:
    parts: list[str | Slot | Choice] = []
    at = 0
    for mark in _MARK.finditer(text):
        parts += [text[at : mark.start()], Slot(mark[1]) if mark[1] else _choice(mark[2], labels)]
        at = mark.end()
    return tuple(part for part in (*parts, text[at:]) if part != "")


def _choice(text: str, labels: dict[str, Choice]) -> Choice:
    label = _LABEL.fullmatch(text)
    if label and label[2] is None:
        return labels.get(label[1], Choice(label[1], ()))
    name, options = (label[1], label[2] or "") if label else ("", text)
    choice = Choice(name, tuple(_text(option, labels) for option in options.split("/")))
    if name:
        labels[name] = choice
    return choice


def _parts(text: Text) -> Iterator[Slot | Choice]:
    for part in text:
        if isinstance(part, Choice):
            yield part
            for option in part.options:
                yield from _parts(option)
        elif isinstance(part, Slot):
            yield part


def _literal(text: Text) -> str:
    """A text without its slots, with all that its choices offer."""
    parts = (p if isinstance(p, str) else " ".join(map(_literal, p.options)) for p in text if not isinstance(p, Slot))
    return " ".join(parts)


def _check(page: Page, known: frozenset[str], where: str) -> None:
    texts = [*page.titles, *page.pieces, *(t for line in page.lines for t in (*line.wordings, line.answer))]
    for part in (part for text in texts for part in _parts(text)):
        if isinstance(part, Choice) and not part.options:
            raise BankError(f"{where}: label <{part.label}> is nowhere defined")
        if isinstance(part, Slot) and not knows(part.name.rstrip("0123456789"), dict.fromkeys(known, ())):
            raise BankError(f"{where}: nothing fills the slot {{{part.name}}}")
    for line in page.lines:
        if (line.kind == "none") == bool(line.answer) or not line.wordings:
            raise BankError(f"{where}: a question without an answer, or the other way round: {line.wordings}")


class Instance:
    """A page with its slots and choices filled. others: words that may stand in for words of the page."""

    def __init__(self, v: Values, page: Page, others: Pool | None = None):
        self.page, self._v = page, v
        self._stand_ins = swaps(v, page.common, others, page.taken) if others else {}
        self._slots: dict[str, str] = {}
        self._chosen: dict[str, str] = {}
        self.titles: list[str] = []
        self.pieces: list[str] = []
        for sheet in page.sheets:
            self.titles.append(self.render(v.one(sheet.titles)))
            self.pieces += [self.render(piece) for piece in sheet.pieces]

    @property
    def values(self) -> dict[str, str]:
        """What filled slots and labels so far."""
        return self._slots | self._chosen

    def render(self, text: Text) -> str:
        """The text with everything filled in."""
        rendered = tidy("".join(self._part(part) for part in text))
        return rendered[:1].upper() + rendered[1:] if text and not isinstance(text[0], str) else rendered

    def answer(self, text: Text) -> str:
        """The text of an answer, as it stands inside a sentence."""
        return tidy("".join(self._part(part) for part in text))

    def names(self, text: Text) -> list[str]:
        """The names that fill slots of a text: values that open with a capital letter."""
        values = (self._part(part) for part in text if isinstance(part, Slot))
        return [value for value in values if value[:1].isupper()]

    def place(self, line: PageLine, answer: str) -> tuple[int, int] | None:
        """(piece, offset) of a line's answer; the last piece that has it for kind coref, else the first."""
        found = [(n, piece.find(answer)) for n, piece in enumerate(self.pieces) if answer in piece]
        return (found[-1] if line.kind == "coref" else found[0]) if found and answer else None

    def _part(self, part: str | Slot | Choice) -> str:
        if isinstance(part, str):
            return put(self._stand_ins, part)
        if isinstance(part, Slot):
            if part.name not in self._slots:
                self._slots[part.name] = self._v.draw(part.name)
            return self._slots[part.name]
        if not part.label:
            return self._all(self._v.one(part.options))
        if part.label not in self._chosen:
            self._chosen[part.label] = self._all(self._v.one(part.options))
        return self._chosen[part.label]

    def _all(self, text: Text) -> str:
        return "".join(self._part(part) for part in text)
