"""Where the reader's chunks come from: the KV store, or the model itself when the store does not deliver."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragkv.errors import EntryMissing, StoreError
from ragkv.reader import Fresh
from ragkv.recompute.base import Blocks, Piece
from ragkv.stitch import Rows
from ragkv.store.base import KVStore
from ragkv.store.codec import Head, read_blocks, unpack_head, wanted_bytes
from ragkv.types import ChunkKV, Key


class StoredChunk:
    """A chunk in the KV store, read range by range; a fault on the way encodes it again and goes on.

    hit: the head was there and valid · fallback: why it had to be encoded again, "" if it had not · head_bytes,
    loaded_bytes: read from the store.
    """

    def __init__(
        self,
        store: KVStore,
        key: Key,
        tokens: Sequence[int],
        block: int,
        exact: bool,
        fingerprint: str,
        salt: str,
        encode: Callable[[], ChunkKV],
    ):
        """encode: reads the chunk again, and stores it."""
        self.tokens = tuple(tokens)
        self.hit, self.fallback, self.head_bytes, self.loaded_bytes = False, "", 0, 0
        self._store, self._key, self._block, self._exact, self._encode = store, key, block, exact, encode
        self._head: Head | None = None
        self._fresh: Fresh | None = None
        try:
            data = store.head(key)
            self.head_bytes = len(data)
            self._head = unpack_head(data, key, fingerprint, salt)
            self.piece = Piece(len(self.tokens), block, self._head.digest, exact)
            self.hit = True
        except StoreError as error:
            self.piece = self._read_again(error).piece

    def load(self, wanted: Sequence[Blocks]) -> list[Rows]:
        """Per layer the pre-RoPE rows of the wanted blocks, verified; from a fresh encoding if the store fails."""
        if self._fresh is None and self._head is not None:
            try:
                rows = read_blocks(self._store, self._key, self._head, wanted)
                self.loaded_bytes += wanted_bytes(self._head.layout, wanted)
                return rows
            except StoreError as error:
                self._read_again(error)
        assert self._fresh is not None  # set by _read_again
        return self._fresh.load(wanted)

    def _read_again(self, error: StoreError) -> Fresh:
        self.hit = False
        self.fallback = "missing" if isinstance(error, EntryMissing) else f"{type(error).__name__}: {error}"
        self._fresh = Fresh(self._encode(), self._block, self._exact)
        return self._fresh
