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


def find_named(names: Mapping[str, int], index: WordPlaces, windows: NDArray[np.float64]) -> Tensor:
    """Return which words of titles stand in the text of each window [B, U] bool.

    Args:
        names: Beginnings of words, or pairs of characters, with their columns.
        index: Where the words of the text stand.
        windows: First and last byte of each window [2, B], both in order.
    """
    present = np.zeros((windows.shape[1], len(names)), bool)
    columns = np.full(len(index.numbers), -1)
    for word in names.keys() & index.numbers.keys():
        columns[index.numbers[word]] = names[word]
    column = columns[index.words]
    at, column = index.at[column >= 0], column[column >= 0]
    window, behind = np.searchsorted(windows[1], at, "right"), np.searchsorted(windows[0], at, "right")
    while len(window):  # at most as often as windows overlap
        inside = window < behind
        window, behind, column = window[inside], behind[inside], column[inside]
        present[window, column] = True
        window = window + 1
    return torch.from_numpy(present)
