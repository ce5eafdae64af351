"""Batch: sequences that are decoded together. One step gives each of them a token or more, in one forward.

    join     a prefilled sequence takes a place in the queue
    step     deadlines → sequences at the front of the queue that fit begin to run → each samples a token, and behind
             it those that were drafted right → one forward with a row, and the rows of a draft, a sequence → events
    cancel   a sequence that nobody waits for any more

A step reads the weights of projections and MLPs once, however many sequences run. Every sequence attends to its
own cache, densely or with its own state, so the others change only the order in which a matrix product adds up.

The queue is first come, first served: only its front may begin, so a small sequence never overtakes a large one that
waits for memory. `limit` bounds how many run; `bytes` bounds what their caches hold. A sequence that is larger by
itself runs alone. A caller that asks `free` before it prefills leaves at most one prefilled sequence waiting.

A sequence that is decoded over the pool of KV blocks joins the pool when it begins to run: once the blocks that a step
of it reads at least fit into the pool beside those of the others. It leaves the pool when it ends or is cancelled.

The batch keeps no reference to a sequence that has ended, or to its cache.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ragkv.engine.decoding import PrefillGroup, decode_step
from ragkv.engine.generation import Sequence
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder

Ending = Literal["stop", "length", "deadline", "failed"]
"""`stop`: a stop token or stop string. `length`: all tokens it may have. `deadline`: its deadline passed. `failed`: a
fault of this sequence, or of a forward that it was part of."""


@dataclass(frozen=True)
class Event:
    """What a step did for a sequence.

    Attributes:
        id: The sequence.
        token: Token id sampled in this step; None when there was none. A step has an event for each token, and a
            further one where the pass of the token fails.
        ended: Why the sequence left the batch; None while it is in it.
        fault: What went wrong, for `failed`.
    """

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
    """Sequences that are decoded together. Not thread-safe.

    Attributes:
        limit: Sequences that run at once.
        bytes: Bytes of K and V of all that run.
        counts: Sequences that joined, and those that ended, by `Ending` or `left`.
    """

    def __init__(
        self, model: DecoderModel, limit: int = 8, bytes: int = 2**31, graph_decoder: GraphDecoder | None = None
    ):
        """Set up an empty batch.

        Args:
            model: The model.
            limit: Sequences that run at once.
            bytes: Bytes of K and V of all that run, room for the answer included.
            graph_decoder: Decodes dense sequences by recorded graphs; None runs them in the model's forward.
        """
        if limit < 1:
            raise ValueError("limit must be at least 1: otherwise nothing ever runs")
        self.limit, self.bytes = limit, bytes
        self.counts: Counter[str] = Counter()
        self._model, self._graph_decoder = model, graph_decoder
        self._waiting: OrderedDict[int, _Member] = OrderedDict()
        self._running: dict[int, _Member] = {}
        self._sampled: dict[int, None] = {}  # in order
        self._next = 0

    @property
    def running(self) -> int:
        """Sequences that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._running or self._waiting)

    @property
    def free(self) -> bool:
        """Whether another sequence would run at once. Its memory is not known before it is prefilled."""
        return not self._waiting and len(self._running) < self.limit

    @property
    def held(self) -> int:
        """Bytes of the caches of all that run."""
        return sum(member.sequence.cache.bytes for member in self._running.values())

    def join(self, sequence: Sequence, expired: Callable[[], bool] | None = None) -> int:
        """Put a sequence at the end of the queue; return its id. Nothing is computed before the next step.

        Args:
            sequence: What to decode.
            expired: Called before every step, also while the sequence waits; True ends it.
        """
        id, self._next = self._next, self._next + 1
        self._waiting[id] = _Member(id, sequence, expired)
        self.counts["joined"] += 1
        return id

    def cancel(self, id: int) -> bool:
        """Drop a sequence; return False if it has ended already. Its next token is never computed."""
        member = self._running.pop(id, None) or self._waiting.pop(id, None)
        self.counts["left"] += member is not None
        if member is not None:
            member.sequence.close()
        return member is not None

    def clear(self) -> list[int]:
        """Drop all sequences; return their ids."""
        ids = [*self._running, *self._waiting]
        for id in ids:
            self.cancel(id)
        return ids

    def step(self) -> list[Event]:
        """Give every running sequence one token, in the order in which they began, and those that were drafted right.

        Never raises for a sequence: what goes wrong with one, its attention included, ends it alone. A forward that
        fails leaves the caches of its sequences in an undefined state, so it ends all of them.
        """
        return [*self.sample(), *self.forward()]

    def sample(self) -> list[Event]:
        """Do the first half of a step: begin what fits, and sample until every sequence has ended or needs a pass."""
        events = [self._end(member, None, "deadline") for member in self._members() if _is_past(member)]
        events += self._admit()
        for member in list(self._running.values()):
            if member.id not in self._sampled:
                events += self._sample(member)
        return events

    def forward(self, group: PrefillGroup | None = None) -> list[Event]:
        """Do the second half of a step: run the passes of the sampled tokens. Returns how those ended that failed.

        Args:
            group: Passes of other requests that may run in the same forward. They do where `decode_step` says so.
        """
        continuing = [self._running[id] for id in self._sampled if id in self._running]
        try:
            if continuing:
                sequences = [member.sequence for member in continuing]
                decode_step(self._model, sequences, self._graph_decoder, group)
        except Exception as fault:
            return [self._end(member, None, "failed", fault) for member in continuing]
        finally:
            # A sequence that the pass lacked, because it was launched before the sequence began, waits for the next.
            self._sampled = {member.id: None for member in continuing if not member.sequence.ready}
        return [event for member in continuing for event in self._faults(member)]

    def _sample(self, member: _Member) -> list[Event]:
        """Sample tokens of a sequence until it ends or needs a pass; return their events."""
        sequence, events = member.sequence, list[Event]()
        while True:
            try:
                token = sequence.sample(self._model.stop_ids)
            except Exception as fault:
                return [*events, self._end(member, None, "failed", fault)]
            if token is None or sequence.finished:
                return [*events, self._end(member, token, "stop" if sequence.stopped else "length")]
            events.append(Event(member.id, token))
            if not sequence.ready:
                self._sampled[member.id] = None
                return events

    def _faults(self, member: _Member) -> list[Event]:
        """Take the fault off the sequence: its traceback refers to the sequence, and a circle would keep both alive."""
        fault, member.sequence.fault = member.sequence.fault, None
        return [] if fault is None else [self._end(member, None, "failed", fault)]

    def _admit(self) -> list[Event]:
        """Let sequences begin to run; return how those ended that cannot join the pool."""
        events = list[Event]()
        while self._waiting and len(self._running) < self.limit:
            first = next(iter(self._waiting.values()))
            pooled = first.sequence.pooled
            if self._running and self.held + first.sequence.cache.bytes > self.bytes:
                break
            if pooled is not None and not pooled.fits:
                break
            self._running[first.id] = self._waiting.pop(first.id)
            try:
                if pooled is not None:
                    pooled.join()
            except Exception as fault:
                events.append(self._end(first, None, "failed", fault))
        return events

    def _end(self, member: _Member, token: int | None, ended: Ending, fault: Exception | None = None) -> Event:
        self._running.pop(member.id, None)
        self._waiting.pop(member.id, None)
        member.sequence.close()
        self.counts[ended] += 1
        return Event(member.id, token, ended, fault)

    def _members(self) -> list[_Member]:
        return [*self._running.values(), *self._waiting.values()]


def _is_past(member: _Member) -> bool:
    return member.expired is not None and member.expired()
