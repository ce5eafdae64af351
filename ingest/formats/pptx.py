"""PowerPoint presentations to text, slide by slide. A slide is to a citation what a page is.

    ppt/presentation.xml            the order of the slides
    ppt/slides/slide1.xml           shapes (sp) and tables (tbl) with paragraphs (p) of runs (t)
    ppt/notesSlides/notesSlide1.xml the speaker's notes

The title of a slide becomes its heading and comes first. Hidden slides, slide numbers, dates, footers, charts and
pictures are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from ingest.formats.base import LINE, Parsed, TextBlocks, TextRoom, one_line, without_controls
from ingest.formats.package import LINK, Package, PartHandler, open_package
from ragkv.errors import InvalidDocument

_TITLES = {"title", "ctrTitle"}
_AROUND = {"sldNum", "dt", "ftr", "hdr", "sldImg"}
"""Kinds of placeholders that hold no content of the slide."""
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
    texts, pages, length, heading = list[str](), list[tuple[int, int]](), 0, ""
    for number, name in enumerate(slides, 1):
        if name not in package.names:
            continue
        slide = _Slide(room, limit)
        package.read(name, slide)
        if slide.hidden:
            continue
        text = without_controls(_BETWEEN.join(filter(None, [slide.whole(), _notes(package, name, room, limit)])))
        heading = heading or slide.blocks.heading()
        if text:
            pages.append((length, number))
            texts.append(text)
            length += len(text) + len(_BETWEEN)
    title = one_line(package.title()) or one_line(heading)
    return Parsed(title, _BETWEEN.join(texts), {"format": "pptx", "slides": len(slides)}, tuple(pages))


def _notes(package: Package, slide: str, room: TextRoom, limit: int) -> str:
    """Return the speaker's notes of a slide."""
    notes = _Slide(room, limit)
    for link in package.links(slide).values():
        if link.kind == "notesSlide":
            package.read(link.target, notes)
    text = notes.whole()
    return f"Notes: {text}" if text else ""


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

    def __init__(self, room: TextRoom, limit: int):
        self.blocks, self.hidden = TextBlocks(limit), False
        self._room = room
        self._kind, self._unseen, self._text = "", 0, False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if self._unseen or tag == "Fallback":  # a second copy of a shape for older programs
            self._unseen += 1
            return
        match tag:
            case "sld":
                self.hidden = attributes.get("show") in ("0", "false")
            case "sp" | "graphicFrame":
                self._begin("")
            case "ph":
                self._begin(attributes.get("type", "body"))
            case "p" if self._kind in _TITLES:
                self.blocks.write(" ")
            case "p":
                self.blocks.pause()
            case "t":
                self._text = True
            case "br":
                self.blocks.write(LINE if self._kind not in _TITLES else " ")
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
            case "tr":
                self.blocks.close_row()
            case "sp" | "graphicFrame":
                self._begin("")
            case "p" if self._kind not in _TITLES:
                self.blocks.pause()

    def text(self, text: str) -> None:
        if self._text and not self._unseen and self._kind not in _AROUND:
            self.blocks.write(self._room.take(text))

    def whole(self) -> str:
        """Return the text, the title first."""
        self.blocks.pause()
        parts = (self.blocks.joined(_BODY), self.blocks.joined(_TITLE))
        return _BETWEEN.join(part for part in parts if part)

    def _begin(self, kind: str) -> None:
        """End the open block. What follows is in a shape of this kind."""
        self.blocks.pause()
        self._kind = kind
        self.blocks.place = _TITLE if kind in _TITLES else _BODY
        self.blocks.mark("## " if kind in _TITLES else "")
