"""The change to another embedder as the engine's thread drives it: a batch at a time, between questions and ingest."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from math import inf

from ragkv.engine.engine import Engine
from ragkv.errors import EmbedderChanged, RagkvError
from ragkv.ingest.reembedding import reembed_steps

logger = logging.getLogger("ragkv.api")

REPORT_SECONDS = 30.0
"""How often the log tells of the progress."""
RETRY_SECONDS = 10.0
"""After so many seconds a change that could not go on, for a full disk or a locked catalogue, is tried again."""


class ReembeddingTask:
    """Embeds all documents again after the embedder has changed. Only the engine's thread may use it."""

    def __init__(self, engine: Engine):
        """Find out whether there is something to do."""
        self._engine = engine
        self._steps: Iterator[str] | None = None
        self._due, self._report_at = inf, 0.0
        change = engine.catalog.aim_embedder(engine.retriever.embedder.identity)
        if change is None:
            return
        names = change.earlier.name, change.following.name
        how = "with the earlier embedder" if engine.retriever.open_earlier() else "by words alone"
        logger.info("the embedder changes from %s to %s; searches go on %s meanwhile", *names, how)
        self._due = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether a step can be made now."""
        return time.monotonic() >= self._due

    def step(self) -> bool:
        """Embed a batch. Returns whether there was something to do; a fault is logged and tried again later."""
        if not self.due:
            return False
        if self._steps is None:
            self._steps = reembed_steps(self._engine)
        try:
            changed = next(self._steps, None)
        except EmbedderChanged as error:
            logger.warning("%s", error)
            self._due = inf
            return False
        except RagkvError as error:
            logger.warning("embedding again waits: %s", error)
            self._steps, self._due = None, time.monotonic() + RETRY_SECONDS
            return False
        except Exception:
            logger.exception("embedding again waits")
            self._steps, self._due = None, time.monotonic() + RETRY_SECONDS
            return False
        if changed is None:
            self._end()
        elif changed:
            logger.info("collection %r is searched with the new embedder", changed)
        else:
            self._report()
        return True

    def _report(self) -> None:
        if time.monotonic() < self._report_at:
            return
        self._report_at = time.monotonic() + REPORT_SECONDS
        change = None
        with suppress(RagkvError):
            change = self._engine.catalog.reembedding()
        if change is not None:
            logger.info("%d of %d chunks are embedded with %s", change.done, change.total, change.following.name)

    def _end(self) -> None:
        self._due = inf
        self._engine.retriever.drop_earlier()
        logger.info("all chunks are embedded with %s", self._engine.retriever.embedder.identity.name)
