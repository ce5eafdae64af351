"""Worker: the one thread that owns the engine. It answers what is asked and, in between, ingests what is queued.

Questions wait in a bounded line; documents wait in the catalogue (ingest.jobs), so they outlive the process. While a
document is read, questions are answered between its chunks.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ingest.jobs import Jobs
from ragkv.config import Settings
from ragkv.engine import Engine
from ragkv.errors import Busy, CatalogCorrupt, Stopping, StoreError

T = TypeVar("T")

CAPACITY = 32
"""Requests that may wait."""
TURN = 4
"""Requests answered in a row before a waiting document is read on, by one chunk."""
IDLE_SECONDS = 5.0
"""How often an idle worker looks after its health, and for jobs that another process queued."""
_MEMORY = 0.2
"""Weight of the latest request in the running mean of how long one takes."""

logger = logging.getLogger("ragkv.api")


class Worker:
    """Thread-safe. `jobs` exists once the future of `start` has completed."""

    jobs: Jobs

    def __init__(self, settings: Settings, capacity: int = CAPACITY):
        self._settings, self._capacity = settings, capacity
        self._line: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._pausing = self._closing = self._queued = False
        self._seconds = 1.0
        self._health: dict[str, Any] = {"status": "starting"}
        self._examined = -math.inf

    def start(self) -> Future[None]:
        """Open the engine; the future completes when it is open, or fails with what went wrong. Call once."""
        self._ready.set_running_or_notify_cancel()  # from here on whoever waits for it cannot cancel it
        self._thread.start()
        return self._ready

    def submit(self, task: Callable[[Engine], T]) -> Future[T]:
        """Have `task` called with the engine. Cancelling the future before its turn takes it out of the line.

        Raises Busy when the line is full, Stopping during shutdown.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._pausing:
                raise Stopping("the service is shutting down")
            if len(self._line) >= self._capacity:
                raise Busy(len(self._line), min(60, math.ceil(len(self._line) * self._seconds)))
            self._line.append((task, future))
            self._changed.notify()
        return future

    def wake(self) -> None:
        """A job was queued."""
        with self._changed:
            self._queued = True
            self._changed.notify()

    def health(self) -> dict[str, Any]:
        """The engine's health as of its last free moment, and how many requests are waiting."""
        status = {"status": "failed"} if self._ready.done() and not self._thread.is_alive() else {}
        return {**self._health, **status, "waiting": len(self._line)}

    @property
    def stopping(self) -> bool:
        """Whether shutdown has begun."""
        return self._pausing

    def pause(self) -> None:
        """Shutdown begins: the document being read goes back into the queue at its next chunk, nothing new is taken."""
        self._pausing = True
        if hasattr(self, "jobs"):
            self.jobs.pause()

    def close(self, seconds: float) -> None:
        """Finish the request in hand, refuse those in the line, close the engine; wait at most `seconds` for it."""
        self.pause()
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            engine = Engine.open(self._settings)
        except BaseException as error:
            self._ready.set_exception(error)
            return
        with engine:
            try:
                self.jobs = Jobs(engine.catalog, self._settings.max_document_bytes)
                self._resume(engine)
                self._ready.set_result(None)
            except BaseException as error:
                self._ready.set_exception(error)
                return
            try:
                self._serve(engine)
            finally:
                self._refuse_the_rest()

    def _resume(self, engine: Engine) -> None:
        again = self.jobs.recover()
        if again:
            logger.info("%d documents are read again: the last process did not finish them", again)
        if self._pausing:
            self.jobs.pause()
        self._queued = True
        self._examine(engine)

    def _serve(self, engine: Engine) -> None:
        while not self._closing:
            self._answer_waiting(engine)
            if not self._ingest_next(engine):
                self._examine(engine)
                self._wait()

    def _answer_waiting(self, engine: Engine) -> None:
        """Answer some of those who wait. Not all: more may come than leave, and documents wait for their turn too."""
        for _ in range(TURN):
            with self._changed:
                if self._closing or not self._line:
                    return
                task, future = self._line.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            begun = time.monotonic()
            try:
                future.set_result(task(engine))
            except BaseException as error:
                future.set_exception(error)
            self._seconds += _MEMORY * (time.monotonic() - begun - self._seconds)

    def _ingest_next(self, engine: Engine) -> bool:
        """Read one waiting document; False when there is none, or no place to write it."""
        with self._changed:
            self._queued = False
        try:
            return self.jobs.run_next(engine, lambda: self._between_chunks(engine)) is not None
        except StoreError as error:  # a full disk, a locked catalogue: tried again in a while
            logger.warning("ingest waits: %s", error)
            return False
        except CatalogCorrupt as error:
            logger.critical("%s", error)
            self.jobs.pause()
            return False

    def _between_chunks(self, engine: Engine) -> None:
        self._answer_waiting(engine)
        self._examine(engine)

    def _examine(self, engine: Engine) -> None:
        """Ask the engine how it is, if that was not done lately."""
        if time.monotonic() - self._examined < IDLE_SECONDS:
            return
        try:
            self._health = engine.health()
        except Exception as error:
            self._health = {"status": "failed", "reason": str(error)}
        self._examined = time.monotonic()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._line or self._queued or self._closing, IDLE_SECONDS)

    def _refuse_the_rest(self) -> None:
        with self._changed:
            self._pausing = True
            rest = list(self._line)
            self._line.clear()
        for _, future in rest:
            if future.set_running_or_notify_cancel():
                future.set_exception(Stopping("the service is shutting down"))
