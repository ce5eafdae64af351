"""Worker: the one thread that owns the engine. It answers what is asked and, in between, ingests what is queued.

Questions wait in a bounded line; documents wait in the catalogue (ingest.jobs), so they outlive the process. While a
document is read, questions are answered between its chunks.

Answers are decoded together (answering.py). Who is served when:

    a round     one step, a token for every answer that runs; then the first of the line, if there is a place for it: a
                question is read up to its first token, anything else is done. So a crowd that arrives delays an answer
                that runs by one reading a token, and an answer that runs delays a question by one step.
    a turn      rounds until TURN of the line were taken, at most STEPS; then it is a document's turn. Between two
                chunks of one that is being read the answers that run use up the STEPS first, or end: so an answer of
                so many tokens waits for one chunk, and a chunk for TURN questions and STEPS steps.

Who is the first of the line, line.py says: tenants take turns, and each one's requests are served as they came.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from typing import Any, TypeVar

from api.runtime.answer_channel import AnswerChannel
from api.runtime.answer_history import AnswerHistory
from api.runtime.catalog_service import CatalogService
from api.runtime.decode_loop import DecodeLoop
from api.runtime.request_context import working_for
from api.runtime.request_queue import QueuedQuestion, QueuedTask, RequestQueue, SessionName, reject, resolve
from ingest.jobs import Jobs
from ragkv.config import Settings
from ragkv.engine.chunk_encoder import EVICTED_AT_ONCE
from ragkv.engine.engine import Engine
from ragkv.engine.methods import usable
from ragkv.engine.request import RequestState
from ragkv.errors import Busy, CatalogCorrupt, EmbedderChanged, RagkvError, Stopping, StoreError
from ragkv.metrics.sums import MetricsRecorder
from ragkv.report import Answer

T = TypeVar("T")

TURN = 4
"""Requests taken in a row before a waiting document is read on, by one chunk."""
STEPS = 64
"""Steps of the answers that run before the same."""
IDLE_SECONDS = 5.0
"""How often an idle worker looks after its health, and for jobs that another process queued."""
_MEMORY = 0.2
"""Weight of the latest request in the running mean of how long one takes."""

logger = logging.getLogger("ragkv.api")


class EngineThread:
    """Thread-safe. `jobs`, `holdings`, `model` and `methods` exist once the future of `start` has completed.

    model: name of the loaded one · methods: those it can be asked with · tally: of all that was asked ·
    history: the latest answers.
    """

    jobs: Jobs
    catalog_service: CatalogService
    model: str
    methods: tuple[str, ...]

    def __init__(self, settings: Settings, shared: bool = False):
        """shared: several tenants ask, so none may fill the line."""
        self._settings = settings
        self._queue = RequestQueue(settings.queue, shared)
        self._waited_for: set[Future[Any]] = set()
        self._decode_loop: DecodeLoop | None = None
        self._changed = threading.Condition()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._pausing = self._closing = self._queued = False
        self._ends = inf
        self._seconds = 1.0
        self.metrics, self.history = MetricsRecorder(), AnswerHistory(settings.history)
        self._health: dict[str, Any] = {"status": "starting"}
        self._examined = -inf

    def start(self) -> Future[None]:
        """Open the engine; the future completes when it is open, or fails with what went wrong. Call once."""
        self._ready.set_running_or_notify_cancel()  # from here on whoever waits for it cannot cancel it
        self._thread.start()
        return self._ready

    def submit(self, task: Callable[[Engine], T], turn: SessionName | None = None, tenant: str = "") -> Future[T]:
        """Have `task` called with the engine. Cancelling the future before its turn takes it out of the line.
        turn: not while a turn of this conversation is being answered · tenant: whose request it is.

        Raises Busy when the line is full, Stopping during shutdown.
        """
        future: Future[T] = Future()
        self._join(QueuedTask(task, future, turn, tenant))
        return future

    def ask(
        self,
        begin: Callable[[Engine], RequestState],
        turn: SessionName | None = None,
        tenant: str = "",
        deadline: float = inf,
        progress: AnswerChannel | None = None,
    ) -> Future[Answer]:
        """Have a question answered, together with others. turn: the conversation it is of, its collection first ·
        tenant: whose it is · deadline: on the monotonic clock · progress: told how far it is.

        The future may be cancelled until the answer is there. It fails with what `begin` raised, with Expired and with
        Stopping. Raises as `submit`.
        """
        future: Future[Answer] = Future()
        self._join(QueuedQuestion(begin, future, turn, tenant, deadline, progress))
        return future

    def _join(self, what: QueuedTask | QueuedQuestion) -> None:
        with self._changed:
            if self._pausing:
                raise Stopping("the service is shutting down")
            if self._queue.full(what.tenant) and self._decode_loop is not None:
                self._queue.sweep(self._decode_loop.abandoned)
            if self._queue.full(what.tenant):
                self.metrics.ended("refused")
                ahead = self._queue.ahead(what.tenant)
                raise Busy(len(self._queue), max(1, min(60, math.ceil(ahead * self._seconds))))
            self._queue.join(what)
            self._waited_for.add(what.future)
            self._changed.notify()
        what.future.add_done_callback(self._waited_for.discard)

    def wake(self) -> None:
        """A job was queued."""
        with self._changed:
            self._queued = True
            self._changed.notify()

    def health(self) -> dict[str, Any]:
        """The engine's health as of its last free moment, and what waits now.

        waiting: requests in the line · queue: its places · running: answers being decoded · how many questions ended
        without an answer since the start, by outcome (tally.py).
        """
        status = {"status": "failed"} if self._ready.done() and not self._thread.is_alive() else {}
        running = self._decode_loop.count if self._decode_loop is not None else 0
        now = {"waiting": len(self._queue), "queue": self._queue.capacity, "running": running}
        return {**self._health, **status, **now, **{str(how): count for how, count in self.metrics.sums.ended.items()}}

    @property
    def running(self) -> bool:
        """Whether the thread has begun and not ended."""
        return self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """Whether shutdown has begun."""
        return self._pausing

    def pause(self, seconds: float = inf) -> None:
        """Shutdown begins: the document being read goes back into the queue at its next chunk, nothing new is taken.
        seconds: until `close`, at the latest, is done."""
        self._pausing = True
        self._ends = min(self._ends, time.monotonic() + seconds)
        if hasattr(self, "jobs"):
            self.jobs.pause()

    def reject_waiting(self) -> None:
        """Whoever still waits is told that the service ends; their answers are let go of."""
        self.pause()
        for future in list(self._waited_for):
            reject(future, Stopping("the service is shutting down"))

    def close(self, seconds: float) -> None:
        """Finish the answers that run, refuse those in the line, close the engine; wait at most `seconds` for it, less
        where `pause` has said so."""
        self.pause(seconds)
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(max(1.0, self._ends - time.monotonic()))

    def _run(self) -> None:
        try:
            engine = Engine.open(self._settings)
        except BaseException as error:
            self._ready.set_exception(error)
            return
        with engine:
            try:
                self.model, self.methods = engine.model.name, usable(engine.model)
                self.jobs = Jobs(engine.catalog, self._settings.max_document_bytes)
                self.catalog_service = CatalogService(engine, self.jobs, self.history)
                self._resume(engine)
                self._ready.set_result(None)
            except BaseException as error:
                self._ready.set_exception(error)
                return
            self._decode_loop = answering = DecodeLoop(engine, self.metrics, self.history)
            try:
                self._serve(engine, answering)
            finally:
                self.reject_waiting()
                answering.clear()

    def _resume(self, engine: Engine) -> None:
        again = self.jobs.recover()
        if again:
            logger.info("%d documents are read again: the last process did not finish them", again)
        if self._pausing:
            self.jobs.pause()
        self._queued = True
        self._examine(engine)

    def _serve(self, engine: Engine, answering: DecodeLoop) -> None:
        read = False
        while not self._closing:
            self._turn(engine, answering, reading=False)
            if self._ingest_next(engine, answering):
                read = True
                continue
            self._examine(engine, anew=read)
            read = False
            if not answering.count:
                self._wait()
        while answering.count:
            answering.step()
        self._tidy(engine)

    def _turn(self, engine: Engine, answering: DecodeLoop, reading: bool) -> None:
        """Answer some of those who wait. Not all: more may come than leave, and documents wait for their turn too.

        reading: whether a document is being read, and its next chunk will keep everybody waiting.
        """
        taken = 0
        self._tidy(engine)
        for _ in range(STEPS):
            for seconds in answering.step():
                self._seconds += _MEMORY * (seconds - self._seconds)
            if taken < TURN and self._take(engine, answering):
                taken += 1
            elif not answering.count or (taken == TURN and not reading):
                return

    def _tidy(self, engine: Engine) -> None:
        """Delete some of the KV that nobody needs any more."""
        if keys := self.catalog_service.take_unreferenced(EVICTED_AT_ONCE):
            try:
                engine.evict(keys)
            except RagkvError as error:  # it stays, as an orphan
                logger.warning("the KV of %d chunks is not deleted: %s", len(keys), error)

    def _take(self, engine: Engine, answering: DecodeLoop) -> bool:
        """Serve the first of the line that may be served now; False when there is none."""
        with self._changed:
            self._queue.sweep(answering.abandoned)
            first = self._queue.take(
                aside=lambda what: answering.answers_session(what.session),
                ready=lambda what: not self._closing and (answering.free or isinstance(what, QueuedTask)),
            )
        if first is None:
            return False
        if isinstance(first, QueuedQuestion):
            answering.prefill(first)
            return True
        begun = time.monotonic()
        try:
            with working_for(first.context):
                resolve(first.future, first.work(engine))
        except BaseException as error:
            reject(first.future, error)
        self._seconds += _MEMORY * (time.monotonic() - begun - self._seconds)
        return True

    def _ingest_next(self, engine: Engine, answering: DecodeLoop) -> bool:
        """Read one waiting document; False when there is none, or no place to write it."""
        with self._changed:
            self._queued = False
        try:
            return self.jobs.run_next(engine, lambda: self._between_chunks(engine, answering)) is not None
        except StoreError as error:  # a full disk, a locked catalogue: tried again in a while
            logger.warning("ingest waits: %s", error)
            return False
        except CatalogCorrupt as error:
            logger.critical("%s", error)
            self.jobs.pause()
            return False

    def _between_chunks(self, engine: Engine, answering: DecodeLoop) -> None:
        self._turn(engine, answering, reading=True)
        self._examine(engine)

    def _examine(self, engine: Engine, anew: bool = False) -> None:
        """Ask the engine how it is, if that was not done lately, or documents came in since (`anew`)."""
        if not anew and time.monotonic() - self._examined < IDLE_SECONDS:
            return
        try:
            self._health = {**engine.health(), "index": _index(engine), **_backlog(self.jobs)}
        except Exception as error:
            self._health = {"status": "failed", "reason": str(error)}
        self._examined = time.monotonic()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._queue or self._queued or self._closing or self.catalog_service.has_unreferenced,
                IDLE_SECONDS,
            )


def _backlog(jobs: Jobs) -> dict[str, int]:
    waiting = jobs.backlog()
    return {
        "documents_waiting": waiting.documents,
        "jobs_queued": waiting.queued,
        "jobs_running": waiting.running,
    }


def _index(engine: Engine) -> str:
    """`ok`, or why nothing can be found in it."""
    try:
        engine.catalog.check_embedder(engine.retriever.embedder.identity)
    except EmbedderChanged as error:
        return str(error)
    return "ok"
