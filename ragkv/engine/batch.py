"""Batch: requests that are decoded together. One step serves all that run: one token each, one forward.

    join    a request that was prefilled takes its place in the line
    step    deadlines → those at the front of the line that fit begin to run → each chooses a token
            → one forward of one row each for all that go on → what happened
    leave   a request that nobody waits for any more

Projections and MLPs read their weights once a step, whoever runs; every request attends to its own cache, densely or
with its own state, so company changes nothing but the order in which a matrix product adds up.

First come, first served: only the front of the line may begin, so a small request never passes a large one that waits
for memory. `limit` bounds how many run, `bytes` what the caches of those that run hold; one that is larger by itself
runs alone. Whoever prefills looks at `free` first: then at most one request that is prefilled waits.

Whatever ends a request lets go of it: the batch keeps no reference to it or its cache.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ragkv.engine.generation import Sequence, decode_step
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder

Ending = Literal["stop", "length", "deadline", "failed"]
"""A stop token or `Run`'s own `over` · all tokens it may have · its deadline passed · a fault, of this request or of a
forward it was part of."""


@dataclass(frozen=True)
class Event:
    """What a step did for a request. token: chosen in this step, None where there was none · ended: why it is not in
    the batch any more, None while it is · fault: for `failed`."""

    id: int
    token: int | None
    ended: Ending | None = None
    fault: Exception | None = None


@dataclass(frozen=True)
class _Member:
    id: int
    sequence: Sequence
    expired: Callable[[], bool] | None


class Batch:
    """See the module. Not thread-safe.

    counts: requests that joined, and those that ended, by how: `Ending`, or `left`.
    """

    def __init__(
        self, model: DecoderModel, limit: int = 8, bytes: int = 2**31, graph_decoder: GraphDecoder | None = None
    ):
        """limit: requests that run at once · bytes: of K and V, room for rows to come included, of all that run ·
        steps: reads the tokens of those whose decoding is dense, None: the model's forward does."""
        if limit < 1:
            raise ValueError("limit must be at least 1: otherwise nothing ever runs")
        self.limit, self.bytes = limit, bytes
        self.counts: Counter[str] = Counter()
        self._model, self._graph_decoder = model, graph_decoder
        self._waiting: OrderedDict[int, _Member] = OrderedDict()
        self._running: dict[int, _Member] = {}
        self._next = 0

    @property
    def running(self) -> int:
        """Requests that have begun."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._running or self._waiting)

    @property
    def free(self) -> bool:
        """Whether another request would have a place. Its memory is not known before it is prefilled."""
        return not self._waiting and len(self._running) < self.limit

    @property
    def held(self) -> int:
        """Bytes of the caches of those that run."""
        return sum(member.sequence.cache.bytes for member in self._running.values())

    def join(self, sequence: Sequence, expired: Callable[[], bool] | None = None) -> int:
        """Take a place at the end of the line; returns the request's id. Nothing is computed before the next step.

        expired: asked before every step, also of those who wait; True ends the request.
        """
        id, self._next = self._next, self._next + 1
        self._waiting[id] = _Member(id, sequence, expired)
        self.counts["joined"] += 1
        return id

    def cancel(self, id: int) -> bool:
        """Let go of a request, now; False where it has ended already. Its next token is never computed."""
        member = self._running.pop(id, None) or self._waiting.pop(id, None)
        self.counts["left"] += member is not None
        return member is not None

    def clear(self) -> list[int]:
        """Let go of all requests; returns their ids."""
        ids = [*self._running, *self._waiting]
        for id in ids:
            self.cancel(id)
        return ids

    def step(self) -> list[Event]:
        """One token for every request that runs, in the order in which they began; see the module.

        Never raises for a request: what goes wrong with one, its attention included, ends it alone. A forward that
        fails has left every cache it was to write half a row further, so it ends all that were in it.
        """
        events = [self._end(member, None, "deadline") for member in self._members() if _is_past(member)]
        self._admit()
        going: list[tuple[_Member, int]] = []
        for member in list(self._running.values()):
            said = self._sample(member)
            if isinstance(said, Event):
                events.append(said)
            else:
                going.append((member, said))
        return events + self._forward(going)

    def _sample(self, member: _Member) -> int | Event:
        """The token it says and goes on from, or how it ended."""
        try:
            token = member.sequence.sample(self._model.stop_ids)
        except Exception as fault:
            return self._end(member, None, "failed", fault)
        if token is None or member.sequence.finished:
            return self._end(member, token, "stop" if member.sequence.stopped else "length")
        return token

    def _forward(self, going: list[tuple[_Member, int]]) -> list[Event]:
        """The forward of a step."""
        try:
            if going:
                decode_step(self._model, [member.sequence for member, _ in going], self._graph_decoder)
        except Exception as fault:
            return [self._end(member, token, "failed", fault) for member, token in going]
        return [self._collect(member, token) for member, token in going]

    def _collect(self, member: _Member, token: int) -> Event:
        """A fault leaves the request: it refers to it by its traceback, and must not be referred to in turn."""
        fault, member.sequence.fault = member.sequence.fault, None
        return Event(member.id, token) if fault is None else self._end(member, token, "failed", fault)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.limit:
            first = next(iter(self._waiting.values()))
            if self._running and self.held + first.sequence.cache.bytes > self.bytes:
                return
            self._running[first.id] = self._waiting.pop(first.id)

    def _end(self, member: _Member, token: int | None, ended: Ending, fault: Exception | None = None) -> Event:
        self._running.pop(member.id, None)
        self._waiting.pop(member.id, None)
        self.counts[ended] += 1
        return Event(member.id, token, ended, fault)

    def _members(self) -> list[_Member]:
        return [*self._running.values(), *self._waiting.values()]


def _is_past(member: _Member) -> bool:
    return member.expired is not None and member.expired()
