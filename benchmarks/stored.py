"""A temporary disk store for a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.chunk_store import ChunkStore
from ragkv.engine.passes import Passes
from ragkv.model.decoder import DecoderModel
from ragkv.store.disk_store import DiskStore
from ragkv.store.format.layout import Layout
from ragkv.store.tiers import TierBudgets, Tiers
from ragkv.types import ChunkKV


class Stored:
    """Chunks in a KV store, loaded as the engine loads them."""

    def __init__(self, chunks: ChunkStore):
        self._chunks = chunks

    def put(self, kv: ChunkKV) -> ChunkKV:
        """Store a chunk and return it as the store has it. Raises StoreError."""
        kept, fault = self._chunks.put(kv)
        if fault is not None:
            raise fault
        return kept

    def open(self, kv: ChunkKV, exact: bool) -> StoredChunk:
        """Return the stored chunk with its head record loaded."""

        def again() -> Passes[ChunkKV]:
            yield from ()
            return kv

        return StoredChunk(self._chunks, kv.tokens, exact, again)


@contextmanager
def disk(model: DecoderModel, body: str = "exact") -> Iterator[Stored]:
    """A store in a temporary folder, deleted afterwards. body: how K and V are stored."""
    with TemporaryDirectory(prefix="ragkv-quality-") as folder:
        store = DiskStore(Path(folder))
        try:
            block = Layout(model.shape, model.profile.block, model.profile.block, model.dtype, body)
            yield Stored(ChunkStore(Tiers(store, block, TierBudgets(), model.device), model, "bench", "quality", body))
        finally:
            store.close()
