"""Stored chunks as the engine uses them: encode and store, open for a question, repair, evict."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from ragkv.engine.chunk_flights import POLL_SECONDS, ChunkFlights, FlightResult
from ragkv.engine.chunk_source import FoundHead, StoredChunk, find_head, prefetch
from ragkv.engine.chunk_store import ChunkStore, Quarantine
from ragkv.engine.chunk_writer import ChunkWriter
from ragkv.engine.cost_model import FREE, CostModel
from ragkv.engine.missing_chunk import ChunkEncoding, MissingChunk
from ragkv.engine.passes import Passes, Pause, run_alone
from ragkv.engine.prefill import Prefiller
from ragkv.engine.store_faults import StoreFaults
from ragkv.errors import NotFound, StoreError, StoreUnavailable
from ragkv.recompute.base import Method
from ragkv.store.format.layout import Layout
from ragkv.store.format.seal import Seal
from ragkv.store.tiers import Tiers
from ragkv.types import Chunk, ChunkKV, Key

if TYPE_CHECKING:
    from ragkv.catalog import Catalog  # with SQLAlchemy, which a machine that only measures kernels lacks

EVICTED_AT_ONCE = 100
"""Entries deleted in one transaction of the catalogue, while other writers wait."""


WRITERS = 8
"""Chunks that are written at the same time where the model is on a GPU."""

GROUP_TOKENS, GROUP_TOKENS_ON_GPU = 1024, 4096
"""Tokens of chunks that are encoded together. Questions wait for a group. A CPU gains nothing from larger groups."""


def group_tokens(device: torch.device) -> int:
    """Return how many tokens of chunks are encoded together on a device, where no setting says it."""
    return GROUP_TOKENS if device.type == "cpu" else GROUP_TOKENS_ON_GPU


class ChunkEncoder:
    """The KV of all chunks of one engine. Not thread-safe.

    Attributes:
        costs: What loading and encoding cost here. Until they are measured everything is loaded.
        group_tokens: Tokens of chunks that are encoded together where no setting says it.
        quarantine: Damaged entries.
        encoded: Chunks encoded by ingests since the start.
        faults: Faults of the store. A refused write cost an encoding, a refused deletion left an orphan.
        flights: Keeps several processes from encoding a chunk at the same time.
        writer: Writes what ingests encode.
        seal: Vouches for what is read.
    """

    def __init__(
        self,
        prefiller: Prefiller,
        tiers: Tiers,
        catalog: Catalog,
        fingerprint: str,
        body: str,
        seal: Seal,
        flights: ChunkFlights,
    ):
        """Set up the encoder.

        Args:
            prefiller: Encodes chunks.
            tiers: The KV store with what is kept of it in memory.
            catalog: Says which keys are referred to.
            fingerprint: Of everything that makes stored KV valid; it covers body and seal.
            body: Form of stored K and V, one of BODIES.
            seal: Vouches for what is read.
            flights: Of the store.
        """
        self.costs: CostModel = FREE
        self.quarantine = Quarantine()
        self.faults, self.flights = StoreFaults(), flights
        self.encoded = 0
        self.group_tokens = group_tokens(prefiller.model.device)
        self.writer = ChunkWriter(0 if prefiller.model.device.type == "cpu" else WRITERS, self.faults, flights)
        self._prefiller, self._tiers, self._catalog = prefiller, tiers, catalog
        self._fingerprint, self._body, self.seal = fingerprint, body, seal
        self._encodings: WeakValueDictionary[Key, ChunkEncoding] = WeakValueDictionary()

    def store(self, collection: str) -> ChunkStore:
        """Return the entries of a collection."""
        model = self._prefiller.model
        return ChunkStore(self._tiers, model, self._fingerprint, collection, self._body, self.seal, self.quarantine)

    def body_bytes(self, tokens: int) -> int:
        """Return the bytes that the KV of a chunk of so many tokens takes in the store, its head record left out."""
        model = self._prefiller.model
        return Layout(model.shape, tokens, model.profile.block, model.dtype, self._body).body_bytes

    def encode_and_store_all(self, chunks: Iterable[tuple[Chunk, str]]) -> None:
        """Encode chunks in one forward pass and store their KV, except those of which a valid entry is there.

        On a GPU the KV may still be written when this returns; see `writer`.

        While the store is down nothing is encoded: the first question that needs a chunk encodes it. A chunk that
        another process is encoding is encoded here as well: the document is committed next, and must not depend on it.

        Args:
            chunks: Chunks, each with its collection. A chunk that occurs twice is encoded once.
        """
        missing: dict[Key, tuple[Chunk, ChunkStore]] = {}
        for chunk, collection in chunks:
            store = self.store(collection)
            if self.writer.is_writing([store.key(chunk.tokens)]):
                continue
            try:
                store.verify_stored(chunk.tokens)
            except StoreUnavailable as error:
                self.faults.refusal(error)
            except StoreError:
                missing[store.key(chunk.tokens)] = (chunk, store)
        self._encode_group(missing)

    def open(self, chunk: Chunk, collection: str, first: bool) -> StoredChunk:
        """Open the KV of one chunk, without letting others go on while it waits. See `open_all`."""
        (opened,) = run_alone(self._prefiller.model, self.open_all([(chunk, first)], collection))
        return opened

    def open_all(self, chunks: Sequence[tuple[Chunk, bool]], collection: str) -> Passes[list[StoredChunk]]:
        """Open the KV of chunks; those that are missing are encoded and stored.

        Chunks that another process is encoding come last. They are waited for in pauses, and read when they are there.
        Questions that miss the same chunk at the same time yield the same pass. It must run once, for all of them.

        Args:
            chunks: Chunks, each with whether it stands right after S: its KV is exact if chunks are encoded there.
            collection: Their collection.
        """
        store = self.store(collection)
        keys = [store.key(chunk.tokens) for chunk, _ in chunks]
        found = [find_head(store, chunk.tokens, key) for key, (chunk, _) in zip(keys, chunks, strict=True)]
        opened: dict[int, StoredChunk] = {}
        missing: dict[int, MissingChunk] = {}
        for i, (head, (chunk, first)) in enumerate(zip(found, chunks, strict=True)):
            if isinstance(head, StoreError):
                missing[i] = MissingChunk(chunk, first, head)
            else:
                opened[i] = self._stored_chunk(chunk, first, store, collection, (keys[i], head))
        while missing:
            waiting = True
            for i, lost in list(missing.items()):
                source = yield from self._obtain(lost, store, collection)
                if source is not None:
                    opened[i], waiting = source, False
                    del missing[i]
            if missing and waiting:
                yield Pause(time.monotonic() + POLL_SECONDS)
        return [opened[i] for i in range(len(chunks))]

    def _obtain(self, lost: MissingChunk, store: ChunkStore, collection: str) -> Passes[StoredChunk | None]:
        """Return a missing chunk, encoded here or by another process; None while that process is at work."""
        key = store.key(lost.chunk.tokens)
        encoding = self._encodings.get(key)
        if encoding is None:
            found = self._found_elsewhere(lost, store)
            if not isinstance(found, StoreError):
                if found is None:
                    return None
                return self._stored_chunk(lost.chunk, lost.first, store, collection, (key, found))
            encoding = self._encodings[key] = ChunkEncoding(self._prefiller.encoding_pass(lost.chunk.tokens))
        source = self._stored_chunk(lost.chunk, lost.first, store, collection, (key, lost.reason))
        try:
            if not encoding.ran:
                yield encoding.layer_pass
            if encoding.kv is None:
                encoding.kv = source.accept(self._prefiller.captured(lost.chunk.tokens, encoding.layer_pass))
                self._encodings.pop(key, None)  # whoever comes later finds it in the store, or stores it at last
            else:
                source.accept(encoding.kv, stored=True)
        finally:
            self.flights.release(key)
        return source

    def _found_elsewhere(self, lost: MissingChunk, store: ChunkStore) -> FoundHead | None:
        """Look whether another process has encoded a chunk by now.

        Returns:
            Its head record; None while another process is encoding it; an error where it is to be encoded here.
        """
        key, reason = store.key(lost.chunk.tokens), lost.reason
        lease = None if isinstance(reason, StoreUnavailable) else self.flights.take(key)
        result: FlightResult = "led" if lease == "taken" else "alone"
        found: FoundHead = reason
        if lease == "held":
            now = time.monotonic()
            encoding_seconds = self.costs.encode.at(len(lost.chunk.tokens)) / 1000
            lost.until = lost.until or now + self.flights.patience(encoding_seconds)
            if now < lost.until:
                return None
            result = "expired"
        elif lease == "stored":
            found = find_head(store, lost.chunk.tokens)
            result = "alone" if isinstance(found, StoreError) else "joined"
        self.flights.counts[result] += 1
        return found

    def _stored_chunk(
        self,
        chunk: Chunk,
        first: bool,
        store: ChunkStore,
        collection: str,
        found: tuple[Key, FoundHead],
    ) -> StoredChunk:
        """Make the source of a chunk; one that was not found is encoded and stored. found: as in `StoredChunk`."""
        exact = first and self._prefiller.mode == "shared"
        encode = partial(self._prefiller.encode_passes, chunk.tokens)
        repair_entry = partial(self._repair_entry, chunk, collection, store)
        return StoredChunk(store, chunk.tokens, exact, encode, repair_entry, self.costs, found)

    def _encode_group(self, missing: Mapping[Key, tuple[Chunk, ChunkStore]]) -> None:
        """Encode chunks in one forward pass and store them, except those that another process has stored by now."""
        leases = {key: self.flights.take(key) for key in missing}
        for lease in leases.values():
            self.flights.counts["led" if lease == "taken" else "joined" if lease == "stored" else "alone"] += 1
        needed = {key: each for key, each in missing.items() if leases[key] != "stored"}
        self.writer.begin_group()
        unwritten = set(needed)
        try:
            encoded = self._prefiller.encode_on_device([chunk.tokens for chunk, _ in needed.values()])
            for (key, (_, store)), kv in zip(needed.items(), encoded, strict=True):
                self.writer.write(store, key, kv)
                unwritten.remove(key)
                self.encoded += 1
        finally:
            for key in unwritten:
                self.flights.release(key)

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
        self.writer.drop(left)
        for key in left:
            self._tiers.drop(key)
        for start in range(0, len(left), EVICTED_AT_ONCE):
            try:
                with self._catalog.removing(left[start : start + EVICTED_AT_ONCE], mine=claim) as free:
                    for key in free:
                        self._tiers.store.delete(key)
            except StoreError as error:
                self.faults.refusal(error)

    def _repair_entry(
        self, chunk: Chunk, collection: str, store: ChunkStore, kv: ChunkKV, reason: StoreError
    ) -> ChunkKV:
        """Store what the store did not deliver for this reason.

        Another process may be deleting the document. The catalogue is read after storing, so one of the two removes
        the entry.
        """
        self.faults.unreadable(reason)
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
            self.flights.landed(store.key(kv.tokens))
        self.faults.written(fault)
        return kv
