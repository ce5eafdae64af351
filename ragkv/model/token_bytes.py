"""How many bytes of text each token of a vocabulary stands for, so that tokens are placed in a text without decoding.

byte-level vocabularies    one character of a token's name is one byte
others                     `▁` is a space, `<0xE2>` a byte, and any other name the text that it stands for
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragkv.model.wrapper import FIRST_ID

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACE_AS_BYTE = "\u0120"
"""The name of a space in byte-level vocabularies."""


class TokenBytes:
    """Bytes of each token of a tokenizer. Made when it is first asked for."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._lengths: NDArray[np.int64] | None = None

    def ends(self, tokens: Sequence[int], size: int) -> NDArray[np.float64]:
        """Return where each token of a text ends.

        Args:
            tokens: Token ids of the whole text.
            size: Bytes of the text. What a tokenizer adds or normalises away is spread over all tokens.

        Returns:
            Byte offsets [len(tokens)]; the last one is `size`.
        """
        numbers, table = np.asarray(tokens, np.int64), self._table()
        known = numbers < FIRST_ID  # wrapper tokens stand for nothing
        ends = np.cumsum(np.where(known, table[np.where(known, numbers, 0)], 0)).astype(np.float64)
        return ends * (size / max(1.0, float(ends[-1])) if len(ends) else 1.0)

    def _table(self) -> NDArray[np.int64]:
        if self._lengths is None:
            names = self._tokenizer.get_vocab()
            lengths = np.zeros(max(names.values()) + 1, np.int64)
            in_bytes = any(name.startswith(_SPACE_AS_BYTE) for name in names)
            for name, number in names.items():
                lengths[number] = len(name) if in_bytes else _length(name)
            self._lengths = lengths
        return self._lengths


def _length(name: str) -> int:
    return 1 if _BYTE.fullmatch(name) else len(name.replace("\u2581", " ").encode())
