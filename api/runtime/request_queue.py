"""Line: who waits for the engine, and who is next.

Tenants take turns, one thing each; of one tenant, first come, first served. What is of a conversation whose turn is
being answered steps aside until it is, and those behind it do not wait for that.

The line has so many places. Where tenants share it, one may have as many waiting as there are places left: alone it
fills half of the line, two fill a third each, and whoever comes new finds room.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from api.runtime.answer_channel import AnswerChannel
from api.runtime.request_context import RequestContext, current
from ragkv.engine.engine import Engine
from ragkv.engine.request import RequestState
from ragkv.report import Answer

T = TypeVar("T")

SessionName = tuple[str, str]
"""Collection and name of a conversation."""


@dataclass(frozen=True)
class QueuedQuestion:
    """What to begin, and who waits for it. turn: of which conversation, None: of none · deadline: on the monotonic
    clock; from then on nobody waits · progress: told how far it is · account: of the request that asks; where it has
    an id the answer is remembered under it."""

    prefill: Callable[[Engine], RequestState]
    future: Future[Answer]
    session: SessionName | None
    tenant: str = ""
    deadline: float = inf
    channel: AnswerChannel | None = None
    context: RequestContext = field(default_factory=current)


@dataclass(frozen=True)
class QueuedTask:
    """Anything else than a question. turn: as of one, whose turns it waits for · account: as of one."""

    work: Callable[[Engine], Any]
    future: Future[Any]
    session: SessionName | None
    tenant: str = ""
    context: RequestContext = field(default_factory=current)


def resolve(future: Future[T], result: T) -> None:
    """Complete a future, unless somebody cancelled or failed it: any thread may, at any time."""
    with suppress(InvalidStateError):
        future.set_result(result)


def reject(future: Future[Any], error: BaseException) -> None:
    """The same with an error."""
    with suppress(InvalidStateError):
        future.set_exception(error)


class RequestQueue:
    """See the module. Not thread-safe."""

    def __init__(self, capacity: int, shared: bool = False):
        """capacity: places · shared: whether one tenant must leave room for others."""
        self.capacity = capacity
        self._shared = shared
        self._queues: OrderedDict[str, deque[QueuedQuestion | QueuedTask]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def full(self, tenant: str) -> bool:
        """Whether there is no place for this tenant."""
        left = self.capacity - len(self)
        own = len(self._queues.get(tenant, ()))
        return left <= 0 or (self._shared and own >= left)

    def ahead(self, tenant: str) -> int:
        """How many are served before one that this tenant would add."""
        own = len(self._queues.get(tenant, ()))
        return own + sum(min(own + 1, len(queue)) for name, queue in self._queues.items() if name != tenant)

    def join(self, what: QueuedQuestion | QueuedTask) -> None:
        """To the end of what its tenant has waiting."""
        self._queues.setdefault(what.tenant, deque()).append(what)

    def take(
        self, aside: Callable[[QueuedQuestion | QueuedTask], bool], ready: Callable[[QueuedQuestion | QueuedTask], bool]
    ) -> QueuedQuestion | QueuedTask | None:
        """The first that does not step aside leaves the line, if it is ready; else nobody does."""
        for tenant, queue in self._queues.items():
            for place, what in enumerate(queue):
                if aside(what):
                    continue
                if not ready(what):
                    return None
                del queue[place]
                self._queues.move_to_end(tenant)
                self._tidy()
                return what
        return None

    def sweep(self, gone: Callable[[QueuedQuestion | QueuedTask], bool]) -> None:
        """Whoever is gone leaves the line."""
        for tenant, queue in list(self._queues.items()):
            self._queues[tenant] = deque(what for what in queue if not gone(what))
        self._tidy()

    def clear(self) -> None:
        """All leave."""
        self._queues.clear()

    def _tidy(self) -> None:
        for tenant in [tenant for tenant, queue in self._queues.items() if not queue]:
            del self._queues[tenant]
