"""Follows the catalogue's changes in the engine's thread: what left it leaves the memory of this process.

It does not matter who deleted or replaced a document: this service, another replica, or a command beside it. The
catalogue announces the change to all of them (ragkv/catalog/listener.py). Whoever delivers an answer asks the catalogue
itself, so an announcement that is late costs memory and no more.
"""

from __future__ import annotations

import logging
import time

from ragkv.api.runtime.catalog_service import CatalogService
from ragkv.catalog import ChangeListener
from ragkv.engine.engine import Engine
from ragkv.errors import RagkvError

logger = logging.getLogger("ragkv.api")

PAUSE = 1.0
"""Seconds after which a catalogue that did not answer is asked again."""


class CatalogFollower:
    """Looks for changes whenever it is asked to. It belongs to the engine's thread."""

    def __init__(self, engine: Engine, service: CatalogService):
        """Take what keeps something of documents in memory."""
        self._engine, self._service = engine, service
        self._listener: ChangeListener | None = None
        self._again = 0.0

    def catch_up(self) -> bool:
        """Let go of what is outdated; returns whether something has changed since the last call. Never waits."""
        if time.monotonic() < self._again:
            return False
        try:
            if self._listener is None:
                self._listener = self._engine.catalog.listener()
            changed = self._listener.wait(0)
            if changed:
                self._service.drop_outdated(changed)
                self._engine.drop_outdated(changed)
        except RagkvError as error:
            logger.warning("changes of the catalogue are not followed for a while: %s", error)
            self.close()
            self._again = time.monotonic() + PAUSE
            return False
        return bool(changed)

    def close(self) -> None:
        """Stop listening."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
