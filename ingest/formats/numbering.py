"""Numbers of list items, as HTML and office programs count them: `5. `, `b) `, `IV. `, `2.1 `."""

from __future__ import annotations

import re
from collections.abc import Mapping

_ROMAN = {1000: "m", 900: "cm", 500: "d", 400: "cd", 100: "c", 90: "xc", 50: "l", 40: "xl", 10: "x"}
_ROMAN |= {9: "ix", 5: "v", 4: "iv", 1: "i"}
_STYLE = re.compile(r"list-style(?:-type)?\s*:\s*([a-z-]+)")
STYLES = {"lower-alpha": "a", "lower-latin": "a", "upper-alpha": "A", "upper-latin": "A"}
STYLES |= {"lower-roman": "i", "upper-roman": "I", "decimal": "1", "decimal-leading-zero": "01"}
STYLES |= {"lower-greek": "α", "cjk-ideographic": "一", "simp-chinese-informal": "一", "cjk-heavenly-stem": "甲"}
"""How CSS calls the kinds of numbers."""
_WORDS = {
    "one": "One Two Three Four Five Six Seven Eight Nine Ten Eleven Twelve".split(),
    "first": "First Second Third Fourth Fifth Sixth Seventh Eighth Ninth Tenth Eleventh Twelfth".split(),
}
_SIGNS = {
    "α": "αβγδεζηθικλμνξοπρστυφχψω",
    "б": "абвгдежзиклмнопрстуфхцчшщэюя",
    "Б": "АБВГДЕЖЗИКЛМНОПРСТУФХЦЧШЩЭЮЯ",
    "①": "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰⑱⑲⑳",
    "ア": "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロワヲン",
    "甲": "甲乙丙丁戊己庚辛壬癸",
    "가": "가나다라마바사아자차카타파하",
}
_DIGITS = "〇一二三四五六七八九"
_REPEATED = 780
"""Numbers that Word writes as letters, which are the same up to 30 times."""
_LARGEST = 1_000_000
"""Greatest number of an item that is believed."""


def span_of(text: str | None) -> int:
    """Return how many columns or rows a cell spans; 1 for what is no number. A span of 0 goes on to the end."""
    number = whole(text, 1)
    return number if number > 0 else 65_534 if number == 0 else 1


def whole(text: str | None, otherwise: int) -> int:
    """Return a whole number of a few digits."""
    bare = (text or "").strip()
    if not bare.isascii() or not bare.removeprefix("-").isdigit() or len(bare) > 8:
        return otherwise
    return int(bare)


def written(number: int, kind: str) -> str:
    """Return a number as a list shows it.

    kind: `a`, `A`, `aa` and `AA` (`bb` is behind `aa`), `i`, `I`, `01`, `001`, `1st`, `one`, `first`, `一` or a key of
    _SIGNS; an empty text for no number, or any other for digits.
    """
    if kind[:1] == "0":
        return str(number).zfill(len(kind))
    if kind in ("aa", "AA") and 0 < number <= _REPEATED:
        again, at = divmod(number - 1, 26)
        return chr(ord(kind[0]) + at) * (again + 1)
    if 0 < number <= len(signs := _SIGNS.get(kind, "")):
        return signs[number - 1]
    if kind == "一" and 0 < number < 100:
        tens, ones = divmod(number, 10)
        return (_DIGITS[tens] if tens > 1 else "") + ("十" if tens else "") + (_DIGITS[ones] if ones else "")
    if kind in _WORDS and 0 < number <= len(_WORDS[kind]):
        return _WORDS[kind][number - 1]
    if kind in ("1st", "first"):
        return f"{number}{_ordinal(number)}"
    if kind in ("a", "A") and 0 < number <= _LARGEST:
        text = _letters(number)
        return text.upper() if kind == "A" else text
    if kind in ("i", "I") and 0 < number < 5000:
        text = ""
        for value, letters in _ROMAN.items():
            while number >= value:
                text, number = text + letters, number - value
        return text.upper() if kind == "I" else text
    return str(number) if kind else ""


def _ordinal(number: int) -> str:
    """Return the ending of an ordinal number in English."""
    return "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def _letters(number: int) -> str:
    text = ""
    while number > 0:
        number, letter = divmod(number - 1, 26)
        text = chr(ord("a") + letter) + text
    return text


class NumberedList:
    """A numbered list of a page (`ol`). items: how many it has."""

    def __init__(self, attributes: Mapping[str, str | None], items: int):
        self._kind = attributes.get("type") or "1"
        self._step = -1 if "reversed" in attributes else 1
        self._plain = False
        if style := _STYLE.search((attributes.get("style") or "").lower()):
            self._plain, self._kind = style[1] == "none", STYLES.get(style[1], self._kind)
        self._next = whole(attributes.get("start"), items if self._step < 0 else 1)

    def mark(self, attributes: Mapping[str, str | None]) -> str:
        """Return the mark of the next item, which may say what number it has, and that it shows none."""
        number = whole(attributes.get("value"), self._next)
        self._next = number + self._step
        style = _STYLE.search((attributes.get("style") or "").lower())
        if self._plain or (style and style[1] == "none"):
            return "- "
        return f"{written(number, STYLES.get(style[1], self._kind) if style else self._kind)}. "
