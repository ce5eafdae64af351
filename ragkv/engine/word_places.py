"""Where the words of a text stand, by their beginnings, so that many words are found at once in windows of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.normalisation import RUN, UNSPACED

STEM = 5
"""Letters by which words are compared, so that `built` and `builds`, or `bridge` and `bridges`, are the same."""

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, eq=False)
class WordPlaces:
    """Where the words of a text stand.

    Attributes:
        numbers: A number for the beginning of each word, from 0.
        words: The number of each word of the text, in any order [n].
        at: The byte at which that word begins [n].
    """

    numbers: Mapping[str, int]
    words: NDArray[np.int64]
    at: NDArray[np.int64]

    def places_of(self, names: Mapping[str, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the byte at which each word begins that is one of some names, and the number of that name."""
        known = names.keys() & self.numbers.keys()
        columns = np.full(len(self.numbers), -1)
        columns[[self.numbers[word] for word in known]] = [names[word] for word in known]
        column = columns[self.words]
        return self.at[column >= 0], column[column >= 0]


def word_beginnings(text: str) -> Iterator[tuple[str, int]]:
    """Yield the beginning of each word of a text in lower case, or each pair of characters, and where it stands."""
    spaced = UNSPACED.search(text) is None  # nearly every text: a second search of each word would take twice the time
    for word in _WORD.finditer(text):
        if spaced:
            yield word[0][:STEM], word.start()
            continue
        for run in RUN.finditer(word[0]):
            start, letters = word.start() + run.start(), run[0]
            if UNSPACED.match(letters):
                yield from ((letters[i : i + 2], start + i) for i in range(max(1, len(letters) - 1)))
            else:
                yield letters[:STEM], start


def word_places(text: str, offsets: NDArray[np.int64] | None) -> WordPlaces:
    """Return where the words of a text stand. offsets: as in `SearchedText`."""
    numbers, words, characters = dict[str, int](), list[int](), list[int]()
    for word, at in word_beginnings(text):
        words.append(numbers.setdefault(word, len(numbers)))
        characters.append(at)
    places = np.asarray(characters, np.int64)
    return WordPlaces(numbers, np.asarray(words, np.int64), places if offsets is None else offsets[places])


def in_windows(
    at: NDArray[np.int64],
    columns: NDArray[np.int64],
    windows: tuple[NDArray[np.float64], NDArray[np.float64]],
    count: int,
) -> Tensor:
    """Return which words stand in each window [B, count] bool.

    Args:
        at: The byte at which a word stands, in any order [n].
        columns: The column of that word [n].
        windows: First and last byte of each window [B], both in order.
        count: Columns.
    """
    first, last = windows
    present = np.zeros((len(first), count), bool)
    window, behind = np.searchsorted(last, at, "right"), np.searchsorted(first, at, "right")
    while len(window):  # at most as often as windows overlap
        inside = window < behind
        window, behind, columns = window[inside], behind[inside], columns[inside]
        present[window, columns] = True
        window = window + 1
    return torch.from_numpy(present)
