"""What a replica asks the others, over Ray Serve, and how it learns that it is to end.

Every PERIOD seconds a replica asks all replicas for what tenants used there, so that the limits of tenants hold for all
replicas together. Ray sends calls to the replicas that are in service. So a replica that gets no reply of its own is
not in service any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.api.runtime.rate_limits import RateLimiter, Resource

PERIOD = 2.0
"""Seconds between two exchanges of what tenants used."""
TIMEOUT = 2.0
"""Seconds that the replies of the others may take."""

Totals = Mapping[str, Counter[Resource]]

logger = logging.getLogger("ragkv.api")


class ReplicaPeers:
    """The other replicas of this application. The methods of `Replica` (deployment.py) reply."""

    def __init__(self) -> None:
        """Find out who this replica is. Only a replica can call this."""
        context = serve.get_replica_context()
        self._place = context.deployment, context.app_name
        self.name: str = context.replica_tag

    async def answers(self, tenant: str, limit: int, before: float) -> list[RecordedAnswer]:
        """Return the tenant's answers of the other replicas, in any order; at most `limit` of each."""
        replies = await self._ask("reply_answers", tenant, limit, before)
        return [each for answers in replies.values() for each in answers]

    async def answer(self, tenant: str, id: str) -> RecordedAnswer | None:
        """Return the tenant's answer to a request, from the replica that gave it last; None if none knows it."""
        replies = await self._ask("reply_answer", tenant, id)
        found: list[RecordedAnswer] = [each for each in replies.values() if each is not None]
        return max(found, key=lambda each: each.when, default=None)

    async def drop_conversation(self, collection: str, conversation: str) -> None:
        """Let the other replicas drop what they keep of a conversation in memory."""
        await self._ask("drop_conversation", collection, conversation)

    async def metrics(self) -> dict[str, Sequence[Metric]]:
        """Return the metrics of the other replicas by their names."""
        return await self._ask("reply_metrics")

    async def exchange(self, limiter: RateLimiter, end: Callable[[], None]) -> None:
        """Count what tenants use at the other replicas, until cancelled. Call `end` once when out of service."""
        served = ended = False
        while True:
            await asyncio.sleep(PERIOD)
            replies = await self._ask("reply_usage", own=True)
            for replica, totals in replies.items():
                if replica != self.name:
                    limiter.count_elsewhere(replica, totals)
            if served and not ended and replies and self.name not in replies:
                ended = True
                end()
            served = served or self.name in replies

    async def _ask(self, method: str, *arguments: Any, own: bool = False) -> dict[str, Any]:
        """Call a method of all replicas. Returns the replies by replica; own: that of this replica, too."""
        try:
            handle = serve.get_deployment_handle(*self._place)
            broadcast = handle.broadcast(method, *arguments)
            replies = await broadcast.results_async(timeout_s=TIMEOUT, return_exceptions=True)
        except DeploymentUnavailableError:
            return {}  # none is in service yet
        except (TimeoutError, RayError, RayServeException) as error:
            logger.warning("the other replicas did not reply to %s: %s", method, type(error).__name__)
            return {}
        found = {reply[0]: reply[1] for reply in replies if not isinstance(reply, BaseException)}
        return {name: reply for name, reply in found.items() if own or name != self.name}
