"""`ragkv bench scale`: a discrete-event simulation of a cluster, for sizes that nobody has at hand.

Open loop: questions arrive as a Poisson process, whatever becomes of the ones before. A router gives each to a replica
(scale_routing.py), which finds its chunks in its own host memory, in the shared store, or nowhere (scale_tiers.py), and
answers it beside others (scale_replica.py). Speeds are those that were measured (scale_speeds.py).

Left out: ingest beside questions, conversations, failures, the time between router and client, and the processors
and networks that services share. `scale_calibrate.py` measures how much of it matters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from simpy import Environment

from benchmarks.scale_load import ScaleLoad, SimulatedQuestion
from benchmarks.scale_replica import Process, ReplicaLimits, SimulatedAnswer, SimulatedReplica
from benchmarks.scale_routing import Router, RunningQuestions, SpillParams, router_of
from benchmarks.scale_speeds import ReplicaSpeeds
from benchmarks.scale_tiers import Directory, HostTier, SharedStore


@dataclass(frozen=True)
class ClusterParams:
    """The machines.

    Attributes:
        replicas: Number of replicas.
        speeds: Of one replica and of the store.
        host_bytes: Host memory for KV of one replica (RAGKV_HOST_BYTES).
        nodes: Nodes of the store.
        node_bytes: Memory for KV of one node; 0 holds everything.
        batch: Questions that a replica answers at a time (RAGKV_BATCH).
        queue: Questions that wait for a replica; more are refused (RAGKV_QUEUE).
        spill: When a replica passes questions on to another.
        hop: Seconds from the search to another replica, where the search comes before the routing.
    """

    replicas: int
    speeds: ReplicaSpeeds
    host_bytes: int = 64 * 2**30
    nodes: int = 3
    node_bytes: int = 0
    batch: int = 16
    queue: int = 32
    spill: SpillParams = field(default_factory=SpillParams)
    hop: float = 0.002

    def store(self, chunks: int) -> SharedStore:
        """Make the store after an ingest of so many chunks."""
        places = self.nodes * self.node_bytes // self.speeds.chunk_bytes if self.node_bytes else None
        speeds = self.speeds
        return SharedStore(chunks, places, self.nodes, speeds.node, speeds.read, speeds.latency)

    @property
    def limits(self) -> ReplicaLimits:
        """Return what a replica holds."""
        return ReplicaLimits(self.batch, self.queue)

    def tier(self, replica: int, directory: Directory | None) -> HostTier:
        """Make the host tier of a replica."""
        return HostTier(self.host_bytes // max(1, self.speeds.read_bytes), replica, directory)


@dataclass(frozen=True)
class ScaleResult:
    """What became of a load under one policy.

    Attributes:
        policy: The policy.
        asked: Questions.
        answered: Questions that were answered.
        refused: Questions that found no place in a queue.
        spilled: Questions that another replica answered than the one that they belong to.
        host: Chunks found in host memory.
        stored: Chunks found in the store.
        encoded: Chunks that were in no tier.
        ttft: Seconds to the first token of each answer, in the order in which the answers ended.
        seconds: From the start to the end of the last answer.
        received: Bytes that all replicas received from the store.
        sent: Bytes that they sent to it.
        busy: For each replica the share of the time in which it worked.
    """

    policy: str
    asked: int
    answered: int
    refused: int
    spilled: int
    host: int
    stored: int
    encoded: int
    ttft: tuple[float, ...]
    seconds: float
    received: int
    sent: int
    busy: tuple[float, ...]

    def percentile(self, percent: float) -> float:
        """Return a percentile of the time to first token, in seconds."""
        return float(np.percentile(self.ttft, percent))


class ScaleSimulation:
    """A cluster, and the load that it is asked."""

    def __init__(self, cluster: ClusterParams, chunks: int, policy: str, neighbours: int, seed: int = 1):
        """Set up idle replicas with empty host tiers.

        Args:
            cluster: The machines.
            chunks: Chunks that were ingested.
            policy: How questions find a replica.
            neighbours: Chunks of a passage, for the policies `passage` and `holders`.
            seed: Of random choices of the router.
        """
        self._cluster, self._policy = cluster, policy
        self._environment = Environment()
        self._store = cluster.store(chunks)
        directory = Directory(neighbours)
        self._router: Router = router_of(policy, cluster.replicas, cluster.spill, directory, seed)
        tiers = [cluster.tier(i, directory if policy == "holders" else None) for i in range(cluster.replicas)]
        self._running = RunningQuestions(cluster.replicas)
        self._where = dict[int, int]()
        self._ended = list[SimulatedAnswer]()
        self._replicas = [
            SimulatedReplica(self._environment, cluster.speeds, cluster.limits, tier, self._store, self._end)
            for tier in tiers
        ]
        self._refused = self._spilled = 0

    def fill(self, questions: Iterable[SimulatedQuestion], seconds: float) -> None:
        """Fill the host tiers with what questions read, without simulating them.

        Args:
            questions: The questions.
            seconds: How long each counts as running, so that loaded replicas spill over as they will.
        """
        running = deque[tuple[float, int]]()
        for question in questions:
            while running and running[0][0] <= question.at:
                self._running.add(running.popleft()[1], -1)
            replica, _ = self._router.route(question, self._running)
            self._running.add(replica, 1)
            running.append((question.at + seconds, replica))
            for chunk in question.chunks:
                self._replicas[replica].tier.touch(chunk)
        for _, replica in running:
            self._running.add(replica, -1)

    def run(self, questions: Iterable[SimulatedQuestion]) -> ScaleResult:
        """Ask questions, in the order in which they arrive, and wait until all are answered."""
        asked = [0]

        def arrive() -> Process:
            for question in questions:
                yield self._environment.timeout(question.at + self._delay - self._environment.now)
                self._ask(question)
                asked[0] += 1

        self._environment.process(arrive())
        self._environment.run()
        seconds = max((each.ended for each in self._ended), default=0.0)
        return ScaleResult(
            policy=self._policy,
            asked=asked[0],
            answered=len(self._ended),
            refused=self._refused,
            spilled=self._spilled,
            host=sum(each.host for each in self._ended),
            stored=sum(each.stored for each in self._ended),
            encoded=sum(each.encoded for each in self._ended),
            ttft=tuple(each.first - each.question.at for each in self._ended),
            seconds=seconds,
            received=sum(each.received for each in self._replicas),
            sent=sum(each.sent for each in self._replicas),
            busy=tuple(each.busy / seconds if seconds else 0.0 for each in self._replicas),
        )

    @property
    def _delay(self) -> float:
        return (self._router.hops - 1) * self._cluster.hop

    def _ask(self, question: SimulatedQuestion) -> None:
        replica, spilled = self._router.route(question, self._running)
        answer = self._replicas[replica].ask(question)
        if answer is None:
            self._refused += 1
            return
        self._running.add(replica, 1)
        self._spilled += spilled
        self._where[id(answer)] = replica

    def _end(self, answer: SimulatedAnswer) -> None:
        self._running.add(self._where.pop(id(answer)), -1)
        self._ended.append(answer)


def simulate(cluster: ClusterParams, load: ScaleLoad, policy: str) -> ScaleResult:
    """Simulate a load under one policy. The same arguments give the same result.

    Args:
        cluster: The machines.
        load: What is asked.
        policy: How questions find a replica (scale_routing.py).
    """
    simulation = ScaleSimulation(cluster, load.chunks, policy, load.neighbours, load.seed)
    speeds = cluster.speeds
    alone = speeds.alone(load.top_k) + (load.answer_tokens - 1) * (speeds.step_shared + speeds.step_own)
    simulation.fill(load.drawn(load.warmup, "warmup"), alone)
    return simulation.run(load.drawn(load.questions, "questions"))


def simulate_all(
    cluster: ClusterParams, load: ScaleLoad, policies: Sequence[str], progress: Callable[[str, int, int], None]
) -> list[ScaleResult]:
    """Simulate the same load under each policy. progress: called with a policy, the policies that are done, and all."""
    found = []
    for done, policy in enumerate(policies):
        progress(policy, done, len(policies))
        found.append(simulate(cluster, load, policy))
    return found
