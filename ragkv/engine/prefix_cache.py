"""Prefix caching of full prefills (`full:prefix=true`): KV of S and of the chunks behind it, for the next question that
begins alike.

A row of a full prefill depends on all rows before it. So the KV of a chunk is known by the chunk and everything in
front of it, and it is used again only where all of that is the same, in the same order. Answers are those of `full`, up
to the order of additions. Stored KV needs no such luck: a chunk is encoded once, wherever it stands later.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ragkv.engine.session import SessionState
from ragkv.model.kv_cache import ContextCache
from ragkv.types import Chunk


@dataclass(frozen=True, eq=False)
class _PrefilledChunk:
    """A chunk behind a known prefix. rows: its rows, at its positions."""

    chunk: Chunk
    collection: str
    rows: ContextCache


class PrefixCache:
    """Rows of chunks by what stands before them. The least recently used go when `limit` bytes are exceeded."""

    def __init__(self, prefix: ContextCache, limit: int):
        """Start empty; prefix: the rows of S."""
        self.limit = limit
        self._prefix = prefix
        self._chunks: OrderedDict[bytes, _PrefilledChunk] = OrderedDict()
        self._bytes = 0

    def restore(self, state: SessionState, chunks: Sequence[Chunk], collection: str) -> int:
        """Begin a session with what is known of its chunks.

        Args:
            state: The session. Nothing was prefilled yet.
            chunks: The chunks that follow S, in order.
            collection: Their collection.

        Returns:
            How many of them, from the first on, the session now holds.
        """
        known = list[ContextCache]()
        for name in _names(chunks, collection):
            found = self._chunks.get(name)
            if found is None:
                break
            self._chunks.move_to_end(name)
            known.append(found.rows)
        if known:
            state.begin_with(self._prefix, known)
        return len(known)

    def keep(self, cache: ContextCache, chunks: Sequence[Chunk], collection: str) -> None:
        """Copy the rows of chunks out of a context cache that begins with S and with them, each computed densely."""
        start = self._prefix.lengths[0]
        for name, chunk in zip(_names(chunks, collection), chunks, strict=True):
            stop = start + len(chunk.tokens)
            if name not in self._chunks:
                rows = cache.copy_of(start, stop)
                if rows.bytes > self.limit:
                    return
                self._chunks[name] = _PrefilledChunk(chunk, collection, rows)
                self._bytes += rows.bytes
            self._chunks.move_to_end(name)
            start = stop
        while self._bytes > self.limit:
            self._bytes -= self._chunks.popitem(last=False)[1].rows.bytes

    def clear(self) -> None:
        """Forget everything."""
        self._chunks.clear()
        self._bytes = 0

    def drop_chunks(self, gone: Callable[[Chunk, str], bool]) -> None:
        """Forget chunks that left their collection, wherever they stood."""
        for name, kept in list(self._chunks.items()):
            if gone(kept.chunk, kept.collection):
                self._bytes -= self._chunks.pop(name).rows.bytes

    def chunks(self) -> list[tuple[Chunk, str]]:
        """Return the chunks that are known, each with its collection."""
        return [(each.chunk, each.collection) for each in self._chunks.values()]


def _names(chunks: Sequence[Chunk], collection: str) -> Iterator[bytes]:
    """Yield a name for each chunk behind those before it."""
    digest = hashlib.sha256(collection.encode())
    for chunk in chunks:
        digest.update(np.asarray([len(chunk.tokens), *chunk.tokens], "<i8").tobytes())
        yield digest.digest()
