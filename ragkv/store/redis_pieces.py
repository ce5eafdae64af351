"""The pieces that one read of the Redis store is cut into (redis_store.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

from ragkv.store.base import Range
from ragkv.store.redis_wire import ServerRefusal

PIECE = 2**19
Piece: TypeAlias = tuple[int, str, int, int, int]
"""(index of its range, name of the value, first byte there, size, first byte in the output buffer). A plain tuple,
because a load has hundreds."""


class UnexpectedReply(Exception):
    """A piece was answered with an error, or with another size."""

    def __init__(self, piece: Piece, reply: int | ServerRefusal) -> None:
        super().__init__()
        self.piece, self.reply = piece, reply


def cut(names: Sequence[str], ranges: Sequence[Range]) -> Iterator[Piece]:
    """Cut the ranges of values into pieces, in order."""
    starts = accumulate((part.size for part in ranges), initial=0)
    for number, (name, part, at) in enumerate(zip(names, ranges, starts, strict=False)):
        for done in range(0, part.size, PIECE):
            yield number, name, part.offset + done, min(PIECE, part.size - done), at + done
