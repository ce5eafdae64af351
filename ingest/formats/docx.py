"""Word documents to text. Their XML is read as a stream (package.py).

    _rels/.rels            where the document is, usually word/document.xml
    word/styles.xml        which styles are headings, and of which level
    word/document.xml      paragraphs (p) of runs (t), tables (tbl, tr, tc), lists (numPr)
    word/footnotes.xml, word/endnotes.xml    read after it
    docProps/core.xml      the title

Tracked changes read as accepted: deleted text is left out, and inserted text is kept. The text of content controls and
text boxes is kept too.

This is written by hand because libraries would lose tested behaviour: mammoth 1.13 returns hidden text, ignores
headings by base style or outline level, and takes 46 s for a deflate bomb that is refused here at once. python-docx 1.2
cannot open strict documents, and drops tracked insertions, content controls, text boxes and footnotes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from ingest.formats.base import LINE, Parsed, TextBlocks, one_line, without_controls
from ingest.formats.package import Package, PartHandler, open_package
from ragkv.errors import InvalidDocument

_HEADING = re.compile(r"heading ([1-9])", re.IGNORECASE)
_LEVELS = frozenset("012345678")
_UNSEEN = {"Fallback", "moveFrom"}
"""Elements that are skipped: a second copy of a drawing for older programs, and moved text at its old place."""


def parse(data: bytes, limit: int) -> Parsed:
    """Parse a Word document. The title comes from its properties, or else is the first heading.

    Raises:
        InvalidDocument: The file is no Word document, is damaged or has a password.
        TooLarge: The text has over `limit` bytes, or its parts over UNPACKED_BYTES.
    """
    with open_package(data, "Word document", ".doc") as package:
        return _parse(package, limit)


def _parse(package: Package, limit: int) -> Parsed:
    document = package.document("word/document.xml")
    if document not in package.names:
        raise InvalidDocument("it is no Word document: a zip archive without one")
    folder = PurePosixPath(document).parent
    styles = _Styles()
    package.read(str(folder / "styles.xml"), styles)
    body = _Body(TextBlocks(limit), styles.marks())
    package.read(document, body)
    if body.root != "document":
        raise InvalidDocument("it is no Word document, but another one of an office program")
    for notes in ("footnotes.xml", "endnotes.xml"):
        package.read(str(folder / notes), body)
    title = one_line(package.title()) or one_line(body.blocks.heading())
    return Parsed(title, without_controls(body.blocks.joined()), {"format": "docx"})


class _Styles(PartHandler):
    """Collects paragraph styles of headings and list items, also where a base style makes them one."""

    def __init__(self) -> None:
        self._own: dict[str, str] = {}
        self._bases: dict[str, str] = {}
        self._style = ""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        value = attributes.get("val", "")
        if tag == "style":
            self._style = attributes.get("styleId", "")
        elif tag == "basedOn":
            self._bases[self._style] = value
        elif tag == "name" and (heading := _HEADING.fullmatch(value)):
            self._own[self._style] = _heading(int(heading[1]))
        elif tag == "name" and value.lower() == "title":
            self._own[self._style] = _heading(1)
        elif tag == "outlineLvl" and value in _LEVELS:
            self._own.setdefault(self._style, _heading(int(value) + 1))
        elif tag == "numPr":
            self._own.setdefault(self._style, "- ")

    def marks(self) -> dict[str, str]:
        """Return the mark of each style's paragraphs. Each style is looked at once, however long chains of them are."""
        marks = dict(self._own)
        for style in self._bases:
            chain = list[str]()
            while style and style not in marks:
                chain.append(style)
                marks[style] = ""  # what leads back to itself has none
                style = self._bases.get(style, "")
            marks.update(dict.fromkeys(chain, marks.get(style, "")))
        return {style: mark for style, mark in marks.items() if mark}


class _Body(PartHandler):
    """Writes the text of the document and of its notes into blocks."""

    def __init__(self, blocks: TextBlocks, marks: Mapping[str, str]):
        self.blocks = blocks
        self.root = ""
        self._marks = marks
        self._mark = ""
        self._unseen = 0
        self._run = self._hidden = self._text = False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self.root = self.root or tag
        if self._unseen or tag in _UNSEEN:
            self._unseen += 1
            return
        value = attributes.get("val", "")
        match tag:
            case "p":
                self._begin("")
            case "pStyle":
                self._begin(self._marks.get(value, ""))
            case "outlineLvl" if value in _LEVELS:
                self._begin(_heading(int(value) + 1))
            case "numPr" if not self._mark:
                self._begin("- ")
            case "r":
                self._run, self._hidden = True, False
            case "vanish" if self._run:
                self._hidden = value not in ("0", "false", "off")
            case "t":
                self._text = not self._hidden
            case "tab":
                self.blocks.write("\t")
            case "br" | "cr":
                self.blocks.write(LINE)
            case "noBreakHyphen":
                self.blocks.write("-")
            case "tr":
                self.blocks.open_row()
            case "tc":
                self.blocks.open_cell()

    def end(self, tag: str) -> None:
        if self._unseen:
            self._unseen -= 1
            return
        match tag:
            case "t":
                self._text = False
            case "r":
                self._run = self._hidden = False
            case "p":
                self._begin("")
            case "tr":
                self.blocks.close_row()

    def text(self, text: str) -> None:
        if self._text and not self._unseen:
            self.blocks.write(text)

    def _begin(self, mark: str) -> None:
        """End the open block and begin one of this kind."""
        self.blocks.pause()
        self.blocks.mark(mark)
        self._mark = mark


def _heading(level: int) -> str:
    return "#" * min(level, 6) + " "
