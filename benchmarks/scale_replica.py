"""A replica of the simulated cluster: one engine thread, driven by the scheduler that a real one has.

A turn starts up to TURN waiting questions one after another: search, opening, loads, encoding of what is in no tier.
Then one forward takes the next passes of the questions that `next_group` chooses, and one decode step makes a token for
every answer. The first token of a question reaches its client after the first step of its answer. The thread does one
thing at a time, so everything that a question needs is time that the others wait.

While only answers are decoded, the steps until the next change are one event.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import ceil
from typing import Any

from simpy import Environment, Event

from benchmarks.scale_load import SimulatedQuestion
from benchmarks.scale_speeds import ReplicaSpeeds
from benchmarks.scale_tiers import HostTier, SharedStore, StoreLookup
from ragkv.engine.scheduler import TURN, TenantQueue, next_group

Process = Generator[Event, Any, None]


@dataclass(frozen=True)
class ReplicaLimits:
    """What a replica holds at a time.

    Attributes:
        batch: Questions that are prefilled or decoded.
        queue: Questions that wait; more are refused.
    """

    batch: int = 16
    queue: int = 32


@dataclass(slots=True, eq=False)
class SimulatedAnswer:
    """A question on its way through a replica. Times are seconds of the simulation.

    Attributes:
        question: The question.
        came: When the replica got it.
        passes: Passes until its first token.
        steps: Decode steps that are left.
        host: Chunks that were found in the host tier.
        stored: Chunks that were found in the store.
        encoded: Chunks that were in no tier.
        first: When its first token reached the client; 0 before.
        ended: When it ended; 0 before.
        tenant: The only one.
        rows: Of its next pass, counted in questions.
        alone: No forward fails here.
    """

    question: SimulatedQuestion
    came: float
    passes: int
    steps: int
    host: int = 0
    stored: int = 0
    encoded: int = 0
    first: float = 0.0
    ended: float = 0.0
    tenant: str = ""
    rows: int = 1
    alone: bool = False

    @property
    def pass_id(self) -> int:
        """No other question waits for the same pass."""
        return id(self)


class SimulatedReplica:
    """One engine thread and its host tier.

    Attributes:
        tier: The chunks in host memory.
        busy: Seconds in which the thread worked.
        received: Bytes from the store.
        sent: Bytes to the store.
    """

    def __init__(
        self,
        environment: Environment,
        speeds: ReplicaSpeeds,
        limits: ReplicaLimits,
        tier: HostTier,
        store: SharedStore,
        ended: Callable[[SimulatedAnswer], None],
    ):
        """Start the thread. `ended` receives every answer."""
        self.tier = tier
        self.busy, self.received, self.sent = 0.0, 0, 0
        self._environment, self._speeds, self._limits, self._store = environment, speeds, limits, store
        self._ended = ended
        self._waiting, self._prefilling = TenantQueue[SimulatedAnswer](limits.queue), list[SimulatedAnswer]()
        self._decoding = list[SimulatedAnswer]()
        self._idle: Event | None = None
        environment.process(self._run())

    def ask(self, question: SimulatedQuestion) -> SimulatedAnswer | None:
        """Queue a question; None if the queue is full."""
        if self._waiting.full("") and not self._room:
            return None
        answer = SimulatedAnswer(question, self._environment.now, self._speeds.passes, question.tokens - 1)
        self._waiting.enqueue(answer)
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()
        return answer

    @property
    def _room(self) -> bool:
        return len(self._prefilling) + len(self._decoding) < self._limits.batch

    def _run(self) -> Process:
        while True:
            if not (self._waiting or self._prefilling or self._decoding):
                self._idle = self._environment.event()
                yield self._idle
                self._idle = None
            for _ in range(TURN):
                if (first := self._waiting.take(aside=lambda _: False, ready=lambda _: self._room)) is None:
                    break
                yield from self._start(first)
            if self._prefilling:
                yield from self._forward()
            if self._decoding:
                yield from self._decode()

    def _work(self, seconds: float) -> Event:
        self.busy += seconds
        return self._environment.timeout(seconds)

    def _start(self, answer: SimulatedAnswer) -> Process:
        """Search, open and load; a chunk that is in no tier is encoded."""
        self._prefilling.append(answer)  # it counts against the batch from here on
        yield self._work(self._speeds.start * answer.question.work)
        now, sizes, awaited = self._environment.now, dict[int, int](), 0.0
        missing = list[int]()
        for chunk in answer.question.chunks:
            if self.tier.touch(chunk):
                answer.host += 1
                continue
            found = self._store.find(chunk, now)
            if found is StoreLookup.MISSING:
                missing.append(chunk)
                continue
            awaited = max(awaited, self._store.ready_at(chunk) if found is StoreLookup.COMING else 0.0)
            node = self._store.node_of(chunk)
            sizes[node] = sizes.get(node, 0) + self._speeds.read_bytes
        answer.stored, answer.encoded = len(answer.question.chunks) - answer.host - len(missing), len(missing)
        for number, chunk in enumerate(missing, start=1):
            self._store.put(chunk, now + number * self._speeds.encode)
        self.sent += len(missing) * self._speeds.chunk_bytes
        linked = len(answer.question.chunks) * self._speeds.read_bytes / self._speeds.link
        ends = max(awaited, now + len(missing) * self._speeds.encode)
        if sizes:
            self.received += sum(sizes.values())
            ends = self._store.read(ends, sizes)
        yield self._work(ends - now + linked)

    def _forward(self) -> Process:
        """The next pass of as many questions as one forward takes."""
        group = next_group(self._prefilling, rows=0, most=self._speeds.together)
        own = sum(answer.question.work for answer in group)
        yield self._work(self._speeds.pass_shared + self._speeds.pass_own * own)
        for answer in group:
            answer.passes -= 1
        self._decoding += [answer for answer in group if not answer.passes]
        self._prefilling = [answer for answer in self._prefilling if answer.passes]

    def _decode(self) -> Process:
        """Steps until an answer ends or a question comes. An answer ends without a step after its last token."""
        self._end_those_done()
        if not self._decoding:
            return
        began, step = self._environment.now, self._speeds.step_shared + self._speeds.step_own * len(self._decoding)
        steps = 1 if self._prefilling or (self._waiting and self._room) else min(each.steps for each in self._decoding)
        done = steps
        if steps == 1 or not self._room:
            yield self._environment.timeout(steps * step)
        else:
            self._idle = self._environment.event()
            yield self._environment.timeout(steps * step) | self._idle
            self._idle = None
            done = min(steps, max(1, ceil((self._environment.now - began) / step - 1e-9)))
            if began + done * step > self._environment.now:
                yield self._environment.timeout(began + done * step - self._environment.now)
        self.busy += done * step
        for answer in self._decoding:
            answer.steps -= done
            answer.first = answer.first or began + step
        self._end_those_done()

    def _end_those_done(self) -> None:
        now = self._environment.now
        for answer in [each for each in self._decoding if not each.steps]:
            answer.first, answer.ended = answer.first or now, now
            self._ended(answer)
        self._decoding = [each for each in self._decoding if each.steps]
