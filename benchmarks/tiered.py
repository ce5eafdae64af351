"""Chunks in one tier for a measurement: on the GPU, in host memory, on disk, or in Redis.

    gpu, host   the tier holds every block before timing starts; the tiers below it are never read
    disk        files in a temporary folder and in the page cache; no block stays in memory between questions
    redis       a given server; no block stays in memory between questions, and nothing in the server afterwards

Head records stay in memory in every tier, as they do in service.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.chunk_store import ChunkStore
from ragkv.engine.passes import Passes
from ragkv.errors import EntryMissing, InputError, StoreError
from ragkv.model.decoder import DecoderModel
from ragkv.store import open_store
from ragkv.store.base import Arrived, KVStore, LeaseState, Range, StoreStats, Swept, ignore
from ragkv.store.format.head import Head
from ragkv.store.format.layout import Layout
from ragkv.store.tiers import HEADS_SHARE, TierBudgets, Tiers
from ragkv.types import ChunkKV, Key

TIERS = ("gpu", "host", "redis", "disk")
WARM = ("gpu", "host")
TIMEOUT = 10.0
"""Timeout of Redis in seconds, longer than in service, so that a slow server is measured and not given up."""


class MemoryLeases:
    """Leases of the entries in a dictionary."""

    def __init__(self, held: Container[Key]) -> None:
        """Create the leases of these entries."""
        self._held, self._owners = held, dict[Key, tuple[str, float]]()

    def take(self, key: Key, owner: str, seconds: float) -> LeaseState:
        """See Leases."""
        if key in self._held:
            return "stored"
        if self._owner(key):
            return "held"
        self._owners[key] = owner, time.monotonic() + seconds
        return "taken"

    def renew(self, key: Key, owner: str, seconds: float) -> bool:
        """See Leases."""
        if self._owner(key) != owner:
            return False
        self._owners[key] = owner, time.monotonic() + seconds
        return True

    def release(self, key: Key, owner: str) -> None:
        """See Leases."""
        if self._owner(key) == owner:
            self.end(key)

    def end(self, key: Key) -> None:
        """End the lease of an entry, whoever has it."""
        self._owners.pop(key, None)

    def _owner(self, key: Key) -> str:
        owner, end = self._owners.get(key, ("", 0.0))
        return owner if end > time.monotonic() else ""


class MemoryStore:
    """KVStore over a dictionary: the source of the warm tiers, without a disk. One thread uses it.

    Attributes:
        leases: See KVStore.leases.
    """

    def __init__(self) -> None:
        self._held: dict[Key, tuple[bytes, list[memoryview]]] = {}
        self.leases = MemoryLeases(self._held)

    def put(self, key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        """See KVStore. The body is not copied."""
        self._held[key] = head, [memoryview(layer) for layer in body]
        self.leases.end(key)

    def head(self, key: Key) -> bytes:
        """See KVStore."""
        return self._entry(key)[0]

    def read(self, key: Key, ranges: Sequence[Range], out: memoryview, arrived: Arrived = ignore) -> None:
        """See KVStore."""
        body, at = self._entry(key)[1], 0
        for number, part in enumerate(ranges):
            out[at : at + part.size] = body[part.layer][part.offset : part.offset + part.size]
            at += part.size
            arrived(number)

    def layers(self, key: Key) -> tuple[int, ...]:
        """See KVStore."""
        return tuple(layer.nbytes for layer in self._entry(key)[1])

    def delete(self, key: Key) -> bool:
        """See KVStore."""
        return self._held.pop(key, None) is not None

    def give_way(self, path: Path, size: int, full: bool) -> bool:
        """See KVStore."""
        return False

    def keys(self) -> Iterator[Key]:
        """See KVStore."""
        return iter(list(self._held))

    def stats(self) -> StoreStats:
        """See KVStore."""
        size = sum(len(head) + sum(layer.nbytes for layer in body) for head, body in self._held.values())
        return StoreStats(len(self._held), size)

    def sweep(self, dry_run: bool) -> Swept:
        """There is nothing to sweep."""
        return Swept()

    def ping(self) -> None:
        """The store is always available."""

    def close(self) -> None:
        """There is nothing to close."""

    def _entry(self, key: Key) -> tuple[bytes, list[memoryview]]:
        try:
            return self._held[key]
        except KeyError:
            raise EntryMissing(f"{key} is not in the store") from None


class TieredBenchStore:
    """Chunks of one model in one tier: `put` them all, call `fill_tier` once, then `open` them repeatedly.

    Attributes:
        tiers: The tiers as `fill_tier` made them.
    """

    def __init__(self, model: DecoderModel, store: KVStore, tier: str, body: str = "exact"):
        self._model, self._store, self._tier, self._body = model, store, tier, body
        self._fingerprint = f"bench {secrets.token_hex(8)}"  # unique, so that no server has these entries already
        self._block = Layout(model.shape, model.profile.block, model.profile.block, model.dtype, body)
        self._heads: dict[tuple[int, ...], Head] = {}
        self.tiers, self._chunks = self._over(TierBudgets())

    def put(self, kv: ChunkKV) -> None:
        """Store a chunk. Raises StoreError."""
        _, fault = self._chunks.put(kv)
        if fault is not None:
            raise fault
        self._heads[kv.tokens], _ = self._chunks.head(self._chunks.key(kv.tokens), len(kv.tokens))

    def fill_tier(self) -> None:
        """Load the blocks into the tier, after the last `put`. Raises StoreError, torch.OutOfMemoryError."""
        layers = self._model.shape.layers
        blocks = self._block.full_bytes * layers * sum(head.layout.blocks for head in self._heads.values())
        # In memory digests are float32 where the store has float16, and token ids are Python integers.
        heads = HEADS_SHARE * sum(2 * head.bytes + 64 * len(tokens) for tokens, head in self._heads.items())
        if self._tier == "gpu":
            budgets = TierBudgets(heads, blocks)
        else:
            budgets = TierBudgets(max(heads, blocks * HEADS_SHARE // (HEADS_SHARE - 1) + 2 * self._block.full_bytes))
        self.tiers, self._chunks = self._over(budgets)
        for tokens in self._heads:
            key = self._chunks.key(tokens)
            head, _ = self._chunks.head(key, len(tokens))
            if self._tier not in WARM:
                continue
            all_blocks = [tuple(range(head.layout.blocks))] * layers
            if self._tier == "gpu":
                self.tiers.load(key, head, all_blocks)
            else:
                self.tiers.warm(key, head, all_blocks)

    def cool(self) -> None:
        """Drop all blocks from memory if the tier is a store. Call it before every question."""
        if self._tier not in WARM:
            for tokens in self._heads:
                self.tiers.drop_blocks(self._chunks.key(tokens))

    def open(self, tokens: Sequence[int], exact: bool) -> StoredChunk:
        """Return the stored chunk with its head record loaded."""
        return StoredChunk(self._chunks, tokens, exact, _lost)

    def clear(self) -> None:
        """Delete everything from the store, as far as it answers."""
        for tokens in self._heads:
            with suppress(StoreError):
                self._store.delete(self._chunks.key(tokens))

    def _over(self, budgets: TierBudgets) -> tuple[Tiers, ChunkStore]:
        tiers = Tiers(self._store, self._block, budgets, self._model.device)
        return tiers, ChunkStore(tiers, self._model, self._fingerprint, "bench", self._body)


def _lost() -> Passes[ChunkKV]:
    """Fail instead of encoding a lost chunk again: its time would be measured too."""
    raise InputError("the store lost a chunk that was put there a moment ago; give it more room")


@contextmanager
def tiered_bench_store(
    model: DecoderModel, tier: str, url: str = "", body: str = "exact"
) -> Iterator[TieredBenchStore]:
    """An empty store, deleted afterwards.

    Args:
        model: The model whose KV is stored.
        tier: One of `TIERS`.
        url: Of the Redis server.
        body: One of the layout's `BODIES`.

    Raises:
        InputError: The tier does not exist, or not here.
    """
    if tier not in TIERS:
        raise InputError(f"tier {tier!r} does not exist; choose one of {', '.join(TIERS)}")
    if tier == "gpu" and torch.device(model.device).type != "cuda":
        raise InputError(f"tier gpu: the model is on {model.device}")
    if tier == "redis" and not url:
        raise InputError("tier redis: say which server, redis://host:port/db")
    with TemporaryDirectory(prefix="ragkv-tier-") as folder:
        store: KVStore = MemoryStore()
        if tier not in WARM:
            store = open_store(url if tier == "redis" else "disk", Path(folder), TIMEOUT)
        made = TieredBenchStore(model, store, tier, body)
        try:
            yield made
        finally:
            made.clear()
            store.close()
