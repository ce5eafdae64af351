"""A disk store of its own for a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.chunk_store import ChunkStore
from ragkv.model.decoder import DecoderModel
from ragkv.store.disk_store import DiskStore
from ragkv.store.format.layout import Layout
from ragkv.store.tiers import TierBudgets, Tiers
from ragkv.types import ChunkKV


class Stored:
    """Chunks in a KV store, read as the engine reads them."""

    def __init__(self, shelf: ChunkStore):
        self._shelf = shelf

    def put(self, kv: ChunkKV) -> ChunkKV:
        """Store a chunk; returns it as it comes back. Raises StoreError."""
        kept, fault = self._shelf.put(kv)
        if fault is not None:
            raise fault
        return kept

    def open(self, kv: ChunkKV, exact: bool) -> StoredChunk:
        """The stored chunk, its head read."""
        return StoredChunk(self._shelf, kv.tokens, exact, lambda: kv)


@contextmanager
def disk(model: DecoderModel, body: str = "exact") -> Iterator[Stored]:
    """A store in a temporary folder, gone afterwards. body: how K and V are stored."""
    with TemporaryDirectory(prefix="ragkv-quality-") as folder:
        store = DiskStore(Path(folder))
        try:
            block = Layout(model.shape, model.profile.block, model.profile.block, model.dtype, body)
            yield Stored(ChunkStore(Tiers(store, block, TierBudgets(), model.device), model, "bench", "quality", body))
        finally:
            store.close()
