"""The health of the engine, examined by its own thread and readable from any."""

from __future__ import annotations

import logging
import time
from math import inf
from typing import Any

from ragkv.api.errors import fault_of
from ragkv.engine.engine import Engine
from ragkv.errors import EmbedderChanged, RagkvError
from ragkv.ingest.jobs import Jobs

IDLE_SECONDS = 5.0
"""How often an idle thread examines its health, and looks for jobs that another process queued."""

logger = logging.getLogger("ragkv.api")


class EngineHealth:
    """The latest health report of an engine.

    Attributes:
        latest: `status` and further facts about the engine, its index and the waiting documents.
        examined: When the engine was last examined, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {"status": "starting"}
        self.examined = -inf

    def examine(self, engine: Engine, jobs: Jobs, now: bool = False) -> None:
        """Examine the engine if that is due, or at once if `now`. Only the engine's thread may call this."""
        if not now and time.monotonic() - self.examined < IDLE_SECONDS:
            return
        try:
            engine.catalog.check()
            facts = {"reembedding": _change(engine), "price": str(engine.catalog.hour_price() or "")}
            self.latest = {**engine.health(), "index": _index(engine), **facts, **_backlog(jobs)}
        except Exception as error:
            reason = error.public if isinstance(error, RagkvError) else fault_of(error).detail
            if self.latest.get("reason") != reason:  # the log has the details, once
                logger.error("the engine cannot answer: %s", error, exc_info=not isinstance(error, RagkvError))
            self.latest = {"status": "failed", "reason": reason}
        self.examined = time.monotonic()

    def fail(self, reason: str) -> None:
        """Report that no question is answered, until the engine is examined again."""
        self.latest = {"status": "failed", "reason": reason}
        self.examined = -inf


def _backlog(jobs: Jobs) -> dict[str, int]:
    backlog = jobs.backlog()
    return {
        "documents_waiting": backlog.documents,
        "jobs_queued": backlog.queued,
        "jobs_running": backlog.running,
    }


def _change(engine: Engine) -> dict[str, Any] | None:
    """Return how far the change to another embedder is; None without one."""
    change = engine.catalog.reembedding()
    if change is None:
        return None
    names = {"from": change.earlier.name, "to": change.following.name}
    return {**names, "done": change.done, "total": change.total}


def _index(engine: Engine) -> str:
    """Return `ok`, or why documents cannot be added to the index."""
    try:
        engine.catalog.check_embedder(engine.retriever.embedder.identity)
    except EmbedderChanged as error:
        return error.public
    return "ok"
