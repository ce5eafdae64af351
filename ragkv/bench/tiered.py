"""Chunks in a tier of their own for a measurement: on the GPU, in host memory, on disk, or in Redis.

gpu, host   the tier holds every block before the clock starts; what is below it is never asked
disk        files in a temporary folder, which the page cache holds; no block stays in memory between questions
redis       a server that is given; no block stays in memory between questions, and nothing in the server afterwards

Head records stay in memory everywhere, as those of chunks that are asked for do.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ragkv.engine.chunk_source import ChunkStore, StoredChunk
from ragkv.errors import EntryMissing, InputError, StoreError
from ragkv.model.decoder import DecoderModel
from ragkv.store import open_store
from ragkv.store.base import Arrived, KVStore, Range, StoreStats, Swept, ignore
from ragkv.store.format.codec import Head
from ragkv.store.format.layout import Layout
from ragkv.store.tiers import HEADS_SHARE, TierBudgets, Tiers
from ragkv.types import ChunkKV, Key

TIERS = ("gpu", "host", "redis", "disk")
WARM = ("gpu", "host")
TIMEOUT = 10.0
"""Seconds that Redis may take: to measure is no reason to give up early."""


class MemoryStore:
    """KVStore over a dictionary: what the warm tiers come from, without a disk in between."""

    def __init__(self) -> None:
        self._held: dict[Key, tuple[bytes, list[memoryview]]] = {}

    def put(self, key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        """See KVStore. The body is kept as it is given, not copied."""
        self._held[key] = head, [memoryview(layer) for layer in body]

    def head(self, key: Key) -> bytes:
        """See KVStore."""
        return self._entry(key)[0]

    def read(self, key: Key, ranges: Sequence[Range], out: memoryview, arrived: Arrived = ignore) -> None:
        """See KVStore."""
        body, at = self._entry(key)[1], 0
        for number, each in enumerate(ranges):
            out[at : at + each.size] = body[each.layer][each.offset : each.offset + each.size]
            at += each.size
            arrived(number)

    def layers(self, key: Key) -> tuple[int, ...]:
        """See KVStore."""
        return tuple(layer.nbytes for layer in self._entry(key)[1])

    def delete(self, key: Key) -> bool:
        """See KVStore."""
        return self._held.pop(key, None) is not None

    def keys(self) -> Iterator[Key]:
        """See KVStore."""
        return iter(list(self._held))

    def stats(self) -> StoreStats:
        """See KVStore."""
        size = sum(len(head) + sum(layer.nbytes for layer in body) for head, body in self._held.values())
        return StoreStats(len(self._held), size)

    def sweep(self, dry_run: bool) -> Swept:
        """Nothing is ever of no use."""
        return Swept()

    def ping(self) -> None:
        """It is there."""

    def close(self) -> None:
        """Nothing to let go of."""

    def _entry(self, key: Key) -> tuple[bytes, list[memoryview]]:
        try:
            return self._held[key]
        except KeyError:
            raise EntryMissing(f"{key} is not in the store") from None


class TieredBenchStore:
    """Chunks of one model in one tier: `put` all of them, `fill_tier` once, then `open` them again and again."""

    def __init__(self, model: DecoderModel, store: KVStore, tier: str):
        self._model, self._store, self._tier = model, store, tier
        self._fingerprint = f"bench {secrets.token_hex(8)}"  # so that no server has what we are about to measure
        self._block = Layout(model.shape, model.profile.block, model.profile.block, model.dtype)
        self._heads: dict[tuple[int, ...], Head] = {}
        self._tiers, self._shelf = self._over(TierBudgets())

    def put(self, kv: ChunkKV) -> None:
        """Store a chunk. Raises StoreError."""
        _, fault = self._shelf.put(kv)
        if fault is not None:
            raise fault
        self._heads[kv.tokens], _ = self._shelf.head(self._shelf.key(kv.tokens), len(kv.tokens))

    def fill_tier(self) -> None:
        """Everything is put: bring it where it is to be read from. Raises StoreError, torch.OutOfMemoryError."""
        layers = self._model.shape.layers
        blocks = self._block.full_bytes * layers * sum(head.layout.blocks for head in self._heads.values())
        # Digests lie in memory as float32 where the store has float16; token ids become Python's numbers.
        heads = HEADS_SHARE * sum(2 * head.bytes + 64 * len(tokens) for tokens, head in self._heads.items())
        if self._tier == "gpu":
            budgets = TierBudgets(heads, blocks)
        else:
            budgets = TierBudgets(max(heads, blocks * HEADS_SHARE // (HEADS_SHARE - 1) + 2 * self._block.full_bytes))
        self._tiers, self._shelf = self._over(budgets)
        for tokens in self._heads:
            key = self._shelf.key(tokens)
            head, _ = self._shelf.head(key, len(tokens))
            if self._tier not in WARM:
                continue
            everything = [range(head.layout.blocks)] * layers
            wanted = [tuple(each) for each in everything]
            if self._tier == "gpu":
                self._shelf.load(key, head, wanted)
            else:
                self._shelf.warm(key, head, wanted)

    def cool(self) -> None:
        """Before every question: where blocks come from a store, memory has none of them."""
        if self._tier not in WARM:
            for tokens in self._heads:
                self._tiers.cool(self._shelf.key(tokens))

    def open(self, tokens: Sequence[int], exact: bool) -> StoredChunk:
        """The stored chunk, its head read."""
        return StoredChunk(self._shelf, tokens, exact, _lost)

    def clear(self) -> None:
        """Take everything out of the store again, as far as it answers."""
        for tokens in self._heads:
            with suppress(StoreError):
                self._store.delete(self._shelf.key(tokens))

    def _over(self, budgets: TierBudgets) -> tuple[Tiers, ChunkStore]:
        tiers = Tiers(self._store, self._block, budgets, self._model.device)
        return tiers, ChunkStore(tiers, self._model, self._fingerprint, "bench")


def _lost() -> ChunkKV:
    """A time in which a chunk was encoded would be the time of something else."""
    raise InputError("the store lost a chunk that was put there a moment ago; give it more room")


@contextmanager
def tiered_bench_store(model: DecoderModel, tier: str, url: str = "") -> Iterator[TieredBenchStore]:
    """An empty one, gone afterwards. url: of the Redis server. Raises InputError for a tier that there is not."""
    if tier not in TIERS:
        raise InputError(f"tier {tier!r} does not exist; choose one of {', '.join(TIERS)}")
    if tier == "gpu" and torch.device(model.device).type != "cuda":
        raise InputError(f"tier gpu: the model is on {model.device}")
    if tier == "redis" and not url:
        raise InputError("tier redis: tell which server, redis://host:port/db")
    with TemporaryDirectory(prefix="ragkv-tier-") as folder:
        store: KVStore = MemoryStore()
        if tier not in WARM:
            store = open_store(url if tier == "redis" else "disk", Path(folder), TIMEOUT)
        made = TieredBenchStore(model, store, tier)
        try:
            yield made
        finally:
            made.clear()
            store.close()
