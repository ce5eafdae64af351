"""Where the reader's chunks come from: the KV store, or the model itself when the store does not deliver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ragkv.errors import EntryCorrupt, EntryMissing, StoreError
from ragkv.model import DecoderModel
from ragkv.reader import Fresh
from ragkv.recompute.base import Blocks, Piece, Rows
from ragkv.recompute.digest import retrieval_pairs
from ragkv.store.base import KVStore
from ragkv.store.codec import Head, chunk_key, pack, read_blocks, unpack_head
from ragkv.store.layout import Layout
from ragkv.types import ChunkKV, Key


class Quarantine:
    """Entries that turned out damaged. They are deleted; where the store refuses even that, they are not read again
    until they have been replaced. found: how many, since the start."""

    def __init__(self) -> None:
        self.found = 0
        self.held: set[Key] = set()

    def add(self, key: Key, store: KVStore) -> None:
        """Count a damaged entry and take it out of the way."""
        self.found += 1
        try:
            store.delete(key)
        except StoreError:
            self.held.add(key)


class Shelf:
    """The entries of one collection in a store, as one model writes and reads them."""

    def __init__(
        self,
        store: KVStore,
        model: DecoderModel,
        fingerprint: str,
        collection: str,
        quarantine: Quarantine | None = None,
    ):
        self.block = model.profile.block
        self._quarantine = quarantine or Quarantine()
        self._store, self._fingerprint, self._collection = store, fingerprint, collection
        self._shape, self._dtype = model.shape, model.dtype
        group = model.shape.q_heads // model.shape.kv_heads
        self._pairs = len(retrieval_pairs(model.profile.retrieval_heads, group))

    def key(self, tokens: Sequence[int]) -> Key:
        """The name of a chunk in the store."""
        return chunk_key(self._fingerprint, self._collection, tokens)

    def head(self, tokens: Sequence[int]) -> Head:
        """The head record of a chunk, verified to be this chunk's, this model's and whole. Raises StoreError."""
        key = self.key(tokens)
        if key in self._quarantine.held:
            raise EntryCorrupt(f"{key} is known to be damaged, and the store lets nobody remove it")
        with self._removing(key):
            head = unpack_head(self._store.head(key), key, self._fingerprint, self._collection)
            expected = Layout(self._shape, len(tokens), self.block, self._dtype)
            if head.layout != expected or head.digest.retrieval_keys.shape[0] != self._pairs:
                raise EntryCorrupt(f"head of {key}: its sizes are not this model's")
        return head

    def rows(self, tokens: Sequence[int], head: Head, wanted: Sequence[Blocks]) -> list[Rows]:
        """Per layer the pre-RoPE rows of the wanted blocks, every block verified. Raises StoreError."""
        key = self.key(tokens)
        with self._removing(key):
            return read_blocks(self._store, key, head, wanted)

    def put(self, kv: ChunkKV) -> tuple[ChunkKV, StoreError | None]:
        """Store a chunk; returns it with its digest rounded as a stored one is, so that hit and miss choose alike, and
        why it could not be stored, if so."""
        key = self.key(kv.tokens)
        head, body = pack(kv, self.block, self._fingerprint)
        kept = replace(kv, digest=unpack_head(head, key, self._fingerprint, self._collection).digest)
        try:
            self._store.put(key, head, body)
        except StoreError as error:
            return kept, error
        self._quarantine.held.discard(key)
        return kept, None

    @contextmanager
    def _removing(self, key: Key) -> Iterator[None]:
        """An entry that turns out damaged goes into quarantine: the next reader must not stumble over it again, even
        if what replaces it cannot be written."""
        try:
            yield
        except EntryCorrupt:
            self._quarantine.add(key, self._store)
            raise


class StoredChunk:
    """A chunk in the KV store, read range by range; a fault on the way encodes it again and goes on.

    hit: the head was there and valid · fallback: why it had to be encoded again, "" if it had not · head_bytes,
    loaded_bytes: read from the store.
    """

    def __init__(self, shelf: Shelf, tokens: Sequence[int], exact: bool, encode: Callable[[], ChunkKV]):
        """exact: as in Piece · encode: reads the chunk again, and stores it."""
        self.tokens = tuple(tokens)
        self.hit, self.fallback, self.head_bytes, self.loaded_bytes = False, "", 0, 0
        self._shelf, self._exact, self._encode = shelf, exact, encode
        self._from: Head | Fresh
        try:
            head = shelf.head(tokens)
        except StoreError as error:
            self._from = self._read_again(error)
            self.piece = self._from.piece
        else:
            self.hit, self.head_bytes, self._from = True, head.bytes, head
            self.piece = Piece(len(self.tokens), shelf.block, head.digest, exact)

    def load(self, wanted: Sequence[Blocks]) -> list[Rows]:
        """Per layer the pre-RoPE rows of the wanted blocks; from a fresh encoding if the store fails."""
        if isinstance(self._from, Head):
            try:
                rows = self._shelf.rows(self.tokens, self._from, wanted)
            except StoreError as error:
                self._from = self._read_again(error)
            else:
                self.loaded_bytes += sum(part.numel() * part.itemsize for pair in rows for part in pair)
                return rows
        return self._from.load(wanted)

    def _read_again(self, error: StoreError) -> Fresh:
        self.hit = False
        self.fallback = "missing" if isinstance(error, EntryMissing) else f"{type(error).__name__}: {error}"
        return Fresh(self._encode(), self._shelf.block, self._exact)
