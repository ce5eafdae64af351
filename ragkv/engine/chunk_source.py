"""Where the reader's chunks come from: the KV store, or the model itself when the store does not deliver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from functools import partial

from ragkv.engine.cost_model import FREE, CostModel
from ragkv.engine.kv_transfer import PendingPin
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.errors import EntryCorrupt, EntryMissing, NotQuantisable, StoreError
from ragkv.kernels.transfer import PinnedBlocks
from ragkv.model.decoder import DecoderModel
from ragkv.recompute.base import Blocks, Method, Piece, Rows
from ragkv.recompute.digest import retrieval_pairs
from ragkv.store.base import KVStore
from ragkv.store.format.codec import Head, as_stored, chunk_key, pack, unpack_head
from ragkv.store.format.layout import Layout
from ragkv.store.format.seal import CHECKSUMS, Seal
from ragkv.store.tier import TierBytes
from ragkv.store.tiers import LoadedBlocks, Tiers
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


class ChunkStore:
    """The entries of one collection in a store and its tiers, as one model writes and reads them."""

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
        """body: one of BODIES · seal: vouches for what is read. The fingerprint must tell both."""
        self.block = model.profile.block
        self._tiers, self._fingerprint, self._body, self._seal = tiers, fingerprint, body, seal
        self._salt = seal.salt(collection)
        self._quarantine = quarantine or Quarantine()
        self._shape, self._dtype = model.shape, model.dtype
        group = model.shape.q_heads // model.shape.kv_heads
        self._pairs = len(retrieval_pairs(model.profile.retrieval_heads, group))

    def key(self, tokens: Sequence[int]) -> Key:
        """The name of a chunk in the store."""
        return chunk_key(self._fingerprint, self._salt, tokens)

    def stored(self, tokens: Sequence[int]) -> None:
        """Raises StoreError unless the store itself, not only memory, has the chunk's head, whole and this model's."""
        key = self.key(tokens)
        with self._removing(key):
            self._read_head(key, len(tokens))

    def head(self, key: Key, tokens: int) -> tuple[Head, str]:
        """The head record of a chunk of so many tokens, verified to be this chunk's, this model's and whole, and the
        tier that had it. Raises StoreError."""
        if key in self._quarantine.held:
            raise EntryCorrupt(f"{key} is known to be damaged, and the store lets nobody remove it")
        with self._removing(key):
            return self._tiers.head(key, lambda: self._read_head(key, tokens))

    def absent(self, key: Key, head: Head, wanted: Sequence[Blocks]) -> int:
        """Bytes of the wanted blocks that would have to come from the store."""
        return self._tiers.absent(key, head, wanted)

    def load(self, key: Key, head: Head, wanted: Sequence[Blocks]) -> LoadedBlocks:
        """Per layer the pre-RoPE rows of the wanted blocks, every block verified. Raises StoreError."""
        with self._removing(key):
            return self._tiers.load(key, head, wanted)

    def pin(self, key: Key, head: Head, wanted: Sequence[Blocks]) -> tuple[PinnedBlocks, TierBytes] | None:
        """The wanted blocks where they lie, every block verified, and which tier gave them; None without room in
        memory. Raises StoreError."""
        with self._removing(key):
            return self._tiers.pin(key, head, wanted)

    def warm(self, key: Key, head: Head, wanted: Sequence[Blocks]) -> None:
        """Bring the wanted blocks into memory. Raises StoreError."""
        with self._removing(key):
            self._tiers.warm(key, head, wanted)

    def put(self, kv: ChunkKV) -> tuple[ChunkKV, StoreError | None]:
        """Store a chunk; returns it as it would come back, so that hit and miss choose and answer alike, and why it
        could not be stored, if so. One that a quantised body cannot hold is returned as it is."""
        key = self.key(kv.tokens)
        try:
            kept, head, body = self._packed(kv)
        except NotQuantisable as error:
            return kv, error
        try:
            self._tiers.store.put(key, head, body)
        except StoreError as error:
            return kept, error
        self._quarantine.held.discard(key)
        return kept, None

    def remove(self, tokens: Sequence[int]) -> None:
        """Delete a chunk. Raises StoreError."""
        key = self.key(tokens)
        self._tiers.drop(key)
        self._tiers.store.delete(key)

    def rounded(self, kv: ChunkKV) -> ChunkKV:
        """A chunk as it would come back, without storing it."""
        try:
            return self._packed(kv)[0]
        except NotQuantisable:
            return kv

    def _packed(self, kv: ChunkKV) -> tuple[ChunkKV, bytes, list[memoryview]]:
        """(as it would come back, head, body). Raises NotQuantisable."""
        head, body = pack(kv, self.block, self._fingerprint, self._body, self._seal)
        return as_stored(kv, self._unpack(head, self.key(kv.tokens)), body), head, body

    def _read_head(self, key: Key, tokens: int) -> Head:
        head = self._unpack(self._tiers.store.head(key), key)
        expected = Layout(self._shape, tokens, self.block, self._dtype, self._body)
        if head.layout != expected or head.digest.retrieval_keys.shape[0] != self._pairs:
            raise EntryCorrupt(f"head of {key}: its sizes or its form are not this model's")
        return head

    def _unpack(self, head: bytes, key: Key) -> Head:
        return unpack_head(head, key, self._fingerprint, self._salt, self._seal)

    @contextmanager
    def _removing(self, key: Key) -> Iterator[None]:
        """An entry that turns out damaged goes into quarantine: the next reader must not stumble over it again, even
        if what replaces it cannot be written."""
        try:
            yield
        except EntryCorrupt:
            self._tiers.drop(key)
            self._quarantine.add(key, self._tiers.store)
            raise


def _nothing() -> PinnedBlocks | None:
    """Nothing is lent."""
    return None


def _left(kv: ChunkKV) -> ChunkKV:
    """Nothing is stored."""
    return kv


class StoredChunk:
    """A chunk in the KV store or its tiers, read range by range; a fault on the way encodes it again and goes on.

    hit: the head was there and valid · fallback: why it had to be encoded again, "" if it had not · head_bytes: of the
    head record, from memory or store · loaded_bytes: of blocks, from host memory or store.
    """

    def __init__(
        self,
        store: ChunkStore,
        tokens: Sequence[int],
        exact: bool,
        encode: Callable[[], ChunkKV],
        repair_entry: Callable[[ChunkKV], ChunkKV] = _left,
        costs: CostModel = FREE,
    ):
        """exact: as in Piece · encode: reads the chunk again · mend: stores what the store did not deliver, and returns
        it as it would come back · costs: what is not worth loading is encoded, though it is there."""
        self.tokens = tuple(tokens)
        self.hit, self.fallback, self.head_bytes, self.loaded_bytes = False, "", 0, 0
        self._store, self._exact, self._encode, self._repair_entry, self._costs = (
            store,
            exact,
            encode,
            repair_entry,
            costs,
        )
        self._key, self._tier_bytes = store.key(tokens), TierBytes()
        self._source: Head | InMemoryChunk
        try:
            head, tier = store.head(self._key, len(tokens))
        except StoreError as error:
            self._source = self._encode_after(error)
            self.piece = self._source.piece
        else:
            self.hit, self.head_bytes, self._source = True, head.bytes, head
            self._tier_bytes["store"] += head.bytes if tier == "store" else 0
            self.piece = Piece(len(self.tokens), store.block, head.digest, exact)

    @property
    def tier(self) -> str:
        """The farthest one that anything came from: store, host or gpu. A head record that was in memory counts only
        where no block was needed."""
        return next((name for name in ("store", "host", "gpu") if self._tier_bytes[name]), "host")

    def load(self, wanted: Sequence[Blocks]) -> list[Rows]:
        """Per layer the pre-RoPE rows of the wanted blocks; from a fresh encoding if the store fails."""
        head = self._loadable_head(wanted)
        if head is not None:
            try:
                loaded = self._store.load(self._key, head, wanted)
            except StoreError as error:
                self._source = self._encode_after(error)
            else:
                self._count(loaded.seen)
                return loaded.rows
        return self._fresh().load(wanted)

    def pin(self, wanted: Sequence[Blocks], threads: Executor) -> PendingPin:
        """The wanted blocks where they lie in memory, brought there in one of the threads."""
        head = self._loadable_head(wanted)
        if head is None:
            return _nothing
        if not self._store.absent(self._key, head, wanted):  # a thread would cost more than it takes
            return lambda: self._pinned(partial(self._store.pin, self._key, head, wanted))
        return partial(self._pinned, threads.submit(self._store.pin, self._key, head, wanted).result)

    def _pinned(self, coming: Callable[[], tuple[PinnedBlocks, TierBytes] | None]) -> PinnedBlocks | None:
        try:
            lent = coming()
        except StoreError as error:
            self._source = self._encode_after(error)
            return None
        if lent is None:
            return None
        self._count(lent[1])
        return lent[0]

    def _loadable_head(self, wanted: Sequence[Blocks]) -> Head | None:
        """The head record to load by; None where the chunk was encoded again, or is now, because that is quicker."""
        if not isinstance(self._source, Head):
            return None
        # Looked up only where loading all of it would be dear; as a rule that much arithmetic is enough.
        dear = self._costs.why_not_load(self._source.layout.wanted_bytes(wanted), len(self.tokens))
        if dear:
            dear = self._costs.why_not_load(self._store.absent(self._key, self._source, wanted), len(self.tokens))
        if dear:
            self._source = self._encode_again(dear, self._store.rounded)
            return None
        return self._source

    def _fresh(self) -> InMemoryChunk:
        assert isinstance(self._source, InMemoryChunk)
        return self._source

    def _count(self, seen: TierBytes) -> None:
        self._tier_bytes += seen
        self.loaded_bytes += seen["store"] + seen["host"]

    def _encode_after(self, error: StoreError) -> InMemoryChunk:
        why = "missing" if isinstance(error, EntryMissing) else f"{type(error).__name__}: {error}"
        return self._encode_again(why, self._repair_entry)

    def _encode_again(self, why: str, then: Callable[[ChunkKV], ChunkKV]) -> InMemoryChunk:
        self.hit, self.fallback = False, why
        return InMemoryChunk(then(self._encode()), self._store.block, self._exact)


def prefetch(store: ChunkStore, chunks: Sequence[Sequence[int]], method: Method) -> None:
    """Bring what a question about chunks (token ids) is sure to read: head records, and the blocks of the composite
    pass, which attends in all its layers but the last. What is missing or damaged is left to the question. Raises
    StoreUnavailable."""
    for tokens in chunks:
        with suppress(EntryMissing, EntryCorrupt):
            key = store.key(tokens)
            head, _ = store.head(key, len(tokens))
            first = method.composite_blocks([Piece(len(tokens), store.block, head.digest)])
            if first:
                layers = head.layout.shape.layers
                read = max(0, method.composite_layers(layers) - 1)
                store.warm(key, head, [first[0]] * read + [()] * (layers - read))
