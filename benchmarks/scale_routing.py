"""How questions find a replica of the simulated cluster.

random, round-robin, least-loaded   without regard to what a replica holds
hash      consistent hashing on the collection with bounded load: a replica that has more than its share of the running
          questions passes on to the next of the ring (V. Mirrokni, M. Thorup and M. Zadimoghaddam, "Consistent hashing
          with bounded loads", SODA 2018)
hash-fewest   the same, but a loaded home passes on to the replica with the fewest running questions
passage   as hash, with the first retrieved passage in place of the collection
holders   the replica that holds most of the retrieved passages and is not too loaded, by a directory that knows at once
          what every replica holds: the most that routing by retrieved chunks can win

The last two search before they route.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice
from math import ceil

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale_load import SimulatedQuestion
from benchmarks.scale_tiers import Directory, mixed
from ragkv.errors import InputError

POINTS = 64
"""Places of a replica on the ring."""
HOLDERS = 32
"""Replicas that are considered for a passage."""


class RunningQuestions:
    """Number of running questions of each replica."""

    def __init__(self, replicas: int):
        """Count from 0."""
        self.each: NDArray[np.int64] = np.zeros(replicas, np.int64)
        self.all = 0

    def add(self, replica: int, number: int) -> None:
        """Count questions that came, or, with a negative number, that ended."""
        self.each[replica] += number
        self.all += number


@dataclass(frozen=True)
class SpillParams:
    """When a replica is too loaded for a question that belongs to it.

    Attributes:
        factor: Largest number of running questions, over the mean of all replicas.
        least: Running questions at which none is loaded yet.
    """

    factor: float = 1.25
    least: int = 1

    def limit(self, running: RunningQuestions) -> int:
        """Return the running questions from which on a replica is too loaded."""
        return max(self.least, ceil(self.factor * (running.all + 1) / len(running.each)))


class Router(ABC):
    """Chooses the replica of a question."""

    hops = 1
    """Times that a question goes over the network before a replica has it."""

    @abstractmethod
    def route(self, question: SimulatedQuestion, running: RunningQuestions) -> tuple[int, bool]:
        """Return a replica, and whether it is another than the one that the question belongs to."""


class RandomRouter(Router):
    """Any replica."""

    def __init__(self, replicas: int, seed: int):
        """Set up the random numbers."""
        self._replicas, self._random = replicas, np.random.default_rng([seed, 7])

    def route(self, question: SimulatedQuestion, running: RunningQuestions) -> tuple[int, bool]:
        """See Router."""
        return int(self._random.integers(self._replicas)), False


class RoundRobinRouter(Router):
    """One after another."""

    def __init__(self, replicas: int):
        """Begin with the first."""
        self._replicas, self._next = replicas, 0

    def route(self, question: SimulatedQuestion, running: RunningQuestions) -> tuple[int, bool]:
        """See Router."""
        replica, self._next = self._next, (self._next + 1) % self._replicas
        return replica, False


class LeastLoadedRouter(Router):
    """The one with the fewest running questions; among equals any."""

    def __init__(self, seed: int):
        """Set up the random numbers."""
        self._random = np.random.default_rng([seed, 8])

    def route(self, question: SimulatedQuestion, running: RunningQuestions) -> tuple[int, bool]:
        """See Router."""
        best = np.flatnonzero(running.each == running.each.min())
        return int(best[self._random.integers(len(best))]), False


class HashRouter(Router):
    """Consistent hashing with bounded load, on the collection or on the first passage."""

    def __init__(self, replicas: int, spill: SpillParams, neighbours: int = 0, fewest: bool = False):
        """Place the replicas on the ring.

        Args:
            replicas: Number of replicas.
            spill: When a replica is too loaded.
            neighbours: Chunks of a passage; 0 hashes the collection.
            fewest: A loaded home passes on to the replica with the fewest questions, not to the next of the ring.
        """
        self._spill, self._neighbours, self._fewest = spill, neighbours, fewest
        places = ((replica, point) for replica in range(replicas) for point in range(POINTS))
        ring = sorted((mixed(-1 - replica * POINTS - point), replica) for replica, point in places)
        self._points, self._owners = [point for point, _ in ring], [replica for _, replica in ring]
        self.hops = 2 if neighbours else 1

    def route(self, question: SimulatedQuestion, running: RunningQuestions) -> tuple[int, bool]:
        """See Router."""
        key = question.chunks[0] // self._neighbours if self._neighbours else question.collection
        limit = self._spill.limit(running)
        place = bisect_left(self._points, mixed(key)) % len(self._points)
        home = replica = self._owners[place]
        if self._fewest and running.each[home] >= limit:
            return int(running.each.argmin()), True
        while running.each[replica] >= limit:
            place = (place + 1) % len(self._owners)
            replica = self._owners[place]
        return replica, replica != home


class HoldersRouter(Router):
    """The replica that holds most of the retrieved passages; by the hash of the first one where nobody holds any."""

    hops = 2

    def __init__(self, replicas: int, spill: SpillParams, directory: Directory):
        """Set up. The host tiers keep the directory."""
        self._spill, self._directory = spill, directory
        self._others = HashRouter(replicas, spill, directory.neighbours)

    def route(self, question: SimulatedQuestion, running: RunningQuestions) -> tuple[int, bool]:
        """See Router. Of a passage that many hold, only the first HOLDERS replicas are considered."""
        neighbours, votes = self._directory.neighbours, dict[int, int]()
        for chunk in question.chunks[::neighbours]:
            for replica in islice(self._directory.holders.get(chunk // neighbours, ()), HOLDERS):
                votes[replica] = votes.get(replica, 0) + 1
        limit, each = self._spill.limit(running), running.each
        best = max(votes, key=lambda replica: (votes[replica], -each[replica]), default=None)
        free = max(
            (replica for replica in votes if each[replica] < limit),
            key=lambda replica: (votes[replica], -each[replica]),
            default=None,
        )
        if free is None:
            return self._others.route(question, running)[0], best is not None
        return free, free != best


POLICIES = ("random", "round-robin", "least-loaded", "hash", "hash-fewest", "passage", "holders")


def router_of(policy: str, replicas: int, spill: SpillParams, directory: Directory, seed: int) -> Router:
    """Make the router of a policy.

    Args:
        policy: One of POLICIES.
        replicas: Number of replicas.
        spill: When a replica is too loaded.
        directory: For `holders`; the host tiers keep it.
        seed: Of random choices.

    Raises:
        InputError: There is no such policy.
    """
    if policy not in POLICIES:
        raise InputError(f"there is no policy {policy!r}: choose from {', '.join(POLICIES)}")
    if policy == "random":
        return RandomRouter(replicas, seed)
    if policy == "round-robin":
        return RoundRobinRouter(replicas)
    if policy == "least-loaded":
        return LeastLoadedRouter(seed)
    if policy == "holders":
        return HoldersRouter(replicas, spill, directory)
    return HashRouter(replicas, spill, directory.neighbours if policy == "passage" else 0, policy == "hash-fewest")
