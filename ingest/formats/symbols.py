"""Letters of the fonts Symbol, Wingdings and Webdings, which office programs use for signs, as characters.

Their codes are those of a byte, or of the private area of Unicode from U+F000 on.
"""

from __future__ import annotations

import re

_SYMBOL_LOW = " !∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼"
_SYMBOL_HIGH = "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊〈®©™∑⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪\uf8ff〉∫⌠⎮⌡⎞⎟⎠⎤⎥⎦⎫⎬⎭"
TICKED, EMPTY = "[x]", "[ ]"
_SYMBOL = {**dict(enumerate(_SYMBOL_LOW, 0x20)), **dict(enumerate(_SYMBOL_HIGH, 0xA0))}
_WINGDINGS = {
    **dict.fromkeys((0xFE, 0xFD, 0x78), TICKED),
    **dict.fromkeys((0x6F, 0x70, 0x71, 0x72, 0xA8), EMPTY),
    **dict(enumerate("⓪①②③④⑤⑥⑦⑧⑨⑩⓿❶❷❸❹❺❻❼❽❾❿", 0x80)),
    0x20: " ",
    0x28: "☎",
    0x2A: "✉",
    0x46: "☞",
    0x4A: "☺",
    0x4C: "☹",
    0x6C: "●",
    0x6D: "❍",
    0x6E: "■",
    0x75: "◆",
    0x76: "❖",
    0x77: "◆",
    0x9E: "·",
    0x9F: "•",
    0xA1: "○",
    0xA7: "▪",
    0xD8: "➢",
    0xDF: "←",
    0xE0: "→",
    0xE1: "↑",
    0xE2: "↓",
    0xE8: "➔",
    0xEF: "⇦",
    0xF0: "⇨",
    0xF1: "⇧",
    0xF2: "⇩",
    0xF3: "⬄",
    0xFB: "✗",
    0xFC: "✓",
}
_WINGDINGS2 = {
    **dict.fromkeys((0x51, 0x52, 0x53, 0x54), TICKED),
    **dict.fromkeys((0xA3, 0x2A, 0x35), EMPTY),
    0x20: " ",
    0x4F: "✗",
    0x50: "✓",
    0x97: "●",
    0xA2: "■",
}
_WEBDINGS = {0x20: " ", 0x61: "✓", 0x63: EMPTY, 0x67: "■", 0x6E: "●", 0x72: "✗", 0x33: "◀", 0x34: "▶"}
_FONTS = {"symbol": _SYMBOL, "wingdings": _WINGDINGS, "wingdings 2": _WINGDINGS2, "webdings": _WEBDINGS}
_PRIVATE = 0xF000
_PRIVATE_LETTER = re.compile("[\uf000-\uf0ff]")
_USUAL = {0xA3: "≤", 0xB0: "°", 0xB3: "≥", 0xB7: "•", 0xA7: "▪", 0xD8: "➢", 0xFC: "✓", 0xFE: TICKED, 0xA8: EMPTY}
"""What private letters of an unknown font mostly are."""


def is_symbols(font: str) -> bool:
    """Whether a font has signs in place of letters."""
    return font.strip().lower() in _FONTS


def signs(text: str, font: str) -> str:
    """Return text in a font as characters. Letters that the font does not have stay."""
    table = _FONTS.get(font.strip().lower())
    if table is None and _PRIVATE_LETTER.search(text) is None:
        return text
    return "".join(_sign(letter, table) for letter in text)


def sign(code: str, font: str) -> str:
    """Return the sign of a code in hexadecimal, such as `F0FE`; empty for none."""
    try:
        number = int(code, 16)
    except ValueError:
        return ""
    return signs(chr(number), font) if 0x20 <= number < 0x110000 and not 0xD800 <= number < 0xE000 else ""


def _sign(letter: str, table: dict[int, str] | None) -> str:
    code = ord(letter)
    if _PRIVATE <= code < _PRIVATE + 256:
        return (_USUAL if table is None else table).get(code - _PRIVATE, letter)
    return letter if table is None else table.get(code, letter)
