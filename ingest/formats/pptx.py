"""PowerPoint presentations to text, slide by slide. A slide is to a citation what a page is.

    ppt/presentation.xml            the order of the slides
    ppt/slides/slide1.xml           shapes (sp) and tables (tbl) with paragraphs (p) of runs (t); words for pictures
    ppt/diagrams/drawing1.xml       the texts of a diagram (SmartArt), as they are drawn
    ppt/notesSlides/notesSlide1.xml the speaker's notes

The title of a slide becomes its heading and comes first. Hidden slides, slide numbers, dates, footers, charts and
pictures are left out, and so is text that is struck out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ragkv.errors import InvalidDocument
from ragkv.ingest.formats.base import LINE, Parsed, TextBlocks, TextRoom, one_line, without_controls
from ragkv.ingest.formats.cell_styles import unescaped
from ragkv.ingest.formats.numbering import whole, written
from ragkv.ingest.formats.office_formulas import OfficeFormulas
from ragkv.ingest.formats.package import LINK, Link, Package, PartHandler, diagrams_of, open_package
from ragkv.ingest.formats.scripts import END, SUB, SUP
from ragkv.ingest.formats.slide_styles import LEVELS, Layouts, LevelStyles, Placeholders, inherited
from ragkv.ingest.formats.symbols import is_symbols, signs

_TITLES = {"title", "ctrTitle"}
_AROUND = {"sldNum", "dt", "ftr", "hdr", "sldImg"}
"""Kinds of placeholders that hold no content of the slide."""
_TABLE = {"tbl", "tr", "tc"}
_PROPERTIES = {"pPr", "buAutoNum", "buNone", "buChar", "rPr", "defRPr", "sym", "latin"}
_NUMBERS = {"alphaLc": "a", "alphaUc": "A", "romanLc": "i", "romanUc": "I", "circleNum": "①"}
_SIGN = re.compile(r"[\uf000-\uf0ff]|(?<!\w)[\x80-\xff](?!\w)")
"""What a font of signs shows where letters have a font of their own: `a à b` is `a → b`."""
_TITLE, _BODY = "title", "body"
_BETWEEN = "\n\n"


def parse(data: bytes, limit: int) -> Parsed:
    """Parse a presentation. The title comes from its properties, or else is that of the first slide.

    Raises:
        InvalidDocument: The file is no presentation, is damaged or has a password.
        TooLarge: The text has over `limit` bytes, or its parts over UNPACKED_BYTES.
    """
    with open_package(data, "PowerPoint presentation", ".ppt") as package:
        return _parse(package, limit)


def _parse(package: Package, limit: int) -> Parsed:
    main = package.document("ppt/presentation.xml")
    presentation = _Presentation()
    package.read(main, presentation)
    if presentation.root != "presentation":
        raise InvalidDocument("it is no PowerPoint presentation, but another archive")
    links, room = package.links(main), TextRoom(limit)
    slides = [links[id].target for id in presentation.slides if id in links]
    layouts = Layouts(package)
    texts, pages, length, heading = list[str](), list[tuple[int, int]](), 0, ""
    for number, name in enumerate(slides, 1):
        if name not in package.names:
            continue
        own = package.links(name)
        layout = next((link.target for link in own.values() if link.kind == "slideLayout"), "")
        slide = _Slide(room, limit, layouts.of(layout))
        package.read(name, slide)
        if slide.hidden:
            continue
        further = _linked(package, own, room, limit)
        text = without_controls(_BETWEEN.join(filter(None, [slide.whole(), *further])))
        heading = heading or slide.blocks.heading()
        if text:
            pages.append((length, number))
            texts.append(text)
            length += len(text) + len(_BETWEEN)
    title = one_line(package.title()) or one_line(heading)
    return Parsed(title, _BETWEEN.join(texts), {"format": "pptx", "slides": len(slides)}, tuple(pages))


def _linked(package: Package, links: Mapping[str, Link], room: TextRoom, limit: int) -> tuple[str, str]:
    """Return the text of the diagrams (SmartArt) of a slide, and the speaker's notes. links: of the slide."""
    diagrams, notes = _Slide(room, limit), _Slide(room, limit)
    for diagram in diagrams_of(links):
        package.read(diagram, diagrams)
    for link in links.values():
        if link.kind == "notesSlide":
            package.read(link.target, notes)
    text = notes.whole()
    return diagrams.whole(), f"Notes: {text}" if text else ""


class _Presentation(PartHandler):
    """Collects the relationships of the slides, in order."""

    def __init__(self) -> None:
        self.root, self.slides = "", list[str]()

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self.root = self.root or tag
        if tag == "sldId" and LINK in attributes:
            self.slides.append(attributes[LINK])


class _Slide(PartHandler):
    """Writes the text of a slide, or of its notes, into blocks."""

    def __init__(self, room: TextRoom, limit: int, around: tuple[Placeholders, ...] = ()):
        self.blocks, self.hidden = TextBlocks(limit), False
        self.blocks.place = _BODY
        self._room = room
        self._kind, self._unseen, self._text = "", 0, False
        self._mark, self._struck, self._font = "", False, ""
        self._is_hidden = self._is_mixed = False
        self._groups = list[bool]()
        self._formulas = OfficeFormulas()
        self._level, self._numbers = 0, dict[int, tuple[str, int]]()
        self._auto: tuple[str, int] | None = None
        self._is_filled = self._is_bulleted = False
        self._styled: int | None = None
        self._around, self._styles = around, LevelStyles()

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if self._unseen or tag == "Fallback":  # a second copy of a shape for older programs
            self._unseen += 1
        elif self._formulas.has(tag):
            self._text = tag == "t"
            self._formulas.start(tag, attributes)
        elif tag in _TABLE:
            self._start_table(tag, attributes)
        elif tag in _PROPERTIES:
            self._start_property(tag, attributes)
        elif tag in LEVELS:
            self._styled = LEVELS[tag]
        else:
            self._start_text(tag, attributes)

    def _start_text(self, tag: str, attributes: Mapping[str, str]) -> None:
        match tag:
            case "sld":
                self.hidden = attributes.get("show") in ("0", "false")
            case "grpSp":
                self._groups.append(any(self._groups[-1:]))
            case "sp" | "graphicFrame" | "pic" | "cxnSp":
                self._begin("")
                self._is_hidden = any(self._groups[-1:])
            case "nvGrpSpPr" if self._groups:
                self._is_hidden = self._groups[-1]
            case "cNvPr" if self._is_hidden or attributes.get("hidden") in ("1", "true"):
                self._is_hidden = True
            case "cNvPr" if words := (attributes.get("descr") or attributes.get("title") or "").strip():
                self.blocks.write(self._room.take(f"{words} "))
            case "ph":
                self._begin(attributes.get("type", "body"))
                if self._kind not in _TITLES:
                    self._styles.take(inherited(self._around, attributes))
            case "p" if self._kind in _TITLES:
                self.blocks.write(" ")
            case "p":
                self.blocks.pause()
                self.blocks.mark("")
                self._level, self._auto, self._is_filled, self._is_bulleted = 0, None, False, False
            case "r" | "fld":
                self._mark, self._struck, self._font = "", self._level in self._styles.struck, ""
                self._struck |= attributes.get("type") == "slidenum"
            case "t":
                self._text = True
            case "br":
                self.blocks.write(LINE if self._kind not in _TITLES else " ")

    def _start_property(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Take what is said of the paragraph or the run."""
        match tag:
            case "pPr":
                self._level = whole(attributes.get("lvl"), 0)
            case "buAutoNum" | "buNone" | "buChar" | "defRPr" if self._styled is not None:
                self._styles.tell(self._styled, tag, attributes)
            case "buAutoNum" if self._kind not in _TITLES:
                self._auto = attributes.get("type", ""), whole(attributes.get("startAt"), 1)
            case "buNone" | "buChar":
                self._is_bulleted = True
            case "rPr":
                raised = whole(attributes.get("baseline", "0").rstrip("%"), 0)
                self._mark = SUP if raised > 0 else SUB if raised < 0 else ""
                if strike := attributes.get("strike"):
                    self._struck = strike != "noStrike"
            case "sym" | "latin" if is_symbols(attributes.get("typeface", "")):
                self._font = attributes.get("typeface", "")
                self._is_mixed = tag == "sym"

    def _start_table(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "tbl":
            self.blocks.open_table()
        elif tag == "tr":
            self.blocks.open_row()
        else:
            self.blocks.open_cell()
            for name, like in (("vMerge", "above"), ("hMerge", "left")):
                if attributes.get(name) in ("1", "true"):
                    self.blocks.widen_cell(like=like)

    def _count(self) -> None:
        """Begin to fill a paragraph. One without a number ends the counts of its level, and an empty one has none."""
        if self._is_filled:
            return
        self._is_filled = True
        if not self._is_bulleted and self._kind not in _TITLES:
            self._auto = self._auto or self._styles.autos.get(self._level)
        for level in [level for level in self._numbers if level >= self._level + (self._auto is not None)]:
            del self._numbers[level]
        if self._auto is not None:
            self.blocks.mark(self._number(*self._auto))

    def _number(self, kind: str, start: int) -> str:
        """Return the mark of the next numbered paragraph of this level, such as `2. ` or `b) `."""
        known, number = self._numbers.get(self._level, ("", 0))
        number = number + 1 if known == f"{kind}{start}" else start
        self._numbers[self._level] = (f"{kind}{start}", number)
        letters = next((style for name, style in _NUMBERS.items() if kind.startswith(name)), "1")
        text = written(number, letters)
        if kind.endswith("Plain"):
            return f"{text} "
        return f"({text}) " if kind.endswith("Both") else f"{text}) " if kind.endswith("ParenR") else f"{text}. "

    def end(self, tag: str) -> None:
        if self._unseen:
            self._unseen -= 1
            return
        if tag == "t":
            self._text = False
        if self._formulas.present is not None:
            if formula := self._formulas.end(tag):
                self._count()
                self.blocks.write_formula(self._room.take(formula.whole()))
            return
        match tag:
            case "lstStyle":
                self._styled = None
            case "tr":
                self.blocks.close_row()
            case "tbl":
                self.blocks.close_table()
            case "nvGrpSpPr" if self._groups:
                self._groups[-1] = self._is_hidden
            case "grpSp":
                self._groups.pop()
            case "sp" | "graphicFrame" | "pic" | "cxnSp":
                self._begin("")
            case "p" if self._kind not in _TITLES:
                self.blocks.pause()

    def text(self, text: str) -> None:
        if not self._text or self._unseen or self._is_hidden or self._kind in _AROUND:
            return
        if self._formulas.present is not None:
            self._formulas.present.text(text)
            return
        self._count()
        if not self._struck:
            shown = self._room.take(text)
            if "_x" in shown:
                shown = unescaped(shown).replace("\v", LINE if self._kind not in _TITLES else " ")
            if self._font and self._is_mixed:  # a font of signs beside one of letters
                shown = _SIGN.sub(lambda sign: signs(sign[0], self._font), shown)
            else:
                shown = signs(shown, self._font)
            self.blocks.write(f"{self._mark}{shown}{END}" if self._mark else shown)

    def whole(self) -> str:
        """Return the text, the title first."""
        self.blocks.pause()
        parts = (self.blocks.joined(_BODY), self.blocks.joined(_TITLE))
        return _BETWEEN.join(part for part in parts if part)

    def _begin(self, kind: str) -> None:
        """End the open block. What follows is in a shape of this kind."""
        self.blocks.pause()
        self._kind = kind
        self._numbers.clear()
        self._styles.clear()
        self._styled = None
        self.blocks.place = _TITLE if kind in _TITLES else _BODY
        self.blocks.mark("## " if kind in _TITLES else "")
