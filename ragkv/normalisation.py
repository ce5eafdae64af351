"""Characters that readers do not see or do not tell apart, and how search reads them.

    visible       what is stored and read by the model: without characters that nobody sees and that mean nothing
    folded        what texts are compared by and embedded as: one form of each character
    searchable    what the word indexes hold and what is looked up in them: folded, with numbers also in one piece

What is shown, cited and counted in offsets is the stored text. Only search folds it.

Unicode Standard Annex #15, "Unicode Normalization Forms"; Technical Standard #39, section 3.1.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
UNSPACED = re.compile(f"[{_UNSPACED}]")
"""A character of a script that puts no spaces between words: Thai, Lao, Burmese, Khmer, kana, Chinese characters."""
RUN = re.compile(f"[{_UNSPACED}]+|[^{_UNSPACED}]+")
"""Characters that follow each other and are all of such scripts, or none of them."""

# Compatibility forms that change nothing of what a word says. Of superscripts, fractions and circled figures the plain
# form says something else: 10⁶ is not 106, and 1½ is not 11/2.
_SAME = frozenset(
    {
        *("<compat>", "<font>", "<noBreak>", "<wide>", "<narrow>", "<sub>", "<square>", "<small>", "<vertical>"),
        *("<initial>", "<medial>", "<final>", "<isolated>"),
    }
)
# Soft hyphen, joiners and zero width spaces, controls of direction, invisible operators, marks of annotations.
_IGNORED = (
    "\xad\u034f\u061c\u180e\u200b\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\u200e\u200f\u202a-\u202e\u2066-\u2069"
)
_JOINERS = "\u200c\u200d"
# Scripts in which joiners choose the form of a letter (Arabic to Tibetan, Khmer, Mongolian and their neighbours), and
# signs that joiners make one picture of.
_JOINING = "\u0600-\u109f\u1780-\u18af\u1900-\u1cff\ua800-\uabff\ufb50-\ufdff\ufe00-\ufe0f\ufe70-\ufefe\u2190-\u2bff"
_PICTURES = "\U00010a00-\U00011fff\U0001f000-\U0001faff"
_TAGS = "\U000e0000-\U000e007f"
"""They spell the regions of flags, and else text that nobody sees."""

_HIDDEN = re.compile(
    f"(?<![{_UNSPACED}])\u200b|[{_IGNORED.replace(chr(0x200B), '')}]"
    f"|(?<![{_JOINING}{_PICTURES}{_JOINERS}])[{_JOINERS}]+|(?<![\U0001f3f4{_TAGS}])[{_TAGS}]+"
)
_MAY_HIDE = re.compile(f"[{_IGNORED}{_JOINERS}{_TAGS}]")
_BROKEN_WORD = re.compile("\xad[ \t]*\n[ \t]*(?=\\w)")
_WORD_BREAK = re.compile(f"(?<=[{_UNSPACED}])\u200b")
_GROUPED = re.compile(
    r"(?<!\d)\d{1,3}([ ,.'’ʼ٬_])\d{3}(?!\d)(?:\1\d{3}(?!\d))*|(?<!\d)\d{1,2}(?:,\d\d){1,4},\d{3}(?!\d)"
)
_MAY_GROUP = re.compile(r"\d[ ,.'’ʼ٬_]\d\d")
"""Found in less time than what it is a part of."""
_SEPARATORS = str.maketrans("", "", " ,.'’ʼ٬_")


def visible(text: str) -> str:
    """Return a text without characters that are invisible and mean nothing.

    These are soft hyphens, zero width spaces and joiners, controls of direction, and tags. Zero width spaces between
    words of scripts without spaces stay, and so do joiners in scripts that need them and in emoji. A word that a soft
    hyphen divides at the end of a line is one word.
    """
    if text.isascii() or _MAY_HIDE.search(text) is None:
        return text
    return _HIDDEN.sub("", _BROKEN_WORD.sub("", text))


def normal_id(id: str) -> str:
    """Return the one form of a document id: composed (NFC), and without invisible characters."""
    return id if id.isascii() else unicodedata.normalize("NFC", visible(id))


def folded(text: str) -> str:
    """Return a text in one form of each character.

    Invisible characters are left out, ligatures are letters, letters and figures have their usual width, all spaces are
    plain ones, and accents belong to their letters (NFC). Case, superscripts and fractions stay.
    """
    if text.isascii():
        return text
    return unicodedata.normalize("NFC", _WORD_BREAK.sub(" ", text).translate(_FOLDS))


def fold_with_offsets(text: str) -> tuple[str, NDArray[np.int64] | None]:
    """Fold a text.

    Returns:
        The folded text, and where each of its characters, and its end, stands in `text`; None where each stands where
        it stood.
    """
    new = folded(text)
    if len(new) == len(text) and (text.isascii() or _is_even(text)):
        return new, None
    parts, offsets, spaced = list[str](), list[int](), _WORD_BREAK.sub(" ", text)
    for start, end in _clusters(spaced):
        parts.append(unicodedata.normalize("NFC", spaced[start:end].translate(_FOLDS)))
        offsets += [start] * len(parts[-1])
    return "".join(parts), np.asarray([*offsets, len(text)], np.int64)


def numbers(text: str) -> Iterator[tuple[int, str]]:
    """Yield (offset, figures) of each number of a folded text whose figures stand in groups: `48 000`, `48,000`."""
    if _MAY_GROUP.search(text):
        for number in _GROUPED.finditer(text):
            yield number.start(), number[0].translate(_SEPARATORS)


def searchable(text: str) -> str:
    """Return what a word index holds of a text: the folded text, and behind it the grouped numbers in one piece.

    The groups stay as well, because `101 102 103` may be three rooms. Version 1 of this function is known to SQLite as
    SEARCHABLE: a change of what it returns needs another name there, so that indexes are built again.
    """
    new = folded(text)
    joined = [figures for _, figures in numbers(new)]
    return " ".join([new, *joined]) if joined else new


SEARCHABLE = "ragkv_searchable_1"
"""Name of `searchable` in SQLite."""


class _Folds(dict[int, str]):
    """What stands for each character, by its code point. Filled when characters are met."""

    def __missing__(self, point: int) -> str:
        self[point] = found = _fold(chr(point))
        return found


_FOLDS = _Folds()
_INVISIBLE = re.compile(f"[{_IGNORED}{_JOINERS}{_TAGS}\ufe00-\ufe0f]")


def _fold(character: str) -> str:
    if _INVISIBLE.match(character):
        return ""
    kind = unicodedata.decomposition(character).partition(" ")[0]
    if kind in _SAME:
        plain = unicodedata.normalize("NFKC", character)
        if len(plain) == 1 or any(map(str.isalnum, plain)):
            return plain
    return unicodedata.normalize("NFC", character)


def _is_even(text: str) -> bool:
    """Whether each character of a text is folded alone, to one character."""
    return unicodedata.is_normalized("NFC", text) and all(len(_FOLDS[ord(character)]) == 1 for character in set(text))


def _clusters(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each character with the marks behind it that may become one with it."""
    start = 0
    for at in range(1, len(text)):
        if not _is_mark(text[at]):
            yield start, at
            start = at
    if text:
        yield start, len(text)


def _is_mark(character: str) -> bool:
    """Whether a character becomes nothing, or one with the character before it: accents, vowel signs, jamo."""
    first = _FOLDS[ord(character)][:1]
    return not first or "\u1160" <= first <= "\u11ff" or unicodedata.category(first)[0] == "M"
