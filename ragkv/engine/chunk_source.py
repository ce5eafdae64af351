"""Stored chunks: a chunk's KV blocks from the KV store and its tiers. A fault of the store encodes the chunk again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial

import numpy as np
from torch import Tensor

from ragkv.engine.chunk_store import ChunkStore
from ragkv.engine.cost_model import FREE, CostModel
from ragkv.engine.kv_transfer import PendingPin
from ragkv.engine.memory_source import InMemoryChunk, no_blocks
from ragkv.engine.passes import Passes
from ragkv.errors import EntryCorrupt, EntryMissing, StoreError
from ragkv.kernels.transfer import PinnedBlocks
from ragkv.recompute.base import Blocks, Method, Piece, Rows
from ragkv.report import ENCODING_IS_QUICKER
from ragkv.store.format.head import Head
from ragkv.store.tier import ResidentBlocks, TierBytes
from ragkv.types import ChunkKV, Key

logger = logging.getLogger(__name__)


FoundHead = tuple[Head, str] | StoreError
"""The head record of a chunk and the tier that had it, or why the store did not deliver it."""


def find_head(store: ChunkStore, tokens: Sequence[int], key: Key | None = None) -> FoundHead:
    """Read the head record of a chunk. key: of the chunk, where it is known."""
    try:
        return store.head(key or store.key(tokens), len(tokens))
    except StoreError as error:
        return error


class StoredChunk:
    """A chunk in the KV store or its tiers. When the store fails, the chunk is encoded again.

    A chunk whose head record is missing is given its encoding before it is used (`accept`).

    Attributes:
        tokens: The chunk's token ids.
        hit: Whether the head record was valid and the chunk was not encoded again.
        fallback: Why the chunk was encoded again, as in `Fallback.reason`; "" if it was not.
        head_bytes: Bytes of the head record, from memory or the store.
        loaded_layers: Bytes of the blocks loaded from host memory or the store, by layer [L].
        state_bytes: Bytes of states loaded from the store.
    """

    def __init__(
        self,
        store: ChunkStore,
        tokens: Sequence[int],
        exact: bool,
        encode: Callable[[], Passes[ChunkKV]],
        repair_entry: Callable[[ChunkKV, StoreError], ChunkKV] = lambda kv, error: kv,
        costs: CostModel = FREE,
        found: tuple[Key, FoundHead] | None = None,
    ):
        """Open a chunk by its head record.

        Args:
            store: The store.
            tokens: The chunk's token ids.
            exact: As in `Piece`.
            encode: Encodes the chunk again; the pass is yielded.
            repair_entry: Stores a chunk that the store did not deliver for this reason, and returns it as it would be
                loaded.
            costs: Decides whether stored blocks are worth loading. If not, the chunk is encoded.
            found: The key, and what `find_head` returned for it. None reads the head record now.
        """
        self.tokens = tuple(tokens)
        self.hit, self.fallback, self.head_bytes, self.state_bytes = False, "", 0, 0
        self.loaded_layers = np.zeros(store.layers, np.int64)
        self._store, self._exact, self._costs = store, exact, costs
        self._encode, self._repair_entry = encode, repair_entry
        self._key, self._tier_bytes = found[0] if found else store.key(tokens), TierBytes()
        self._source: Head | InMemoryChunk | None = None
        self._piece: Piece | None = None
        self._reason: StoreError | None = None
        entry = found[1] if found else find_head(store, tokens, self._key)
        if isinstance(entry, StoreError):
            self._reason, self.fallback = entry, entry.code
        else:
            head, tier = entry
            self.hit, self.head_bytes, self._source = True, head.bytes, head
            self._tier_bytes["store"] += head.bytes if tier == "store" else 0
            self._piece = Piece(len(self.tokens), store.block, head.digest, exact)

    def accept(self, kv: ChunkKV, stored: bool = False) -> ChunkKV:
        """Take the encoding of a chunk, and store what the store did not deliver; return it as it would be loaded.

        Args:
            kv: The encoding.
            stored: It was stored before, and is as it would be loaded.
        """
        if not stored:
            kv = self._store.as_loaded(kv) if self._reason is None else self._repair_entry(kv, self._reason)
        self._source = InMemoryChunk(kv, self._store.block, self._exact)
        self._piece = self._piece or self._source.piece
        return kv

    @property
    def piece(self) -> Piece:
        """What a method needs to plan with the chunk. Raises StoreError: why there is no head record, nor encoding."""
        if self._piece is None:
            assert self._reason is not None, "a chunk with a head record has a piece"
            raise self._reason
        return self._piece

    @piece.setter
    def piece(self, piece: Piece) -> None:
        self._piece = piece

    @property
    def tier(self) -> str:
        """The slowest tier that delivered anything: store, host or gpu.

        A head record from memory counts only when no block was needed.
        """
        return next((name for name in ("store", "host", "gpu") if self._tier_bytes[name]), "host")

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the blocks loaded from host memory or the store."""
        return int(self.loaded_layers.sum())

    def load(self, requested: Sequence[Blocks]) -> Passes[list[Rows]]:
        """Return per layer the pre-RoPE rows of the wanted blocks, from a new encoding if the store fails."""
        head = self._loadable_head(requested)
        if head is not None:
            try:
                with self._store.quarantining(self._key):
                    loaded = self._store.tiers.load(self._key, head, requested)
            except StoreError as error:
                self._lose(error.code, error)
            else:
                self._count(loaded.tier_bytes)
                return loaded.rows
        if self._source is None:
            self.accept((yield from self._encode()))
        assert isinstance(self._source, InMemoryChunk)
        return (yield from self._source.load(requested))

    def load_states(self) -> Passes[tuple[Tensor, ...]]:
        """Return the states behind the chunk, from a new encoding if the store fails."""
        head = self._source
        if isinstance(head, Head):
            try:
                tensors = self._store.states(self._key, head)
            except StoreError as error:
                self._lose(error.code, error)
            else:
                self.state_bytes += head.layout.state_bytes
                self._tier_bytes["store"] += head.layout.state_bytes
                return tensors
        if self._source is None:
            self.accept((yield from self._encode()))
        assert isinstance(self._source, InMemoryChunk)
        return (yield from self._source.load_states())

    def pin(self, requested: Sequence[Blocks], threads: Executor) -> PendingPin:
        """Start to pin the wanted blocks in memory, in one of the threads if they have to be fetched.

        Nothing is pinned of a chunk that has to be encoded; `load` does that.
        """
        head = self._loadable_head(requested)
        if head is None:
            return no_blocks
        held = self._store.tiers.pin_held(self._key, head, requested)
        if held is not None:  # quicker than starting a thread
            return partial(self._wait_pinned, lambda: held)
        return partial(self._wait_pinned, threads.submit(self._pin_blocks, head, requested).result)

    def pin_resident(self, requested: Sequence[Blocks]) -> ResidentBlocks | None:
        """Pin those of the blocks that are in memory of the model's device; None for a chunk that was encoded again."""
        if not isinstance(self._source, Head):
            return None
        return self._store.tiers.pin_resident(self._key, self._source, requested)

    def _pin_blocks(self, head: Head, requested: Sequence[Blocks]) -> tuple[PinnedBlocks, TierBytes] | None:
        with self._store.quarantining(self._key):
            return self._store.tiers.pin(self._key, head, requested)

    def _wait_pinned(self, wait: Callable[[], tuple[PinnedBlocks, TierBytes] | None]) -> PinnedBlocks | None:
        try:
            pinned = wait()
        except StoreError as error:
            self._lose(error.code, error)
            return None
        if pinned is None:
            return None
        blocks, tier_bytes = pinned
        self._count(tier_bytes)
        return blocks

    def _loadable_head(self, requested: Sequence[Blocks]) -> Head | None:
        """Return the head record to load by; None when the chunk is in memory, or is better encoded."""
        if not isinstance(self._source, Head):
            return None
        # The tiers are looked up only if loading everything from the store would be too slow.
        reason = self._costs.why_not_load(self._source.layout.wanted_bytes(requested), len(self.tokens))
        if reason:
            missing = self._store.tiers.missing_bytes(self._key, self._source, requested)
            reason = self._costs.why_not_load(missing, len(self.tokens))
        if reason:
            logger.debug("chunk %s: %s", self._key, reason)
            self._lose(ENCODING_IS_QUICKER)
            return None
        return self._source

    def _count(self, tier_bytes: TierBytes) -> None:
        self._tier_bytes += tier_bytes
        for tier in {"store", "host"} & tier_bytes.layers.keys():
            self.loaded_layers += tier_bytes.layers[tier]

    def _lose(self, fallback: str, reason: StoreError | None = None) -> None:
        """Do without what is stored: `load` encodes the chunk. reason: why the store failed, if it did."""
        self.hit, self.fallback, self._reason, self._source = False, fallback, reason, None


def prefetch(store: ChunkStore, chunks: Sequence[Sequence[int]], method: Method) -> None:
    """Fetch into memory what a question about some chunks is sure to read.

    These are the head records, and the blocks of the composite pass, which attends in all its layers but the last.
    Missing and damaged entries are skipped; the question itself handles them.

    Args:
        store: The chunks' store.
        chunks: Token ids per chunk.
        method: The method that will answer.

    Raises:
        StoreUnavailable: The store does not answer.
    """
    for tokens in chunks:
        with suppress(EntryMissing, EntryCorrupt):
            key = store.key(tokens)
            head, _ = store.head(key, len(tokens))
            first = method.composite_blocks([Piece(len(tokens), store.block, head.digest)])
            if any(first):
                layers = head.layout.shape.layers
                attended = max(0, method.composite_layers(layers) - 1)
                with store.quarantining(key):
                    store.tiers.warm(key, head, [first[0]] * attended + [()] * (layers - attended))
