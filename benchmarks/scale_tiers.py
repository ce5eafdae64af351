"""The tiers of the simulated cluster: the host memory of each replica, and the store that all share.

Only chunks that were asked for are objects. What was stored at ingest and not asked for since is a share of all
chunks: it is older than every chunk that was, so it is evicted first, in the order of a hash.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto

_MIX = 0x9E3779B97F4A7C15
_WORD = 2**64


def mixed(number: int) -> int:
    """Return 64 bits that look random and depend on the number alone (splitmix64)."""
    x = (number + 1) * _MIX % _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % _WORD
    return x ^ x >> 31


class Directory:
    """Which replicas hold which passages in host memory. A passage counts as held while its first chunk is."""

    def __init__(self, neighbours: int):
        """Know of nothing yet. neighbours: chunks of a passage."""
        self.neighbours = neighbours
        self.holders: dict[int, dict[int, None]] = {}

    def add(self, chunk: int, replica: int) -> None:
        """A replica holds a chunk from now on."""
        if chunk % self.neighbours == 0:
            self.holders.setdefault(chunk // self.neighbours, {})[replica] = None

    def remove(self, chunk: int, replica: int) -> None:
        """A replica has evicted a chunk."""
        if chunk % self.neighbours == 0:
            passage = chunk // self.neighbours
            del self.holders[passage][replica]
            if not self.holders[passage]:
                del self.holders[passage]


class HostTier:
    """The least recently used chunks leave first."""

    def __init__(self, capacity: int, replica: int = 0, directory: Directory | None = None):
        """Make an empty tier.

        Args:
            capacity: Chunks that it holds.
            replica: Number of its replica.
            directory: Where it tells what it holds.
        """
        self.capacity = capacity
        self._replica, self._directory = replica, directory
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def touch(self, chunk: int) -> bool:
        """Return whether a chunk is here, and keep it as the one that was used last."""
        chunks = self._chunks
        if chunk in chunks:
            chunks.move_to_end(chunk)
            return True
        if self.capacity:
            chunks[chunk] = None
            evicted = chunks.popitem(last=False)[0] if len(chunks) > self.capacity else None
            if self._directory is not None:
                self._directory.add(chunk, self._replica)
                if evicted is not None:
                    self._directory.remove(evicted, self._replica)
        return False


class StoreLookup(Enum):
    """What the store says of a chunk."""

    STORED = auto()
    COMING = auto()
    MISSING = auto()


@dataclass
class SharedStore:
    """A store of several nodes that all replicas read. A chunk lies on one node.

    Attributes:
        chunks: Chunks that were ingested.
        capacity: Chunks that fit; None for as many as there are.
        nodes: Number of nodes.
        node_speed: Bytes a second that a node sends.
        read_speed: Bytes a second that a replica receives.
        latency: Seconds until the first byte.
    """

    chunks: int
    capacity: int | None
    nodes: int
    node_speed: float
    read_speed: float
    latency: float

    def __post_init__(self) -> None:
        """Start with the chunks of the ingest, as many as fit.

        `_untouched` counts those hashes, and `_moved` the ones among them that were asked for since.
        """
        self._used: OrderedDict[int, None] = OrderedDict()
        self._landing: dict[int, float] = {}
        self._free_at = [0.0] * self.nodes
        self._untouched = self.chunks if self.capacity is None else min(self.chunks, self.capacity)
        self._moved = 0.0

    def find(self, chunk: int, now: float) -> StoreLookup:
        """Look a chunk up, and keep it as the one that was used last."""
        if self.capacity is None:
            return StoreLookup.STORED
        if chunk in self._landing:
            if self._landing[chunk] > now:
                return StoreLookup.COMING
            del self._landing[chunk]
        if chunk in self._used:
            self._used.move_to_end(chunk)
            return StoreLookup.STORED
        if mixed(chunk) >= _WORD // self.chunks * self._untouched:
            return StoreLookup.MISSING
        self._used[chunk] = None
        self._moved += 1
        return StoreLookup.STORED

    def ready_at(self, chunk: int) -> float:
        """Return when a chunk that is coming will be here."""
        return self._landing[chunk]

    def put(self, chunk: int, ready: float) -> None:
        """Take a chunk that will be encoded at a time. Others wait for it meanwhile, and do not encode it."""
        self._landing[chunk] = ready
        self._used[chunk] = None
        while self.capacity is not None and len(self._used) + self._untouched - self._moved > self.capacity:
            self._evict()

    def read(self, now: float, sizes: dict[int, int]) -> float:
        """Return when a load ends. A node sends one load after another, and the replica receives all of them.

        Args:
            now: When it begins.
            sizes: Bytes by node.
        """
        last = now + sum(sizes.values()) / self.read_speed
        for node, size in sizes.items():
            self._free_at[node] = max(now, self._free_at[node]) + size / self.node_speed
            last = max(last, self._free_at[node])
        return last + self.latency

    def node_of(self, chunk: int) -> int:
        """Return the node that a chunk lies on."""
        return chunk * _MIX % _WORD * self.nodes // _WORD

    def _evict(self) -> None:
        """Evict the oldest chunk. In the share that was not asked for, every hash is equally likely to have moved."""
        if self._untouched:
            self._moved *= (self._untouched - 1) / self._untouched
            self._untouched -= 1
        else:
            self._used.popitem(last=False)
