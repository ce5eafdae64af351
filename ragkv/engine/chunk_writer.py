"""Writing encoded chunks: in threads of their own where the model is on a GPU, so that the next chunks are encoded
meanwhile; on a CPU, which the model needs itself, in the thread that encodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from ragkv.engine.chunk_flights import ChunkFlights
from ragkv.engine.chunk_store import ChunkStore
from ragkv.engine.store_faults import StoreFaults
from ragkv.errors import StoreError
from ragkv.store.format.codec import ChunkBytes
from ragkv.types import ChunkKV, Key

MOST_GROUPS = 1
"""Groups of chunks that are being written while the next one is encoded. Each holds its KV in host memory."""


class ChunkWriter:
    """Writes that are under way. It belongs to the thread that owns the engine.

    Attributes:
        threads: Chunks that are written at the same time beside that thread; 0: it writes itself.
    """

    def __init__(self, threads: int, faults: StoreFaults, flights: ChunkFlights):
        """Take how many threads write, and what is told of each write."""
        self.threads = threads
        self._faults, self._flights = faults, flights
        self._pool: ThreadPoolExecutor | None = None
        self._writes: dict[Key, Future[StoreError | None]] = {}
        self._groups: deque[list[Future[StoreError | None]]] = deque()

    def begin_group(self) -> None:
        """Begin a group of chunks. Waits until at most `MOST_GROUPS` others are being written."""
        while len(self._groups) > MOST_GROUPS:
            wait(self._groups.popleft())
        self._groups.append([])

    def write(self, store: ChunkStore, key: Key, kv: ChunkKV) -> None:
        """Write a chunk of the group, and end its lease. What its device has to do for that starts here.

        Args:
            store: Where it is written.
            key: Its key in that store.
            kv: The chunk, on one device.
        """
        self.wait_for([key])
        job = partial(_write, store, key, store.begin_packing(kv), self._flights)
        if not self.threads:
            self._faults.written(job())
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="write")
        self._writes[key] = write = self._pool.submit(job)
        self._groups[-1].append(write)

    def is_writing(self, keys: Iterable[Key]) -> bool:
        """Whether one of these chunks is still being written."""
        return any(key in self._writes and not self._writes[key].done() for key in keys)

    def wait_for(self, keys: Iterable[Key]) -> None:
        """Wait until these chunks are written. Faults of the store are recorded; any other fault is raised."""
        for key in keys:
            write = self._writes.pop(key, None)
            if write is not None:
                self._faults.written(write.result())

    def drop(self, keys: Iterable[Key]) -> None:
        """Wait until nothing writes these chunks any more, whatever comes of it."""
        wait([write for key in keys if (write := self._writes.pop(key, None)) is not None])

    def close(self) -> None:
        """Wait for all writes and end the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _write(store: ChunkStore, key: Key, chunk: ChunkBytes, flights: ChunkFlights) -> StoreError | None:
    """Write a chunk and end its lease. Returns why the store refused it."""
    try:
        fault = store.put_packed(chunk)
        if fault is None:
            flights.landed(key)
        return fault
    finally:
        flights.release(key)
