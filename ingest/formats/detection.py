"""The character set of a plain file that names none: of Japanese, Chinese, Korean, Cyrillic or Greek, where it is sure.

A text fits several sets, and in all but one it is made of characters that hardly anybody writes. So its lines are
decoded in each set, and the likelihood of what comes out is compared: of frequent characters of the language, of its
other characters, and of those that it does not have. Only a set that is far ahead of all others is an answer.
"""

from __future__ import annotations

import math
import re
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from ragkv.ingest.formats.frequent import ARABIC, CYRILLIC, GREEK, HANGUL, HANZI, HEBREW, KANJI, LATIN, TRADITIONAL
from ragkv.ingest.formats.latin import eastern

_SAMPLE = 16384
"""Bytes of lines with other characters than those of ASCII that are compared."""
_LONGEST_LINE = 4 * _SAMPLE
"""Bytes of a line that are compared. Pages may be one line."""
_AHEAD = 8.0
"""By how much the logarithm of a likelihood has to exceed all others."""
_LEAST_WIDE, _LEAST_LETTERS = 3, 20
"""Characters of two bytes, and letters of one, that a text has at least: a few fit by chance."""
_WORST_WIDE, _WORST_LETTER = -9.0, -4.5
"""Mean logarithm of the likelihood of such a character below which a text is in no language."""
_ASCII, _NEVER, _RARE_SHAPE = math.log(1 / 40), math.log(1e-7), math.log(1e-4)
_DAMAGED = 4
"""Characters of UTF-8 for one that is none, from which on a text is UTF-8 that was damaged."""
_QUOTES = frozenset("«»„“”‘’–—…№°§€·،؛؟\xa0")
_WESTERN = "cp1252"
_WORD = re.compile(r"[^\W\d_]+")


class _Set(NamedTuple):
    """A character set: its name, its codecs of Python, how likely a text is in its language, and how rare it is."""

    name: str
    codecs: tuple[str, ...]
    likelihood: Callable[[str], float]
    rarity: float = 0.0


def detected(data: bytes) -> tuple[str, str] | None:
    """Return the text of a file that is not UTF-8, and its character set, or None where it is not sure.

    Both are empty for a text in Latin letters that may be Windows-1252.
    """
    sample, is_cut = _sample(data)
    if _is_damaged_utf8(sample):
        return None
    found = dict[str, tuple[float, _Set]]()
    for candidate in _SETS:
        if (text := _decoded(sample, candidate.codecs, is_cut)) is not None:
            scored = candidate.likelihood(text) - candidate.rarity
            if scored > found.get(text, (-math.inf,))[0]:
                found[text] = scored, candidate
    (best, winner), *others = sorted(found.values(), key=lambda item: item[0], reverse=True)
    if not winner.name:
        name, codec = eastern(sample)
        if name and (whole := _decoded(data, (codec,), is_cut=False)) is not None:
            return whole, name
        western = _decoded(sample, (_WESTERN,), is_cut)
        return ("", "") if western in found and found[western][0] > best - _AHEAD else None
    if others and others[0][0] > best - _AHEAD:
        return None
    text = _decoded(data, winner.codecs, is_cut=False)
    return None if text is None else (text, winner.name)


def _sample(data: bytes) -> tuple[bytes, bool]:
    """Return the first lines that have other characters than those of ASCII, and whether the last of them is cut."""
    lines, size = list[bytes](), 0
    for line in data.split(b"\n"):
        if not line.isascii():
            lines.append(line[: _LONGEST_LINE + 1])
            size += len(lines[-1])
            if size > _SAMPLE or len(line) > _LONGEST_LINE:
                return b"\n".join(lines), len(line) > _LONGEST_LINE
    return b"\n".join(lines), False


def _decoded(data: bytes, codecs: tuple[str, ...], is_cut: bool) -> str | None:
    """Decode data in the first codec that it fits; None for none. is_cut: Its last character may be a part."""
    for codec in codecs:
        try:
            return getincrementaldecoder(codec)().decode(data) if is_cut else data.decode(codec)
        except UnicodeDecodeError:
            continue
    return None


def _is_damaged_utf8(sample: bytes) -> bool:
    """Whether nearly all that is no ASCII is UTF-8."""
    text = sample.decode(errors="replace")
    replaced = text.count("\ufffd")
    return sum(not letter.isascii() for letter in text) - replaced > _DAMAGED * replaced


def _wide(of_letter: Callable[[str], float]) -> Callable[[str], float]:
    """Return the likelihood of texts in characters of two bytes. of_letter: its logarithm for one."""

    def likelihood(text: str) -> float:
        counts = Counter(text)
        ascii_count = sum(count for letter, count in counts.items() if letter.isascii())
        count = counts.total() - ascii_count
        total = sum(times * of_letter(letter) for letter, times in counts.items() if not letter.isascii())
        if count < _LEAST_WIDE or total < _WORST_WIDE * count:
            return -math.inf
        return total + ascii_count * _ASCII

    return likelihood


def _lead(letter: str, codec: str) -> int:
    """Return the first byte of a character in the standard of its language; 0 where that has two bytes for none."""
    pair = letter.encode(codec, errors="ignore")
    return pair[0] if len(pair) == 2 else 0


def _by_row(letter: str, lead: int, levels: tuple[tuple[int, float], tuple[int, float]]) -> float:
    """Return the likelihood of a character that is not frequent.

    levels: (first byte, likelihood of a character) of the usual ones, and of the rest.
    """
    if "\u3000" <= letter <= "\u303f" or "\uff01" <= letter <= "\uff5e":
        return math.log(0.06 / 110)
    (usual, likely), (other, unlikely) = levels
    if lead >= other:
        return math.log(unlikely)
    if lead >= usual:
        return math.log(likely)
    return math.log(1e-5 if letter in _QUOTES else 1e-6) if letter.isprintable() else _NEVER


def _written(
    frequent: frozenset[str], share: float, codec: str, levels: tuple[tuple[int, float], tuple[int, float]]
) -> Callable[[str], float]:
    """Return the likelihood of a character, as its logarithm, in a language of many.

    Args:
        frequent: Its frequent characters.
        share: Of a text, that they have together.
        codec: Its standard.
        levels: First byte there and likelihood of a character, of the usual ones and of the rest.
    """

    @cache
    def of_letter(letter: str) -> float:
        if letter in frequent:
            return math.log(share / len(frequent))
        return _by_row(letter, _lead(letter, codec), levels)

    return of_letter


_kanji = _written(KANJI, 0.25, "euc_jp", ((0xB0, 0.1 / 2965), (0xD0, 0.01 / 3390)))
_simplified = _written(HANZI, 0.5, "gb2312", ((0xB0, 0.35 / 3755), (0xD8, 0.03 / 3008)))
_traditional = _written(TRADITIONAL, 0.5, "big5", ((0xA4, 0.35 / 5401), (0xC9, 0.03 / 7652)))
_korean = _written(HANGUL, 0.75, "euc_kr", ((0xB0, 0.2 / 2350), (0xCA, 0.002 / 4888)))


def _japanese(letter: str) -> float:
    if "ぁ" <= letter <= "ゖ":
        return math.log(0.4 / 85)
    if "ァ" <= letter <= "ー":
        return math.log(0.15 / 90)
    return _kanji(letter)


def _narrow(letters: str) -> Callable[[str], float]:
    """Return the likelihood of texts in an alphabet of single bytes. letters: of the alphabet, frequent ones first."""
    ranks = {letter: rank for rank, letter in enumerate(letters)}
    shares = ((10, 0.62 / 10), (20, 0.27 / 10), (34, 0.1 / 14))

    def of_letter(letter: str) -> float:
        rank = ranks.get(letter.lower())
        if rank is None:
            return _NEVER
        return math.log(next((share for end, share in shares if rank < end), 0.01 / 12))

    def likelihood(text: str) -> float:
        total, count, rest = 0.0, 0, len(text)
        for word in _WORD.findall(text):
            if word.isascii():
                continue
            own = sum(_NEVER if letter.isascii() else of_letter(letter) for letter in word) + _shape(word)
            total, count, rest = total + own, count + len(word), rest - len(word)
        signs = [letter for letter in _WORD.sub("", text) if not letter.isascii()]
        total += sum(math.log(0.002) if sign in _QUOTES else _NEVER for sign in signs)
        if count < _LEAST_LETTERS or total < _WORST_LETTER * (count + len(signs)):
            return -math.inf
        return total + (rest - len(signs)) * _ASCII

    return likelihood


def _shape(word: str) -> float:
    """Return how likely the capitals of a word are, and where its last letter stands."""
    penalty = 0.0 if "ς" not in word[:-1] else _RARE_SHAPE
    if word.islower() or word[1:].islower() or word.lower() == word.upper():
        return penalty
    return penalty + (len(word) * math.log(0.5) if word.isupper() else _RARE_SHAPE)


def _latin(text: str) -> float:
    """Return the likelihood of a text in a Latin alphabet with accents."""
    total = 0.0
    for before, letter, behind in zip(f" {text}", text, f"{text[1:]} ", strict=False):
        if letter.isascii():
            total += _ASCII
        elif letter.isalpha():
            total += math.log(0.15 / len(LATIN)) if letter.lower() in LATIN else math.log(1e-5)
            total += math.log(0.1) if before.isalpha() and not before.isascii() else 0.0
            total += _RARE_SHAPE if letter.isupper() and before.islower() else 0.0
        else:
            total += _NEVER if before.isalpha() and behind.isalpha() and letter not in "’·" else math.log(0.002)
    return total


_SETS = (
    _Set("shift_jis", ("cp932", "shift_jis_2004"), _wide(_japanese)),
    _Set("euc-jp", ("euc_jp", "euc_jis_2004"), _wide(_japanese)),
    _Set("gb18030", ("gb18030",), _wide(_simplified)),
    _Set("big5", ("big5hkscs", "cp950"), _wide(_traditional)),
    _Set("euc-kr", ("cp949",), _wide(_korean)),
    *(_Set(name, (codec,), _narrow(CYRILLIC)) for name, codec in (
        ("windows-1251", "cp1251"), ("koi8-u", "koi8_u"), ("ibm866", "cp866"), ("iso-8859-5", "iso8859_5"),
    )),
    _Set("x-mac-cyrillic", ("mac_cyrillic",), _narrow(CYRILLIC), rarity=6.0),
    *(_Set(name, (codec,), _narrow(GREEK)) for name, codec in (
        ("windows-1253", "cp1253"), ("iso-8859-7", "iso8859_7"), ("cp737", "cp737"),
    )),
    _Set("windows-1255", ("cp1255",), _narrow(HEBREW)),
    _Set("windows-1256", ("cp1256",), _narrow(ARABIC)),
    *(_Set("", (codec,), _latin) for codec in (_WESTERN, "cp1250", "cp1254", "cp1257", "cp850", "mac_roman")),
)  # fmt: skip
"""Sets by what is likely in them. Those without a name are in Latin letters, which do not say in which of them."""
