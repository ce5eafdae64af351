"""What the cells of a workbook share: texts, which may be rich, and styles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ragkv.ingest.formats.number_formats import NumberFormat, built_in
from ragkv.ingest.formats.package import PartHandler
from ragkv.ingest.formats.scripts import END, SUB, SUP, resolved
from ragkv.ingest.formats.symbols import is_symbols, signs

_SCRIPTS = {"superscript": SUP, "subscript": SUB}


_ESCAPED = re.compile(r"_x([0-9A-Fa-f]{4})_")


class RichText(PartHandler):
    """Collects a text in runs: what is struck out is left out, and so are readings of Japanese words (rPh).

    Attributes:
        names_fonts: Whether its runs say in which fonts they are.
    """

    def __init__(self) -> None:
        self.names_fonts = False
        self._parts: list[str] = []
        self._font = ""
        self._inside = self._phonetic = self._struck = self._properties = False
        self._mark = ""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        match tag:
            case "t":
                self._inside = not self._phonetic and not self._struck
            case "r":
                self._struck, self._mark, self._font = False, "", ""
            case "rFont":
                self._font, self.names_fonts = attributes.get("val", ""), True
            case "strike":
                self._struck = attributes.get("val", "1") not in ("0", "false")
            case "vertAlign":
                self._mark = _SCRIPTS.get(attributes.get("val", ""), "")
            case "rPh":
                self._phonetic = True

    def end(self, tag: str) -> None:
        match tag:
            case "t":
                self._inside = False
            case "r":
                self._struck, self._mark = False, ""
            case "rPh":
                self._phonetic = False

    def text(self, text: str) -> None:
        if self._inside:
            text = signs(text, self._font) if is_symbols(self._font) else text
            self._parts.append(f"{self._mark}{text}{END}" if self._mark else text)

    def whole(self) -> str:
        """Return the text, and begin the next one."""
        text = unescaped(resolved("".join(self._parts)))
        self._parts.clear()
        self.names_fonts = False
        return text


class Strings(RichText):
    """Collects the shared texts.

    Attributes:
        found: The texts.
        lettered: Places of those whose runs say in which fonts they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.lettered = set[int]()

    def end(self, tag: str) -> None:
        if tag == "si":
            if self.names_fonts:
                self.lettered.add(len(self.found))
            self.found.append(self.whole())
        else:
            super().end(tag)


class CellStyle(NamedTuple):
    """How a cell is shown.

    Attributes:
        format: How it shows its number.
        is_struck: Whether it is struck out.
        font: The font, where it is one of signs.
    """

    format: NumberFormat
    is_struck: bool
    font: str


class CellStyles(PartHandler):
    """Collects the styles of cells (styles.xml)."""

    def __init__(self) -> None:
        self._codes: dict[int, str] = {}
        self._cells: list[tuple[int, int]] = []
        self._struck: list[bool] = []
        self._fonts: dict[int, str] = {}
        self._inside = ""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        match tag:
            case "numFmt":
                self._codes[whole(attributes.get("numFmtId"))] = attributes.get("formatCode", "")
            case "cellXfs" | "fonts":
                self._inside = tag
            case "font" if self._inside == "fonts":
                self._struck.append(False)
            case "strike" if self._inside == "fonts" and self._struck:
                self._struck[-1] = attributes.get("val", "1") not in ("0", "false")
            case "name" if self._inside == "fonts" and is_symbols(attributes.get("val", "")):
                self._fonts[len(self._struck) - 1] = attributes.get("val", "")
            case "xf" if self._inside == "cellXfs":
                self._cells.append((whole(attributes.get("numFmtId")), whole(attributes.get("fontId"))))

    def end(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def whole(self) -> list[CellStyle | None]:
        """Return each style; None for one that shows its value as it is."""
        formats = dict[int, NumberFormat]()
        styles = list[CellStyle | None]()
        for number, font in self._cells:
            code = self._codes.get(number, built_in(number))
            struck = 0 <= font < len(self._struck) and self._struck[font]
            if number not in formats:
                formats[number] = NumberFormat("" if code.lower() == "general" else code)
            signs_of = self._fonts.get(font, "")
            styles.append(CellStyle(formats[number], struck, signs_of) if code or struck or signs_of else None)
        return styles


def unescaped(text: str) -> str:
    """Return a text with the characters that workbooks write by their numbers: `_x000D_`."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text) if "_x" in text else text


def whole(text: str | None) -> int:
    """Return a whole number; -1 for any other text."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else -1
