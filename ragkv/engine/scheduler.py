"""Which request begins next, and whose passes run in the next forward. Pure Python, without a clock of its own.

`TenantQueue` holds the requests that wait. Tenants take turns, one request each. The requests of one tenant are served
in the order in which they came. A request of a conversation that is being answered is passed over until that answer is
there; the requests behind it do not wait for it. The queue has a fixed capacity. Where tenants share it, each may have
as many requests waiting as there are free places: alone a tenant fills half of the queue, two tenants fill a third
each, and a new tenant always finds room.

`next_group` chooses among the requests that are being prefilled. A question alone has few rows, so its passes take
about as long as those of several together: the weights are read once. A budget of tokens for steps that decode and
prefill is Sarathi-Serve's (Agrawal et al., OSDI 2024, arXiv 2403.02310); vLLM schedules likewise.

`ragkv serve` and the simulation of replicas (`ragkv bench scale`) run on this module.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import chain, islice, zip_longest
from typing import Generic, Protocol, TypeVar

TURN = 4
"""Requests that begin before what else the engine does gets its turn."""
STEPS = 64
"""Steps of running answers before what else the engine does gets its turn."""
_MEMORY = 0.2
"""Weight of the latest request in the running mean of the time that one takes."""


class Waiting(Protocol):
    """A request that waits. `tenant`: whose it is."""

    @property
    def tenant(self) -> str: ...


class Prefilling(Protocol):
    """A request that is being prefilled.

    Attributes:
        rows: Rows of its next pass; 0 while it has none.
        pass_id: The same for requests that wait for the same pass.
        alone: Whether its passes run in no forward of others: one that it was in has failed.
    """

    @property
    def rows(self) -> int: ...

    @property
    def pass_id(self) -> int: ...

    @property
    def alone(self) -> bool: ...


W = TypeVar("W", bound=Waiting)
P = TypeVar("P", bound=Prefilling)


class TenantQueue(Generic[W]):
    """The waiting requests of all tenants. Not thread-safe.

    Attributes:
        capacity: Requests that may wait.
    """

    def __init__(self, capacity: int, shared: bool = False):
        """Make an empty queue. shared: whether a tenant must leave room for others."""
        self.capacity = capacity
        self._shared = shared
        self._queues: OrderedDict[str, deque[W]] = OrderedDict()
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

    def enqueue(self, request: W) -> None:
        """Add a request behind those of its tenant."""
        self._queues.setdefault(request.tenant, deque()).append(request)

    def take(self, aside: Callable[[W], bool], ready: Callable[[W], bool]) -> W | None:
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

    def first(self, count: int) -> list[W]:
        """Return the first requests, by the turns of their tenants, `count` at most."""
        rounds = zip_longest(*(islice(queue, count) for queue in self._queues.values()))
        return list(islice((request for request in chain.from_iterable(rounds) if request is not None), count))

    def sweep(self, abandoned: Callable[[W], bool]) -> None:
        """Remove the abandoned requests."""
        for tenant, queue in list(self._queues.items()):
            self._queues[tenant] = deque(request for request in queue if not abandoned(request))
        self._drop_empty()

    def _drop_empty(self) -> None:
        for tenant in [tenant for tenant, queue in self._queues.items() if not queue]:
            del self._queues[tenant]


def next_group(started: Iterable[P], rows: int, most: int) -> list[P]:
    """Return the requests whose next passes run in the next forward.

    They are those that began first, as many as have `most` rows together; one that has more runs by itself. So a
    running answer waits for one forward of bounded size, not for a whole prefill. Requests that wait for the same pass,
    as of a chunk that all of them miss, are returned together: it runs once. A request that runs alone comes with no
    others but these.

    Args:
        started: The requests that are being prefilled, in the order in which they began.
        rows: Rows that run in the same forward, those of the running answers.
        most: Rows of a forward.
    """
    waiting = [request for request in started if request.rows]
    group, passes = list[P](), set[int]()
    for request in waiting:
        if request.pass_id not in passes:
            rows += request.rows
            if group and (request.alone or group[0].alone or rows > most):
                break
            passes.add(request.pass_id)
        group.append(request)
    return [*group, *(request for request in waiting[len(group) :] if request.pass_id in passes)]
