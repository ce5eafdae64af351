r"""What fields of Word show that have no stored result: formulas (EQ) and signs (SYMBOL).

    EQ \f(1,2)                  1/2
    EQ \r(3,27)                 ³√27
    EQ \o(\s\up 9(とうきょう),東京)    東京, for what is above is a reading
    SYMBOL 163 \f "Symbol"      ≤

The result of every other field is text of the document.
"""

from __future__ import annotations

import re

from ragkv.ingest.formats.formulas import DEEPEST, Formula
from ragkv.ingest.formats.scripts import END, SUB, SUP
from ragkv.ingest.formats.symbols import sign

_LONGEST = 4000
"""Characters of a field that are read."""
_EQUATION = re.compile(r"\s*EQ\s", re.IGNORECASE)
_SYMBOL = re.compile(r"\s*SYMBOL\s+(0x[0-9A-F]{1,4}|\d{1,5})(?:[^\\]*+\\f\s{0,9}\"?([\w ]{1,40}))?", re.IGNORECASE)
_PIECE = re.compile(
    r"\\([a-z]{1,2})((?:[ ]?\\(?:bc\\.|[a-z]{2}(?:[ ]?\d{1,4})?)){0,8}+)[ ]{0,9}+(?=[(\\])|\\?(.)", re.DOTALL
)
_STYLE = re.compile(r"\\\*\s{0,9}(?:\"[^\"]{0,99}\"|\w{1,40})")
"""How all of it is set, which says nothing of what it is."""
_PARTS = {"f": ("f", "num", "den"), "r": ("rad", "deg", "e"), "i": ("nary", "sub", "sup", "e")}
"""Switches that are formulas of Office, and the elements that their arguments are."""
_SWITCHES = {*_PARTS, "s", "o", "b", "x", "l", "a", "d"}


class Fields:
    """The fields that are open, inside each other."""

    def __init__(self) -> None:
        self._open: list[_Field] = []

    def mark(self, kind: str) -> str:
        """Begin a field, begin its result (`separate`) or end it. Returns what one that ends shows without a result."""
        if kind == "begin":
            self._open.append(_Field())
        elif kind == "separate" and self._open:
            self._open[-1].has_code = True
        elif kind == "end" and self._open:
            return self._open.pop().text()
        return ""

    def tell(self, code: str) -> None:
        """Add to the code of the innermost field."""
        if self._open:
            self._open[-1].tell(code)

    def take(self, text: str) -> bool:
        """Take text of a run. Returns whether it is a part of what a field is told, and not shown."""
        for field in self._open:
            if field.code and not field.has_code:
                field.tell(text)
                return True
        for field in self._open[-1:]:
            field.is_shown |= field.has_code
        return False

    def end_codes(self) -> None:
        """End a paragraph, and with it fields that lack the rest of their code."""
        if self._open:
            self._open = [field for field in self._open if field.has_code]


class _Field:
    """A field that is open.

    Attributes:
        code: What it is told to show.
        has_code: Whether its code is complete, and its result follows.
        is_shown: Whether it has a result.
    """

    def __init__(self) -> None:
        self.has_code = self.is_shown = False
        self.code = ""

    def tell(self, code: str) -> None:
        """Add to its code."""
        if len(self.code) < _LONGEST:
            self.code += code

    def text(self) -> str:
        """Return what it shows without a result; empty for fields that nobody can tell it of."""
        if self.is_shown:
            return ""
        if symbol := _SYMBOL.match(self.code):
            number = int(symbol[1], 16) if symbol[1][:2].lower() == "0x" else int(symbol[1])
            return sign(f"{number:x}", (symbol[2] or "").strip())
        equation = _EQUATION.match(self.code)
        return _Equation(self.code[equation.end() : _LONGEST]).whole() if equation else ""


class _Equation:
    """Reads an equation from left to right."""

    def __init__(self, code: str):
        self._pieces = list(_PIECE.finditer(_STYLE.sub("", code)))
        self._at = 0

    def whole(self) -> str:
        return " ".join(self._row(0, "").split())

    def _row(self, depth: int, ends: str) -> str:
        """Return the text up to one of these signs, outside of brackets, and go behind it."""
        parts, brackets = list[str](), 0
        while self._at < len(self._pieces):
            piece = self._pieces[self._at]
            self._at += 1
            if piece[1] in _SWITCHES and depth < DEEPEST:
                parts.append(self._switch(piece[1], piece[2], depth + 1))
                continue
            letter = piece[3] or ""
            is_bare = len(piece[0]) == 1
            if is_bare and letter in ends and (letter != ")" or not brackets):
                self._end = letter
                return "".join(parts)
            brackets += is_bare * ((letter == "(") - (letter == ")"))
            parts.append(letter)
        self._end = ")"
        return "".join(parts)

    def _switch(self, name: str, options: str, depth: int) -> str:
        """Return what a switch shows with its arguments."""
        given, mark = self._arguments(depth), SUB if "\\do" in options else SUP
        if name in _PARTS:
            return _formula(name, given)
        if name == "s":
            return f"{mark}{given[0]}{END}" if len(given) == 1 else f"{SUP}{given[0]}{END}{SUB}{given[1]}{END}"
        if name == "o":
            return "".join(part for part in given if len(given) < 2 or part[:1] != SUP)
        return f"({', '.join(given)})" if name == "b" else ", ".join(given)

    def _arguments(self, depth: int) -> list[str]:
        """Return the arguments that follow in brackets."""
        while self._at < len(self._pieces) and self._pieces[self._at][0] != "(":
            if self._pieces[self._at][0].strip():
                return [""]
            self._at += 1
        self._at += 1
        given = [self._row(depth, ",;)")]
        while self._end != ")":
            given.append(self._row(depth, ",;)"))
        return given


def _formula(name: str, given: list[str]) -> str:
    formula, (element, *parts) = Formula(), _PARTS[name]
    formula.start(element)
    for part, text in zip(parts if len(given) > 1 or name != "r" else parts[1:], given, strict=False):
        formula.start(part)
        formula.text(text)
        formula.end()
    return formula.whole()
