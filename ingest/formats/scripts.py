"""What stands above and below the line, in characters that stand on it: `10^6`, `x_1`, `H2O`, `1 1/2`, `said [4]`.

A parser writes marks around such text as it meets it. Once a block is complete, `resolved` replaces them by what the
text around them says they are: an exponent, an index, a part of a fraction, an ending, or the number of a note.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile

SUP, SUB, NOTE, END = "\x0e", "\x0f", "\x10", "\x11"
"""Marks: what follows is raised, lowered, or the mark of a note; and where that ends. No text has these characters."""

_MARK = re.compile("[\x0e-\x11]")
_AROUND = 24
"""Most characters before a mark that are looked at."""
_ELEMENTS = set(
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb "
    "Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Nd Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Th U Pu".split()
)
_ENDINGS = {"st", "nd", "rd", "th", "er", "re", "ère", "e", "ème", "o", "a", "os", "as", "º", "ª", "me", "te", "ter"}
_SIGNS = {"tm", "sm", "®", "©", "™", "℠", "°"}
_DEGREES = re.compile(r"\s?[CF]\b")
_TITLES = {"me": "M", "mes": "M", "lle": "M", "lles": "M", "gr": "M", "r": "DM", "rs": "M", "o": "nN", "os": "nN"}
"""Endings of words that are written raised: `M` and `me`."""
_NO_WORDS = set(
    "min sec mol kmol bar lux rad deg kpa mpa gpa kwh mwh gal ppm acre mile foot inch yard metre meter feet miles "
    "yards inches sin cos tan cot log exp det dim ker max sinh cosh tanh".split()
)
"""Units and functions, which have exponents and no notes, as words of two letters may."""
_MONEY = "$€£"
_PRICE = re.compile(r"([$€£]?\s?)((?<![\w.,])(?!10\Z)\d{1,3}(?:[,.]?\d{3}){0,3})\Z")
"""A price before its hundredths, which shops raise. Of 10 nobody knows that it is none to the power of that."""
_PRIMES = "′″‴'"
_LETTERS = "abcde"
"""Marks of notes behind a number of three digits and more, which no exponents are."""
_LOCKED = ".,;:!?…\"'”’»。、%‰€$£"
"""What ends a sentence or a part of it, and units that have no exponents."""


def resolved(text: str) -> str:
    """Return a text without marks. One that has none is returned as it is."""
    if _MARK.search(text) is None:
        return text
    parts = re.split("([\x0e-\x11])", text)
    written, at = _Line(parts[0]), 1
    while at < len(parts):
        mark, at = parts[at], at + 1
        if mark == END:
            written.add(parts[at])
            at += 1
            continue
        inner, at = _inside(parts, at)
        while at + 1 < len(parts) and not parts[at] and parts[at + 1] == mark:  # a run of letters, set in pieces
            more, at = _inside(parts, at + 2)
            inner += more
        written.add_marked(mark, inner, parts[at] if at < len(parts) else "", parts[at + 1 : at + 2])
        if at < len(parts):
            written.add(parts[at])
            at += 1
    return written.whole()


def _inside(parts: list[str], at: int) -> tuple[str, int]:
    """Return the text up to the mark that ends it, and the place behind it. Marks inside it are read as `^` and `_`."""
    inner, depth = list[str](), 1
    while at < len(parts):
        part = parts[at]
        at += 1
        if part == END:
            depth -= 1
            if not depth:
                break
        elif part in (SUP, SUB, NOTE):
            inner.append("_" if part == SUB else "^")
            depth += 1
        else:
            inner.append(part)
    return "".join(inner), at


class _Line:
    """A text that is written from left to right."""

    def __init__(self, first: str):
        self._parts, self._tail = [first], first[-_AROUND:]
        self._part_of_fraction = False

    def add(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._tail = (self._tail + text[-_AROUND:])[-_AROUND:]

    def add_marked(self, mark: str, inner: str, behind: str, following: list[str]) -> None:
        """Add what stands off the line. behind: the text after it; following: the mark after that."""
        base, space = self._tail, " " if inner[-1:].isspace() and behind[:1].isalnum() else ""
        inner = " ".join(inner.split())
        if not inner:
            return
        if mark == SUB:
            lowered = self._lowered(inner, base)
            is_number = lowered[:1] == "_" and lowered[-1:].isdigit() and behind[:1].isdigit()
            self.add(f"{lowered} " if is_number else lowered)  # a logarithm to the base 2, of 8
        elif mark == SUP and behind.strip() in ("/", "⁄", "∕") and following == [SUB] and inner.isalnum():
            self.add(f" {inner}" if base[-1:].isdigit() else inner)
            self._part_of_fraction = True
        else:
            raised = _raised(inner, base, behind, mark == NOTE)
            if raised[0] == "^" and base.rstrip()[-2:] == "10":
                self._parts[-1] = self._parts[-1].rstrip()
            is_number = raised[:1] == "^" and raised[-1:].isdigit() and behind[:1].isdigit()
            self.add(f"{raised} " if is_number else raised + space)

    def whole(self) -> str:
        return "".join(self._parts)

    def _lowered(self, inner: str, base: str) -> str:
        if self._part_of_fraction and base[-1:] in "/⁄∕":
            self._part_of_fraction = False
            return inner
        if not base or base[-1:].isspace():
            return inner
        if inner.isdigit() and _is_formula(base):
            return inner
        return f"_{_bracketed(inner)}"


def _raised(inner: str, base: str, behind: str, note: bool) -> str:
    """Return what is raised behind a base."""
    if len(inner) == 2 and inner.isdigit() and (price := _price(base, behind)):
        return f"{',' if '.' in price else '.'}{inner}"
    if len(inner) == 3 and inner[0] in ".," and inner[1:].isdigit() and base[-1:].isdigit():  # hundredths
        return inner
    if inner in ("o", "°", "º") and base.rstrip()[-1:].isdigit() and _DEGREES.match(behind):
        return "°"
    if inner[0] == "." and base[-1:].isdigit() and inner[1:] in _ENDINGS:  # 3.º
        return inner
    if inner.lower() in _SIGNS or not inner.strip(_PRIMES) or (inner.isalpha() and _is_ending(inner.lower(), base)):
        return inner
    if not base.strip() or base[-1:].isspace():
        return _alone(inner, base, behind)
    if note or (_is_note(inner) and _is_marked(inner, base)):
        return f" [{inner.strip('[]()')}]"
    if inner[0] == "[" and inner[-1] == "]":  # a remark: `[citation needed]`
        return f" {inner}"
    return f"^{_bracketed(inner)}"


def _price(base: str, behind: str) -> str:
    """Return the number at the end of a base if it is an amount of money; empty for any other."""
    found = _PRICE.search(base)
    is_money = found is not None and (found[1].strip() or (behind.lstrip()[:1] or " ") in _MONEY)
    return found[2] if found and is_money else ""


def _alone(inner: str, base: str, behind: str) -> str:
    """Return what is raised and stands alone: an exponent after a space, a number of an isotope, or a note itself."""
    if inner.isdigit() and any(behind[:size] in _ELEMENTS and not behind[size : size + 1].isalpha() for size in (1, 2)):
        return f"^{inner}"
    if base.rstrip()[-2:] == "10" and inner.lstrip("-−–").isdigit():
        return f"^{inner}"
    space = "" if behind[:1].isspace() else " "
    return f"[{inner.strip('[]')}]{space}" if _is_note(inner) else inner


def _is_note(text: str) -> bool:
    """Whether a text could be the mark of a note: `4`, `[12]`, `2, 3`, `*`."""
    return (
        re.fullmatch(r"[\[(]?(?:\d{1,3}|[a-z]|[*†‡§¶∗]{1,3})(?:\s?[,;–-]\s?(?:\d{1,3}|[a-z]))*[\])]?", text) is not None
    )


def _is_ending(inner: str, base: str) -> bool:
    if inner in ("a", "o") and base[-3:].isdigit() and len(base) > 2:  # the mark of a note: 120, 1987
        return False
    if base[-1:].isdigit() or (inner.startswith(("e", "è")) and not _last(base, str.isalpha).strip("IVXLC")):
        return inner in _ENDINGS
    return inner in _TITLES and base[-1:] in _TITLES[inner] and not base[-2:-1].isalpha()


def _is_marked(inner: str, base: str) -> bool:
    """Whether a base has a note rather than an exponent: the end of a sentence, a year or a word that is no unit."""
    if inner[0] in "[*†‡§¶∗(" or inner[-1] == ")":
        return True
    word = _last(base, str.isalnum)
    if not inner[0].isdigit():
        return base[-1:] in _LOCKED or (inner in _LETTERS and len(word) > 2 and word.isdigit())
    is_word = word.isalpha() and (len(word) > 2 or "," in inner) and word.lower() not in _NO_WORDS
    return base[-1:] in _LOCKED or is_word or bool(re.fullmatch(r"(?:1[5-9]|20)\d\d", word))


def _is_formula(base: str) -> bool:
    """Whether a base ends in symbols of elements, so that a number below the line says how many atoms there are."""
    token = _last(base, lambda character: character.isalnum() or character in "()[]")
    symbols = re.findall(r"[A-Z][a-z]?", token)
    return bool(
        symbols and re.fullmatch(r"(?:(?:[A-Z][a-z]?|[()\[\]])\d{0,3})++", token) and _ELEMENTS.issuperset(symbols)
    )


def _last(base: str, inside: Callable[[str], bool]) -> str:
    """Return the characters at the end of a text that are of a kind."""
    return base[len(base) - sum(1 for _ in takewhile(inside, reversed(base))) :]


def _bracketed(inner: str) -> str:
    """Return what stands behind `^` or `_`: a number or a word, with its sign, needs no brackets."""
    atom = re.fullmatch(r"[+\-−–±]?(?:[\d.,]+|[^\W\d_]+|[*†‡∗])['′’]?[+\-−–±]?|[+\-−–±∞]{1,2}", inner)
    is_bracketed = inner[0] == "(" and inner.find(")") == len(inner) - 1 and inner.count("(") == 1
    return inner if atom or is_bracketed else f"({inner})"
