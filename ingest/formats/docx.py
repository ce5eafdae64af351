"""Word documents to text. The zip is opened and its XML read as a stream: no part and no tree is ever whole in memory.

    _rels/.rels            where the document is, usually word/document.xml
    word/styles.xml        which styles are headings, and of which level
    word/document.xml      paragraphs (p) of runs (t), tables (tbl, tr, tc), lists (numPr)
    word/footnotes.xml, word/endnotes.xml    read after it
    docProps/core.xml      the title

Tags are compared by their local names, so that transitional and strict documents read the same. Tracked changes read as
accepted: deleted text is left out, and inserted text is kept. The text of content controls and text boxes is kept too.
No Word document declares a document type. A part that does is refused, which excludes every entity bomb.

This is written by hand because libraries would lose tested behaviour: mammoth 1.13 returns hidden text, ignores
headings by base style or outline level, and takes 46 s for a deflate bomb that is refused here at once. python-docx 1.2
cannot open strict documents, and drops tracked insertions, content controls, text boxes and footnotes.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NoReturn
from xml.parsers import expat

from ingest.formats.base import LINE, MAX_TITLE, Parsed, TextBlocks, one_line, without_controls
from ragkv.errors import InvalidDocument, TooLarge

PART_BYTES = 128 * 2**20
"""Most bytes of an unpacked part. Text has its own limit; this one covers the markup."""
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_HEADING = re.compile(r"heading ([1-9])", re.IGNORECASE)
_LEVELS = frozenset("012345678")
_UNSEEN = {"Fallback", "moveFrom"}
"""Elements that are skipped: a second copy of a drawing for older programs, and moved text at its old place."""


def parse(data: bytes, limit: int) -> Parsed:
    """Parse a Word document. The title comes from its properties, or else is the first heading.

    Raises:
        InvalidDocument: The file is no Word document, is damaged or has a password.
        TooLarge: The text has over `limit` bytes, or a part over PART_BYTES.
    """
    if data.startswith(_OLE):
        raise InvalidDocument("it has a password, or is an old .doc; save it as .docx without one")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as package:
            return _parse(package, limit)
    except zipfile.BadZipFile as error:
        raise InvalidDocument(f"it is no Word document, or a damaged one: {error}") from None
    except expat.ExpatError as error:
        raise InvalidDocument(f"it is a damaged Word document: {error}") from None


def _parse(package: zipfile.ZipFile, limit: int) -> Parsed:
    links = _Links()
    _read(package, "_rels/.rels", links)
    if links.document not in package.namelist():
        raise InvalidDocument("it is no Word document: a zip archive without one")
    folder = PurePosixPath(links.document).parent
    styles = _Styles()
    _read(package, str(folder / "styles.xml"), styles)
    body = _Body(TextBlocks(limit), styles.marks())
    _read(package, links.document, body)
    if body.root != "document":
        raise InvalidDocument("it is no Word document, but another one of an office program")
    for notes in ("footnotes.xml", "endnotes.xml"):
        _read(package, str(folder / notes), body)
    properties = _Properties()
    _read(package, "docProps/core.xml", properties)
    title = one_line(properties.title) or one_line(body.blocks.heading())
    return Parsed(title, without_controls(body.blocks.joined()), {"format": "docx"})


class _Part:
    """Handles the XML events of a part. Tags and attributes are local names."""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None: ...

    def end(self, tag: str) -> None: ...

    def text(self, text: str) -> None: ...


class _Links(_Part):
    def __init__(self) -> None:
        self.document = "word/document.xml"

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "Relationship" and attributes.get("Type", "").endswith("/officeDocument"):
            self.document = attributes.get("Target", "").removeprefix("/")


class _Properties(_Part):
    def __init__(self) -> None:
        self.title = ""
        self._inside = False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._inside = tag == "title"

    def end(self, tag: str) -> None:
        self._inside = False

    def text(self, text: str) -> None:
        if self._inside and len(self.title) < MAX_TITLE:
            self.title += text


class _Styles(_Part):
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
        """Return the mark of each style's paragraphs."""
        found = {}
        for style in {*self._own, *self._bases}:
            seen, base = {style}, style
            while base not in self._own and (base := self._bases.get(base, "")) and base not in seen:
                seen.add(base)
            if mark := self._own.get(base):
                found[style] = mark
        return found


class _Body(_Part):
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


def _read(package: zipfile.ZipFile, name: str, part: _Part) -> None:
    """Send the XML events of the part `name` to `part`. A missing part has none."""
    if name not in package.namelist():
        return
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = _refuse
    parser.StartElementHandler = lambda tag, attributes: part.start(
        _local(tag), {_local(key): value for key, value in attributes.items()}
    )
    parser.EndElementHandler = lambda tag: part.end(_local(tag))
    parser.CharacterDataHandler = part.text
    left = PART_BYTES
    with package.open(name) as file:
        while piece := file.read(65536):
            left -= len(piece)
            if left < 0:
                raise TooLarge(f"unpacked, its part {name} has over {PART_BYTES} bytes")
            parser.Parse(piece)
    parser.Parse(b"", True)


def _local(name: str) -> str:
    return name.rpartition(" ")[2]


def _refuse(*declared: Any) -> NoReturn:
    raise InvalidDocument("its XML declares a document type, as entity bombs do and Word never does")
