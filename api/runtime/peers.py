"""What the replicas of a service ask each other.

Each replica keeps its latest answers and its counters in its own memory. A request reaches one replica, which asks the
others for what it lacks. A service that runs alone has no peers (`NoPeers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prometheus_client.core import Metric

from ragkv.api.runtime.answer_history import RecordedAnswer


class Peers(Protocol):
    """The other replicas. One that does not answer in time is left out."""

    @property
    def name(self) -> str:
        """Name of this replica; "" where there are no others."""
        ...

    async def answers(self, tenant: str, limit: int, before: float) -> list[RecordedAnswer]:
        """Return the tenant's answers of the other replicas, in any order; at most `limit` of each."""
        ...

    async def answer(self, tenant: str, id: str) -> RecordedAnswer | None:
        """Return the tenant's answer to a request, from the replica that gave it last; None if none knows it."""
        ...

    async def drop_conversation(self, collection: str, conversation: str) -> None:
        """Let the other replicas drop what they keep of a conversation in memory."""
        ...

    async def metrics(self) -> dict[str, Sequence[Metric]]:
        """Return the metrics of the other replicas by their names."""
        ...


class NoPeers:
    """Stands for the others of a service that runs alone."""

    name = ""

    async def answers(self, tenant: str, limit: int, before: float) -> list[RecordedAnswer]:
        """Return none."""
        return []

    async def answer(self, tenant: str, id: str) -> RecordedAnswer | None:
        """Return None."""
        return None

    async def drop_conversation(self, collection: str, conversation: str) -> None:
        """Do nothing."""

    async def metrics(self) -> dict[str, Sequence[Metric]]:
        """Return none."""
        return {}
