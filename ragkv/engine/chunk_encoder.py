"""Stored chunks as the engine uses them: encode and store, open for a question, repair, evict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import torch

from ragkv.catalog import Catalog
from ragkv.engine.chunk_source import StoredChunk, prefetch
from ragkv.engine.chunk_store import ChunkStore, Quarantine
from ragkv.engine.cost_model import FREE, CostModel
from ragkv.engine.passes import Passes
from ragkv.engine.prefill import Prefiller
from ragkv.engine.store_faults import StoreFaults
from ragkv.errors import NotFound, StoreError, StoreUnavailable
from ragkv.model.layer_pass import Pass
from ragkv.recompute.base import Method
from ragkv.store.format.seal import Seal
from ragkv.store.tiers import Tiers
from ragkv.types import Chunk, ChunkKV, Key

EVICTED_AT_ONCE = 100
"""Entries deleted in one transaction of the catalogue, while other writers wait."""


GROUP_TOKENS, GROUP_TOKENS_ON_GPU = 1024, 4096
"""Tokens of chunks that are encoded together. Questions wait for a group. A CPU gains nothing from larger groups."""


def group_tokens(device: torch.device) -> int:
    """Return how many tokens of chunks are encoded together on a device, where no setting says it."""
    return GROUP_TOKENS if device.type == "cpu" else GROUP_TOKENS_ON_GPU


@dataclass(eq=False)
class _Encoding:
    """A missing chunk that questions wait for. kv: what came of its pass, as it would be loaded."""

    layer_pass: Pass
    kv: ChunkKV | None = None

    @property
    def ran(self) -> bool:
        """Whether the pass has run."""
        capture = self.layer_pass.capture
        return capture is not None and len(capture.k) == len(self.layer_pass.steps)


class ChunkEncoder:
    """The KV of all chunks of one engine. Not thread-safe.

    Attributes:
        costs: What loading and encoding cost here. Until they are measured everything is loaded.
        quarantine: Damaged entries.
        faults: Faults of the store. A refused write cost an encoding, a refused deletion left an orphan.
    """

    def __init__(self, prefiller: Prefiller, tiers: Tiers, catalog: Catalog, fingerprint: str, body: str, seal: Seal):
        """Set up the encoder.

        Args:
            prefiller: Encodes chunks.
            tiers: The KV store with what is kept of it in memory.
            catalog: Says which keys are referred to.
            fingerprint: Of everything that makes stored KV valid; it covers body and seal.
            body: Form of stored K and V, one of BODIES.
            seal: Vouches for what is read.
        """
        self.costs: CostModel = FREE
        self.quarantine = Quarantine()
        self.faults = StoreFaults()
        self._prefiller, self._tiers, self._catalog = prefiller, tiers, catalog
        self._fingerprint, self._body, self._seal = fingerprint, body, seal
        self._encodings: WeakValueDictionary[Key, _Encoding] = WeakValueDictionary()

    def store(self, collection: str) -> ChunkStore:
        """Return the entries of a collection."""
        model = self._prefiller.model
        return ChunkStore(self._tiers, model, self._fingerprint, collection, self._body, self._seal, self.quarantine)

    def encode_and_store_all(self, chunks: Iterable[tuple[Chunk, str]]) -> None:
        """Encode chunks in one forward pass and store their KV, except those of which a valid entry is there.

        While the store is down nothing is encoded: the first question that needs a chunk encodes it.

        Args:
            chunks: Chunks, each with its collection. A chunk that occurs twice is encoded once.
        """
        missing: dict[Key, tuple[Chunk, ChunkStore]] = {}
        for chunk, collection in chunks:
            store = self.store(collection)
            try:
                store.verify_stored(chunk.tokens)
            except StoreUnavailable as error:
                self.faults.refusal(error)
            except StoreError:
                missing[store.key(chunk.tokens)] = (chunk, store)
        encoded = self._prefiller.encode_many([chunk.tokens for chunk, _ in missing.values()])
        for (_, store), kv in zip(missing.values(), encoded, strict=True):
            self._put(store, kv)

    def open(self, chunk: Chunk, collection: str, first: bool) -> StoredChunk:
        """Open the KV of a chunk.

        Args:
            chunk: The chunk.
            collection: Its collection.
            first: The chunk stands right after S, so its KV is exact if chunks are encoded there.
        """
        store = self.store(collection)
        exact = first and self._prefiller.mode == "shared"
        encode = partial(self._prefiller.encode, chunk.tokens)
        repair_entry = partial(self._repair_entry, chunk, collection, store)
        return StoredChunk(store, chunk.tokens, exact, encode, repair_entry, self.costs, self.faults.unreadable)

    def open_passes(self, chunk: Chunk, collection: str, first: bool) -> Passes[StoredChunk]:
        """Open the KV of a chunk as `open` does; where it is missing, yield the pass that encodes it.

        Questions that miss the same chunk meanwhile yield the same pass. It must run once, for all of them.
        """
        source = self.open(chunk, collection, first)
        if not source.missing:
            return source
        key = self.store(collection).key(chunk.tokens)
        encoding = self._encodings.get(key)
        if encoding is None:
            encoding = self._encodings[key] = _Encoding(self._prefiller.encoding_pass(chunk.tokens))
        if not encoding.ran:
            yield encoding.layer_pass
        if encoding.kv is None:
            encoding.kv = source.accept(self._prefiller.captured(chunk.tokens, encoding.layer_pass))
        else:
            source.accept(encoding.kv, stored=True)
        return source

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let the passes that are made inside the block be shared with none that are made outside."""
        outside, self._encodings = self._encodings, WeakValueDictionary()
        try:
            yield
        finally:
            self._encodings = outside

    def fetch_ahead(self, collection: str, method: Method, chunks: Sequence[Chunk]) -> None:
        """Begin to bring head records and blocks of the composite pass into memory, in another thread."""
        tokens = [chunk.tokens for chunk in chunks]
        self._tiers.prefetch(partial(prefetch, self.store(collection), tokens, method))

    def evict(self, keys: Iterable[Key], claim: int | None = None) -> None:
        """Delete KV that no chunk refers to and no ingest claims.

        An entry that a failing store keeps is an orphan, no error.

        Args:
            keys: The entries.
            claim: A claim of the caller, which does not protect them.
        """
        left = list(keys)
        for key in left:
            self._tiers.drop(key)
        for start in range(0, len(left), EVICTED_AT_ONCE):
            try:
                with self._catalog.removing(left[start : start + EVICTED_AT_ONCE], mine=claim) as free:
                    for key in free:
                        self._tiers.store.delete(key)
            except StoreError as error:
                self.faults.refusal(error)

    def _repair_entry(self, chunk: Chunk, collection: str, store: ChunkStore, kv: ChunkKV) -> ChunkKV:
        """Store what the store did not deliver.

        Another process may be deleting the document. The catalogue is read after storing, so one of the two removes
        the entry.
        """
        kv = self._put(store, kv)
        current: list[Chunk] = []
        with suppress(NotFound):
            current = self._catalog.chunks_of(collection, chunk.document_id)
        # By their texts: token ids of another model are made anew (retokenise.py).
        if (chunk.title, chunk.text) not in [(other.title, other.text) for other in current]:
            self.evict([store.key(chunk.tokens)])
        return kv

    def _put(self, store: ChunkStore, kv: ChunkKV) -> ChunkKV:
        kv, fault = store.put(kv)
        if fault is None:
            self.faults.stored()
        else:
            self.faults.refusal(fault)
        return kv
