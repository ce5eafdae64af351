"""What a Word document says of its paragraphs and runs besides their text: styles, and the numbers of lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ragkv.ingest.formats.numbering import whole, written
from ragkv.ingest.formats.package import PartHandler
from ragkv.ingest.formats.symbols import is_symbols

LEVELS = frozenset("012345678")
_HEADING = re.compile(r"heading ([1-9])", re.IGNORECASE)
_PLACE = re.compile(r"%([1-9])")
_KINDS = {"lowerLetter": "aa", "upperLetter": "AA", "lowerRoman": "i", "upperRoman": "I", "decimalZero": "01"}
_KINDS |= {"none": "", "ordinal": "1st", "cardinalText": "one", "ordinalText": "first"}
_KINDS |= dict.fromkeys(("japaneseCounting", "chineseCounting", "chineseCountingThousand", "koreanDigital2"), "一")
_KINDS |= {"decimalEnclosedCircle": "①", "decimalEnclosedCircleChinese": "①", "russianLower": "б", "russianUpper": "Б"}
_KINDS |= {"aiueoFullWidth": "ア", "aiueo": "ア", "ideographTraditional": "甲", "ganada": "가"}
_BULLET = "- "
_NO_LIST = "0"
_OFF = 2
"""Points above or below the line from which on text is raised or lowered."""


class Style(NamedTuple):
    """How a paragraph or a run is set; None where nothing is said of it.

    Attributes:
        heading: The mark of a heading.
        list: The id of a list, empty for one that is not named.
        level: The level of a list item, from 0.
        raised: `superscript` or `subscript`, else empty.
        struck: Whether it is struck out.
        vanished: Whether it is hidden.
        font: The font, where it is one of signs.
    """

    heading: str | None = None
    list: str | None = None
    level: int | None = None
    raised: str | None = None
    struck: bool | None = None
    vanished: bool | None = None
    font: str | None = None

    @property
    def is_hidden(self) -> bool:
        """Whether the text is none of the document's."""
        return bool(self.struck or self.vanished)

    def over(self, upper: Style) -> Style:
        """Return this style with what another one says instead."""
        both = Style._make(own if other is None else other for own, other in zip(self, upper, strict=True))
        return both._replace(list=self.list or "") if upper.list == "" else both

    def told(self, tag: str, attributes: Mapping[str, str]) -> Style:
        """Return this style with what a property says."""
        value = attributes.get("val", "")
        match tag:
            case "outlineLvl" if value in LEVELS:
                return self._replace(heading=heading(int(value) + 1))
            case "numPr":
                return self._replace(list=self.list or "")
            case "numId":
                return self._replace(list=value)
            case "ilvl":
                return self._replace(level=whole(value, 0))
            case "vertAlign":
                return self._replace(raised=value if value in ("superscript", "subscript") else "")
            case "position":
                points = whole(value, 0) / 2
                return self._replace(raised="superscript" if points >= _OFF else "subscript" if points <= -_OFF else "")
            case "strike" | "dstrike":
                return self._replace(struck=is_on(attributes))
            case "vanish":
                return self._replace(vanished=is_on(attributes))
            case "rFonts":
                font = attributes.get("ascii") or attributes.get("hAnsi") or ""
                return self._replace(font=font) if self.font or is_symbols(font) else self
        return self


PLAIN = Style()


def heading(level: int) -> str:
    """Return the mark of a heading."""
    return "#" * min(level, 6) + " "


def is_on(attributes: Mapping[str, str]) -> bool:
    """Whether a property that is there is on."""
    return attributes.get("val", "true") not in ("0", "false", "off")


class Styles(PartHandler):
    """Collects the styles (styles.xml)."""

    def __init__(self) -> None:
        self._own: dict[str, Style] = {}
        self._bases: dict[str, str] = {}
        self._style = ""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        value = attributes.get("val", "")
        own = self._own.get(self._style, PLAIN)
        if tag == "style":
            self._style = attributes.get("styleId", "")
        elif tag == "basedOn":
            self._bases[self._style] = value
        elif tag == "name" and (named := _HEADING.fullmatch(value)):
            self._own[self._style] = own._replace(heading=heading(int(named[1])))
        elif tag == "name" and value.lower() == "title":
            self._own[self._style] = own._replace(heading=heading(1))
        elif self._style and not (tag == "outlineLvl" and own.heading):
            told = own.told(tag, attributes)
            if told is not own:
                self._own[self._style] = told

    def end(self, tag: str) -> None:
        if tag == "style":
            self._style = ""

    def whole(self) -> dict[str, Style]:
        """Return each style with what its base says. Each is looked at once, however long chains of them are."""
        done: dict[str, Style] = {}
        for style in {**self._own, **self._bases}:
            chain = list[str]()
            while style and style not in done:
                chain.append(style)
                done[style] = PLAIN  # what leads back to itself has no more
                style = self._bases.get(style, "")
            base = done.get(style, PLAIN)
            for name in reversed(chain):
                base = done[name] = base.over(self._own[name]) if name in self._own else base
        return {name: style for name, style in done.items() if style != PLAIN}


class _Level:
    """A level of a list.

    Attributes:
        start: Its first number.
        kind: How it is written.
        text: The text around it (`%1.%2`).
        is_legal: Whether the numbers of all levels are digits.
        restart: Number of the level, from 1, after which it begins anew; 0 for none, -1 for each above it.
    """

    def __init__(self) -> None:
        self.start, self.kind, self.text = 1, "decimal", "%1."
        self.is_legal, self.restart = False, -1


class _List:
    """A list. Its levels may be those of a style, and its counts go on wherever it is used."""

    def __init__(self) -> None:
        self.levels: dict[int, _Level] = {}
        self.counts: dict[int, int] = {}
        self.style = ""


class _Use:
    """A list of the document: the one that it continues, the levels that begin anew, and those that it has instead."""

    def __init__(self) -> None:
        self.abstract = ""
        self.starts: dict[int, int] = {}
        self.levels: dict[int, _Level] = {}


class Numbering(PartHandler):
    """Collects the lists (numbering.xml) and counts their items."""

    def __init__(self) -> None:
        self._lists: dict[str, _List] = {}
        self._styles: dict[str, _List] = {}
        self._uses: dict[str, _Use] = {}
        self._open: _List | None = None
        self._level = _Level()
        self._use = _Use()
        self._overridden = 0

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        value = attributes.get("val", "")
        match tag:
            case "abstractNum":
                self._open = self._lists.setdefault(attributes.get("abstractNumId", ""), _List())
            case "lvl":
                levels = self._use.levels if self._open is None else self._open.levels
                self._level = levels.setdefault(whole(attributes.get("ilvl"), 0), _Level())
            case "start" | "numFmt" | "lvlText" | "isLgl" | "lvlRestart":
                self._describe(tag, attributes)
            case "styleLink" if self._open is not None:
                self._styles[value] = self._open
            case "numStyleLink" if self._open is not None:
                self._open.style = value
            case "num":
                self._open, self._level = None, _Level()
                self._use = self._uses.setdefault(attributes.get("numId", ""), _Use())
            case "abstractNumId" if self._open is None:
                self._use.abstract = value
            case "lvlOverride":
                self._overridden = whole(attributes.get("ilvl"), 0)
            case "startOverride":
                self._use.starts[self._overridden] = whole(value, 1)

    def _describe(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Take what is said of the open level."""
        value = attributes.get("val", "")
        match tag:
            case "start":
                self._level.start = whole(value, 1)
            case "numFmt" if self._level.kind[:1] != "0":  # else a copy for older programs
                self._level.kind = attributes.get("format", "").partition(",")[0] if value == "custom" else value
            case "lvlText":
                self._level.text = value
            case "isLgl":
                self._level.is_legal = is_on(attributes)
            case "lvlRestart":
                self._level.restart = whole(value, -1)

    def mark(self, name: str | None, level: int | None) -> str:
        """Return the mark of the next item of a list. name: its id; None for no list."""
        if name is None or name == _NO_LIST:
            return ""
        use, at = self._uses.get(name), min(level or 0, 8)
        found = self._lists.get(use.abstract) if use else None
        if found is not None and not found.levels:
            found = self._styles.get(found.style)
        levels = {**found.levels, **use.levels} if found and use else {}
        if use is None or found is None or at not in levels:
            return _BULLET
        start = use.starts.pop(at, None)  # counts once
        first = levels[at].start if start is None else start
        found.counts[at] = found.counts[at] + 1 if at in found.counts and start is None else first
        for deeper in [deeper for deeper in found.counts if deeper > at]:
            if (restart := levels.get(deeper, _Level()).restart) < 0 or at < restart:
                del found.counts[deeper]
        if levels[at].kind == "bullet":
            return _BULLET
        text = _PLACE.sub(lambda place: _number(found.counts, levels, int(place[1]) - 1, at), levels[at].text).strip()
        return f"{text} " if text else _BULLET


def _number(counts: Mapping[int, int], levels: Mapping[int, _Level], at: int, item: int) -> str:
    """Return the number of a level in the mark of an item."""
    level = levels.get(at, _Level())
    kind = _KINDS.get(level.kind, level.kind if level.kind[:1] == "0" else "1")
    if levels[item].is_legal and kind[:1] != "0":
        kind = "1"
    return written(counts.get(at, level.start), kind)
