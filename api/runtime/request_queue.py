"""The queue of requests that wait for the engine, and the order in which they are served.

Tenants take turns, one request each. The requests of one tenant are served in the order in which they came. A request
of a conversation that is being answered is passed over until that answer is there; the requests behind it do not wait
for it.

The queue has a fixed capacity. Where tenants share it, each may have as many requests waiting as there are free places:
alone a tenant fills half of the queue, two tenants fill a third each, and a new tenant always finds room.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from math import inf
from typing import Any, TypeVar

from api.runtime.answer_channel import AnswerChannel
from api.runtime.request_context import RequestContext, current
from api.runtime.undelivered import AnswerOrigin
from ragkv.engine.engine import Engine
from ragkv.report import Answer
from ragkv.types import AskOptions

T = TypeVar("T")

_MEMORY = 0.2
"""Weight of the latest request in the running mean of the time that one takes."""

SessionName = tuple[str, str]
"""Collection and name of a conversation."""


@dataclass(frozen=True)
class QueuedQuestion:
    """A question that waits to be answered.

    Attributes:
        question: The question.
        options: How it is asked.
        future: Receives the answer.
        tenant: The tenant whose request it is.
        deadline: On the monotonic clock. The question expires then.
        channel: Receives the progress of the answer.
        context: Of the request that asks. Where it has an id, the answer is recorded under it.
        origin: Receives what the answer is read from.
    """

    question: str
    options: AskOptions
    future: Future[Answer]
    tenant: str = ""
    deadline: float = inf
    channel: AnswerChannel | None = None
    context: RequestContext = field(default_factory=current)
    origin: AnswerOrigin = field(default_factory=AnswerOrigin)

    @property
    def session(self) -> SessionName | None:
        """The conversation that the question belongs to."""
        name = self.options.conversation
        return None if name is None else (self.options.collection, name)


@dataclass(frozen=True)
class QueuedTask:
    """Work for the engine that is no question.

    Attributes:
        work: Called with the engine.
        future: Receives what `work` returns.
        session: The conversation whose running answer the task waits for.
        tenant: The tenant whose request it is.
        context: Of the request.
    """

    work: Callable[[Engine], Any]
    future: Future[Any]
    session: SessionName | None = None
    tenant: str = ""
    context: RequestContext = field(default_factory=current)


def resolve(future: Future[T], result: T) -> None:
    """Complete a future, unless it is done already: any thread may cancel or fail it at any time."""
    with suppress(InvalidStateError):
        future.set_result(result)


def reject(future: Future[Any], error: BaseException) -> None:
    """Fail a future, unless it is done already."""
    with suppress(InvalidStateError):
        future.set_exception(error)


class RequestQueue:
    """The waiting requests of all tenants. Not thread-safe."""

    def __init__(self, capacity: int, shared: bool = False):
        """Make an empty queue. shared: whether a tenant must leave room for others."""
        self.capacity = capacity
        self._shared = shared
        self._queues: OrderedDict[str, deque[QueuedQuestion | QueuedTask]] = OrderedDict()
        self._seconds = 1.0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def full(self, tenant: str) -> bool:
        """Whether there is no room for a request of this tenant."""
        left = self.capacity - len(self)
        own = len(self._queues.get(tenant, ()))
        return left <= 0 or (self._shared and own >= left)

    def ahead(self, tenant: str) -> int:
        """Count the requests that would be served before one that this tenant adds now."""
        own = len(self._queues.get(tenant, ()))
        return own + sum(min(own + 1, len(queue)) for name, queue in self._queues.items() if name != tenant)

    def record_seconds(self, seconds: float) -> None:
        """Add the engine's time for one request to the running mean."""
        self._seconds += _MEMORY * (seconds - self._seconds)

    def retry_after(self, tenant: str) -> int:
        """Estimate the seconds, 1 to 60, after which a refused request of this tenant finds the queue served."""
        return max(1, min(60, math.ceil(self.ahead(tenant) * self._seconds)))

    def enqueue(self, request: QueuedQuestion | QueuedTask) -> None:
        """Add a request behind those of its tenant."""
        self._queues.setdefault(request.tenant, deque()).append(request)

    def take(
        self, aside: Callable[[QueuedQuestion | QueuedTask], bool], ready: Callable[[QueuedQuestion | QueuedTask], bool]
    ) -> QueuedQuestion | QueuedTask | None:
        """Remove and return the first request, passing over those that are `aside`; None if it is not `ready`."""
        for tenant, queue in self._queues.items():
            for place, request in enumerate(queue):
                if aside(request):
                    continue
                if not ready(request):
                    return None
                del queue[place]
                self._queues.move_to_end(tenant)
                self._drop_empty()
                return request
        return None

    def questions(self, count: int) -> list[str]:
        """Return the questions among the first requests of each tenant, `count` at most."""
        rounds = zip_longest(*(islice(queue, count) for queue in self._queues.values()))
        waiting = chain.from_iterable(rounds)
        return [each.question for each in islice(waiting, count) if isinstance(each, QueuedQuestion)]

    def sweep(self, abandoned: Callable[[QueuedQuestion | QueuedTask], bool]) -> None:
        """Remove the abandoned requests."""
        for tenant, queue in list(self._queues.items()):
            self._queues[tenant] = deque(request for request in queue if not abandoned(request))
        self._drop_empty()

    def _drop_empty(self) -> None:
        for tenant in [tenant for tenant, queue in self._queues.items() if not queue]:
            del self._queues[tenant]
