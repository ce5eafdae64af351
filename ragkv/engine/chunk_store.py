"""The chunk store: a collection's entries as one model writes, verifies and reads them, and the damaged ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ragkv.errors import EntryCorrupt, NotQuantisable, StoreError
from ragkv.model.decoder import DecoderModel
from ragkv.recompute.digest import retrieval_pairs
from ragkv.store.base import KVStore
from ragkv.store.format.codec import ChunkBytes, as_stored, begin_packing, pack, pack_bytes
from ragkv.store.format.head import Head, chunk_key, unpack_head
from ragkv.store.format.layout import Layout
from ragkv.store.format.seal import CHECKSUMS, Seal
from ragkv.store.tier import fetch_states
from ragkv.store.tiers import Tiers
from ragkv.types import ChunkKV, Key


class Quarantine:
    """Damaged entries. They are deleted; those that the store cannot delete are not read until they are replaced.

    Attributes:
        count: Damaged entries found since the start.
        held: Keys that the store could not delete.
    """

    def __init__(self) -> None:
        self.count = 0
        self.held: set[Key] = set()

    def add(self, key: Key, store: KVStore) -> None:
        """Count a damaged entry and delete it, or hold its key if that fails."""
        self.count += 1
        try:
            store.delete(key)
        except StoreError:
            self.held.add(key)


class ChunkStore:
    """The entries of one collection in a store and its tiers, as one model writes and reads them.

    Attributes:
        tiers: The store and its tiers. Wrap calls that read blocks in `quarantining`.
        block: Tokens of a block.
        layers: Layers of the model.
    """

    def __init__(
        self,
        tiers: Tiers,
        model: DecoderModel,
        fingerprint: str,
        collection: str,
        body: str = "exact",
        seal: Seal = CHECKSUMS,
        quarantine: Quarantine | None = None,
    ):
        """Create a view of a store.

        Args:
            tiers: The store and its tiers.
            model: The model whose KV is stored.
            fingerprint: Of the model and settings. It must differ for another `body` or `seal`.
            collection: The collection of the chunks.
            body: One of `BODIES`.
            seal: Verifies what is read.
            quarantine: Shared by all views of a store.
        """
        self.tiers, self.block, self.layers = tiers, model.profile.block, model.shape.layers
        self._fingerprint, self._body, self._seal = fingerprint, body, seal
        self._salt = seal.salt(collection)
        self._quarantine = quarantine or Quarantine()
        self._shape, self._dtype, self._states = model.shape, model.dtype, model.states
        group = model.shape.q_heads // model.shape.kv_heads
        self._pairs = len(retrieval_pairs(model.profile.retrieval_heads, group))

    def key(self, tokens: Sequence[int]) -> Key:
        """Return the key of a chunk."""
        return chunk_key(self._fingerprint, self._salt, tokens)

    def verify_stored(self, tokens: Sequence[int]) -> None:
        """Verify that the store itself, not only memory, has the chunk's head. Raises StoreError otherwise."""
        key = self.key(tokens)
        with self.quarantining(key):
            self._read_head(key, len(tokens))

    def head(self, key: Key, tokens: int) -> tuple[Head, str]:
        """Return the head record of a chunk and the tier that had it.

        The record is verified: it is whole, and it belongs to this chunk and this model.

        Args:
            key: The chunk.
            tokens: How many tokens it has.

        Raises:
            StoreError: The record is missing or damaged, or the store does not answer.
        """
        if key in self._quarantine.held:
            raise EntryCorrupt(f"{key} is known to be damaged, and the store cannot delete it")
        with self.quarantining(key):
            return self.tiers.head(key, lambda: self._read_head(key, tokens))

    def states(self, key: Key, head: Head) -> tuple[Tensor, ...]:
        """Read the states behind a chunk and verify them. Raises StoreError."""
        with self.quarantining(key):
            return self._states.unpacked(fetch_states(self.tiers.store, key, head))

    def put(self, kv: ChunkKV) -> tuple[ChunkKV, StoreError | None]:
        """Store a chunk.

        Returns:
            The chunk as it would be loaded, so that a hit and a miss select and answer alike; and the error if it could
            not be stored. A chunk that a quantised body cannot hold is returned unchanged.
        """
        key = self.key(kv.tokens)
        try:
            loaded, head, body = self._pack(kv)
        except NotQuantisable as error:
            return kv, error
        try:
            self._put(key, head, body)
        except StoreError as error:
            return loaded, error
        return loaded, None

    def begin_packing(self, kv: ChunkKV) -> ChunkBytes:
        """Do the part of packing a chunk that its device does; `put_packed` does the rest."""
        return begin_packing(kv, self.block, self._body)

    def put_packed(self, chunk: ChunkBytes) -> StoreError | None:
        """Store a chunk that `begin_packing` returned. Any thread may call it.

        Returns:
            The error if it could not be stored.
        """
        try:
            self._put(self.key(chunk.tokens), *pack_bytes(chunk, self._fingerprint, self._seal))
        except StoreError as error:
            return error
        return None

    def remove(self, tokens: Sequence[int]) -> None:
        """Delete a chunk from the tiers and the store. Raises StoreError."""
        key = self.key(tokens)
        self.tiers.drop(key)
        self.tiers.store.delete(key)

    def as_loaded(self, kv: ChunkKV) -> ChunkKV:
        """Return a chunk as it would be loaded, without storing it."""
        try:
            return self._pack(kv)[0]
        except NotQuantisable:
            return kv

    @contextmanager
    def quarantining(self, key: Key) -> Iterator[None]:
        """Put an entry into quarantine when the block raises EntryCorrupt, and pass the error on.

        So the next request does not read the damaged entry again, even if its replacement cannot be written.
        """
        try:
            yield
        except EntryCorrupt:
            self.tiers.drop(key)
            self._quarantine.add(key, self.tiers.store)
            raise

    def _pack(self, kv: ChunkKV) -> tuple[ChunkKV, bytes, list[memoryview]]:
        """Return the chunk as it would be loaded, its head and its body. Raises NotQuantisable."""
        head, body = pack(kv, self.block, self._fingerprint, self._body, self._seal)
        return as_stored(kv, self._unpack_head(head, self.key(kv.tokens)), body), head, body

    def _put(self, key: Key, head: bytes, body: Sequence[memoryview]) -> None:
        self.tiers.store.put(key, head, body)
        self._quarantine.held.discard(key)

    def _read_head(self, key: Key, tokens: int) -> Head:
        head = self._unpack_head(self.tiers.store.head(key), key)
        expected = Layout(self._shape, tokens, self.block, self._dtype, self._body, self._states.bytes)
        if head.layout != expected or head.digest.retrieval_keys.shape[0] != self._pairs:
            raise EntryCorrupt(f"head of {key}: its sizes or its form are not this model's")
        return head

    def _unpack_head(self, head: bytes, key: Key) -> Head:
        return unpack_head(head, key, self._fingerprint, self._salt, self._seal)
