"""What the style sheets of a page write before and behind elements, and the numbers that they count.

    body { counter-reset: part }
    h2 { counter-increment: part }
    h2::before { content: "Part " counter(part, upper-roman) ". " }
    .price::after { content: " EUR" }

Bullets, arrows, icons and quotation marks are decoration and left out, and so is what is not understood: `attr`, `url`.
"""

from __future__ import annotations

import re
import unicodedata

from ragkv.ingest.formats.numbering import STYLES, written

_CONTENT = re.compile(r"(?<![\w-])content\s*:\s*((?:\"[^\"]*+\"|'[^']*+'|[^;\"'])++)", re.IGNORECASE)
_COUNTED = re.compile(r"(?<![\w-])counter-(reset|increment|set)\s*:\s*([^;]{1,200})", re.IGNORECASE)
_COUNTER = re.compile(r"([A-Za-z_][\w-]*)(?:\s+(-?\d{1,6}))?")
_PIECE = re.compile(
    r"(?:\"((?:[^\"\\]|\\.)*+)\"|'((?:[^'\\]|\\.)*+)'"
    r"|(counters?)\(\s*([\w-]+)\s*(?:,\s*[\"']([^\"']{0,9})[\"']\s*)?(?:,\s*([\w-]+)\s*)?\))",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:([0-9A-Fa-f]{1,6})\s?|(.))", re.DOTALL)
_MEANING = "%°‰"
_LONGEST = 200
"""Characters of what is written for one element, and of what says so."""
_MOST_COUNTERS, _DEEPEST = 32, 16
"""Counters of a page, and numbers of one that are written together."""


def content_of(body: str) -> str:
    """Return the value of `content` in the declarations of a rule, if it says something; else empty."""
    found = _CONTENT.search(body)
    value = found[1].replace("!important", "").strip() if found and len(found[1]) <= _LONGEST else ""
    said = "".join(
        part for piece in _PIECE.finditer(value) for part in (_plain(piece[1] or piece[2] or ""), piece[3] or "")
    )
    return value if _is_said(said) and not _PIECE.sub("", value).strip() else ""


def counted_by(body: str) -> str:
    """Return what the declarations of a rule count, as `reset a 0 b 0; increment c 1`."""
    return "; ".join(f"{kind} {names}" for kind, names in _COUNTED.findall(body))


def _is_said(text: str) -> bool:
    """Whether a text is more than decoration: words, figures or a unit. Icons of a font may be single letters."""
    if len(text.strip()) == 1 and text.strip().isalpha():
        return False
    return any(letter.isalnum() or letter in _MEANING or unicodedata.category(letter) == "Sc" for letter in text)


def _plain(quoted: str) -> str:
    """Return a text without its escapes (`\\201C`)."""
    return _ESCAPE.sub(lambda escape: _letter(escape[1]) if escape[1] else escape[2].strip("\n"), quoted)


def _letter(code: str) -> str:
    number = int(code, 16)
    letter = chr(number) if 0x20 <= number < 0x110000 and not 0xD800 <= number < 0xE000 else " "
    return "" if unicodedata.category(letter) == "Co" else letter


class Counters:
    """The counters of a page. One is seen by the element that resets it, by what follows it there, and inside of it."""

    def __init__(self) -> None:
        self._values: dict[str, list[list[int]]] = {}

    def count(self, depth: int, counted: str) -> None:
        """Enter an element that counts. depth: elements that are open; counted: see `counted_by`."""
        for kind, _, names in sorted((part.partition(" ") for part in counted.split("; ")), reverse=True):
            for name, number in _COUNTER.findall(names):
                if name not in self._values and len(self._values) >= _MOST_COUNTERS:
                    continue
                values = self._values.setdefault(name, [])
                if kind == "reset":
                    while values and values[-1][0] >= depth:
                        values.pop()
                if kind == "reset" or not values:
                    values.append([depth, 0])
                before = values[-1][1] if kind == "increment" else 0
                values[-1][1] = before + int(number or (kind == "increment"))

    def leave(self, depth: int) -> None:
        """Leave an element: what its children count ends."""
        for values in self._values.values() if self._values else ():
            while values and values[-1][0] > depth:
                values.pop()

    def text(self, content: str) -> str:
        """Return a value of `content` as it is seen."""
        return "".join(map(self._piece, _PIECE.finditer(content)))[:_LONGEST]

    def _piece(self, piece: re.Match[str]) -> str:
        if not piece[3]:
            return _plain(piece[1] or piece[2] or "")
        kind = STYLES.get((piece[6] or "decimal").lower(), "1")
        numbers = [written(value, kind) for _, value in self._values.get(piece[4], [])[-_DEEPEST:]] or ["0"]
        return (piece[5] or "").join(numbers) if piece[3] == "counters" else numbers[-1]
