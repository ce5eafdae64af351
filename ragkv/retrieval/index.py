"""VectorIndex: a FAISS index over the vectors of one collection.

It is derived from the catalogue, so its file may be deleted at any time. The file has this format; checksum, generation
and collection are verified before FAISS parses any of it:

    header     magic, version, dimension, generation, entries, number of dead rows, size of the index
    checksum   xxh3-128 of header, collection name, dead rows and index
    dead rows  int64, ascending: entries of the index that are no longer in the collection
    index      faiss.serialize_index
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import xxhash
from numpy.typing import NDArray

from ragkv.catalog import Changes

MAGIC, VERSION = b"RAGKVIDX", 1
HEADER = struct.Struct("<8sIIQQQQ")
CHECKSUM_SIZE = 16
NEIGHBOURS, EF_CONSTRUCTION, EF_SEARCH = 32, 100, 128
"""HNSW parameters. Measured with 100,000 vectors: recall@24 of at least 0.99, and 0.9 ms a search."""
DEAD_SHARE = 0.2
"""HNSW does not support removal. Searches skip deleted rows, and above this share of them the graph is rebuilt."""


class VectorIndex:
    """Nearest-neighbour search by inner product. Not thread-safe.

    The search is exact up to `flat_limit` rows and uses an HNSW graph above.
    """

    def __init__(self, dimension: int, flat_limit: int):
        self.dimension = dimension
        self.flat_limit = flat_limit
        self.generation = 0
        self._dead: NDArray[np.int64] = np.empty(0, np.int64)
        self._index = _make(dimension, graph=False)

    def __len__(self) -> int:
        """Return the number of live rows."""
        return int(self._index.ntotal) - len(self._dead)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Live rows, ascending."""
        return np.setdiff1d(faiss.vector_to_array(self._index.id_map), self._dead)

    @property
    def graph(self) -> bool:
        """Whether the index is an HNSW graph."""
        return isinstance(faiss.downcast_index(self._index.index), faiss.IndexHNSW)

    def apply(self, changes: Changes) -> None:
        """Apply changes; the index then has the state of `changes.generation`."""
        dead = np.union1d(self._dead, changes.removed)
        entries = self._index.ntotal + len(changes.added)
        too_large = not self.graph and entries - len(dead) > self.flat_limit
        if too_large or (self.graph and len(dead) > DEAD_SHARE * entries):
            self._rebuild(dead, changes)
        else:
            self._update(changes)
        self.generation = changes.generation

    def search(self, vector: NDArray[np.float32], count: int) -> list[int]:
        """Return the `count` nearest rows to `vector` [dimension], nearest first."""
        count = min(count, len(self))
        if count <= 0:
            return []
        parameters = None
        if self.graph:
            alive = faiss.IDSelectorNot(faiss.IDSelectorBatch(self._dead)) if len(self._dead) else None
            parameters = faiss.SearchParametersHNSW(  # type: ignore[attr-defined]  # missing in its stubs
                efSearch=max(EF_SEARCH, count), sel=alive
            )
        with _one_thread():
            _, rows = self._index.search(vector.reshape(1, -1), count, params=parameters)
        return [int(row) for row in rows[0] if row >= 0]

    def search_among(self, rows: NDArray[np.int64], vector: NDArray[np.float32], count: int) -> list[int]:
        """Return the `count` nearest of these rows to `vector` [dimension], nearest first.

        Rows that are not in the index are ignored. The search is always exact: a graph search would visit mostly rows
        that are excluded.
        """
        entries = faiss.vector_to_array(self._index.id_map)
        positions = np.flatnonzero(np.isin(entries, rows) & ~np.isin(entries, self._dead))
        if not len(positions) or count <= 0:
            return []
        parameters = faiss.SearchParameters(sel=faiss.IDSelectorBatch(positions))  # type: ignore[call-arg]  # as above
        with _one_thread():
            _, found = self._flat().search(vector.reshape(1, -1), min(count, len(positions)), params=parameters)
        return [int(entries[position]) for position in found[0] if position >= 0]

    def save(self, path: Path, collection: str) -> None:
        """Write the index to `path` atomically. Raises OSError."""
        payload = faiss.serialize_index(self._index).tobytes()
        dead = self._dead.astype("<i8").tobytes()
        sizes = (self.generation, self._index.ntotal, len(self._dead), len(payload))
        header = HEADER.pack(MAGIC, VERSION, self.dimension, *sizes)
        temporary = path.with_name(path.name + ".new")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                for part in (header, _checksum(header, collection, dead, payload), dead, payload):
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            # The disk may be full: a partial file must not take up space.
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    @classmethod
    def load(cls, path: Path, collection: str, generation: int, dimension: int, flat_limit: int) -> VectorIndex | None:
        """Return the saved index, or None if it is missing, damaged, or of another collection or generation."""
        try:
            data = memoryview(path.read_bytes())
            magic, version, found_dimension, found_generation, entries, dead_count, size = HEADER.unpack_from(data)
        except (OSError, struct.error):
            return None
        header, rest = data[: HEADER.size], data[HEADER.size :]
        dead, payload = rest[CHECKSUM_SIZE : CHECKSUM_SIZE + 8 * dead_count], rest[CHECKSUM_SIZE + 8 * dead_count :]
        expected = (MAGIC, VERSION, dimension, generation, size)
        if (magic, version, found_dimension, found_generation, len(payload)) != expected:
            return None
        if rest[:CHECKSUM_SIZE] != _checksum(header, collection, dead, payload):
            return None
        try:
            index = faiss.deserialize_index(np.frombuffer(payload, np.uint8))
        except RuntimeError:
            return None
        if not isinstance(index, faiss.IndexIDMap2) or (index.ntotal, index.d) != (entries, dimension):
            return None
        loaded = cls(dimension, flat_limit)
        loaded._index, loaded._dead, loaded.generation = index, np.frombuffer(dead, "<i8").astype(np.int64), generation
        return loaded

    def _update(self, changes: Changes) -> None:
        if self.graph:
            self._dead = np.union1d(self._dead, changes.removed)
        elif len(changes.removed):
            self._index.remove_ids(changes.removed)
        if len(changes.added):
            self._index.add_with_ids(changes.vectors, changes.added)

    def _rebuild(self, dead: NDArray[np.int64], changes: Changes) -> None:
        entries = faiss.vector_to_array(self._index.id_map)
        alive = ~np.isin(entries, dead)
        vectors = np.concatenate([self._vectors()[alive], changes.vectors])
        rows = np.concatenate([entries[alive], changes.added])
        self._index = _make(self.dimension, graph=len(rows) > self.flat_limit)
        self._dead = np.empty(0, np.int64)
        if len(rows):
            self._index.add_with_ids(vectors, rows)

    def _flat(self) -> Any:
        """The flat index that stores the vectors, addressed by position."""
        inner: Any = faiss.downcast_index(self._index.index)
        return faiss.downcast_index(inner.storage) if self.graph else inner

    def _vectors(self) -> NDArray[np.float32]:
        vectors: NDArray[np.float32] = (
            self._flat().reconstruct_n(0, self._index.ntotal)
            if self._index.ntotal
            else np.empty((0, self.dimension), np.float32)
        )
        return vectors


def _make(dimension: int, graph: bool) -> Any:
    if not graph:
        return faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
    inner = faiss.IndexHNSWFlat(dimension, NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    inner.hnsw.efConstruction = EF_CONSTRUCTION
    return faiss.IndexIDMap2(inner)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run FAISS on one thread. On busy cores its thread pool costs 20 to 70 times as much as a single query."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def _checksum(header: bytes | memoryview, collection: str, *parts: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_128(header)
    state.update(collection.encode())
    for part in parts:
        state.update(part)
    return state.digest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
