"""The one thread that owns the engine. It answers questions and, in between, ingests queued documents.

After a change of the embedder it also embeds all documents again (reembedding.py), a batch after each step of ingest.

Questions wait in a bounded queue (ragkv/engine/scheduler.py), which decides which one is first. Documents wait in the
catalogue (ingest.jobs), so they outlive the process. The serving loop (ragkv/engine/loop.py) prefills questions
together and decodes answers together.

`EngineThread._serve` alternates between two things:

    a turn      at most STEPS rounds. A round runs a pass of the questions that are being prefilled, makes a token for
                every running answer, and then serves the first requests of the queue, as far as there is room for them:
                questions begin, up to a task, which is done. A turn ends after TURN requests; while a document is being
                ingested, the running answers use up the STEPS.
    a step      one unit of ingest, at most the encoding of one group of chunks (RAGKV_GROUP_TOKENS).

So requests that arrive together delay a running answer by one forward of prefills per token, and running answers delay
a question by a decode step for each of its passes. An answer of up to STEPS tokens waits for one group, and a group
waits for at most TURN requests and STEPS rounds.

Documents of several jobs are open at the same time and take turns by the time that they have had (ingest/turns.py).

A fault that nobody expects ends `_serve`, and another begins over the same engine (`_serve_again`): the requests of the
moment fail with Restarting, and what was being ingested counts as if the process had died. One that dies again and
again begins anew at a bounded pace.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from math import inf
from typing import Any, TypeVar

from ragkv.api.observability.audit import AuditLog
from ragkv.api.runtime.answer_channel import AnswerChannel
from ragkv.api.runtime.answer_history import AnswerHistory
from ragkv.api.runtime.catalog_follower import CatalogFollower
from ragkv.api.runtime.catalog_service import CatalogService
from ragkv.api.runtime.delivery import AnswerRecords, Charge, Delivery, QueuedTask, charge_nobody, reject, resolve
from ragkv.api.runtime.engine_health import IDLE_SECONDS, EngineHealth
from ragkv.api.runtime.passage_search import PassageSearch
from ragkv.api.runtime.reembedding import ReembeddingTask
from ragkv.api.runtime.request_context import working_for
from ragkv.api.runtime.text_service import TextService
from ragkv.api.runtime.undelivered import AnswerOrigin
from ragkv.config import Settings
from ragkv.engine.engine import Engine
from ragkv.engine.loop import ServingLoop
from ragkv.engine.registry import METHOD_NAMES
from ragkv.engine.request import Request
from ragkv.engine.scheduler import STEPS, TURN, TenantQueue
from ragkv.engine.service_rules import rule_of
from ragkv.errors import Busy, CatalogCorrupt, RagkvError, Restarting, Stopping, StoreFull
from ragkv.ingest.jobs import Jobs
from ragkv.ingest.progress import IngestStep
from ragkv.ingest.turns import IngestTurns
from ragkv.metrics.sums import MetricsRecorder
from ragkv.model.profile import Profile
from ragkv.report import Answer
from ragkv.types import AskOptions

T = TypeVar("T")

Conversation = tuple[str, str]
"""Collection and name of a conversation."""

DEFAULTS = AskOptions()

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before the loop of a dead one begins anew; the last for all further deaths in a row."""
LIVED_SECONDS = 60.0
"""A loop that ran so long before it died is the first of a row."""
SWITCH_SECONDS = 0.0005
"""How long this thread may keep Python from the one that serves HTTP. At Python's 5 ms, a first token on a CPU comes
16 ms later (docs/lab-notes.md)."""

logger = logging.getLogger("ragkv.api")


class EngineThread:
    """Owns the engine in a thread of its own. Its methods may be called from any thread.

    Attributes:
        jobs: The ingest jobs. This attribute and the next six exist once the future of `start` has completed.
        catalog_service: The catalogue for the routes.
        passage_search: Searches for passages.
        text_service: Embeds and ranks texts of requests.
        model: Name of the loaded model.
        methods: Methods that the model can be asked with.
        profile: Profile of the model.
        metrics: Counts the questions.
        history: The latest answers.
        audit: Records who changed which documents.
    """

    jobs: Jobs
    catalog_service: CatalogService
    passage_search: PassageSearch
    text_service: TextService
    model: str
    methods: tuple[str, ...]
    profile: Profile

    def __init__(self, settings: Settings, shared: bool = False, charge: Charge = charge_nobody):
        """Prepare the thread without starting it.

        Args:
            settings: What to open.
            shared: Several tenants ask, so none may fill the queue.
            charge: Receives the tokens that questions use.
        """
        self._charge = charge
        self._settings = settings
        self._queue = TenantQueue[Request | QueuedTask](settings.queue, shared)
        self._waited_for: set[Future[Any]] = set()
        self._loop: ServingLoop | None = None
        self._changed = threading.Condition()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._pausing = self._closing = self._documents_queued = False
        self._ends = inf
        self._deaths = self._deaths_in_row = 0
        self._begins_at = 0.0
        self._ingest_fault: RagkvError | None = None
        self.metrics, self.history = MetricsRecorder(), AnswerHistory(settings.history)
        self.audit = AuditLog(settings.audit_log)
        self._health = EngineHealth()

    def start(self) -> Future[None]:
        """Open the engine. The future completes when it is open, or fails with what went wrong. Call it once."""
        self._ready.set_running_or_notify_cancel()  # nobody can cancel it from here on
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._thread.start()
        return self._ready

    def submit(
        self, task: Callable[[Engine], T], conversation: Conversation | None = None, tenant: str = ""
    ) -> Future[T]:
        """Queue a call of `task` with the engine. Cancelling the future before its turn removes it from the queue.

        Args:
            task: What to call.
            conversation: The task waits until no question of this conversation is being answered.
            tenant: The tenant whose request it is.

        Raises:
            Busy: The queue is full.
            Stopping: The service is shutting down.
        """
        future: Future[T] = Future()
        self._enqueue(QueuedTask(task, future, conversation, tenant), future)
        return future

    async def remove_conversation(self, conversation: Conversation, tenant: str) -> None:
        """Remove a conversation: its turns, what is kept of it in memory, and its recorded answers.

        Args:
            conversation: Its collection and its name.
            tenant: The tenant whose request it is.

        Raises:
            Busy: The queue is full.
            NotFound: There is no such conversation.
            Stopping: The service is shutting down.
        """
        await asyncio.wrap_future(
            self.submit(lambda engine: engine.sessions.remove(*conversation), conversation, tenant)
        )
        self._forget(conversation)

    def forget_conversation(self, conversation: Conversation) -> None:
        """Drop what is kept in memory of a conversation that another process removed: its state, its answers."""
        self._forget(conversation)
        self.submit(lambda engine: engine.sessions.cache.drop(*conversation), conversation)

    def _forget(self, conversation: Conversation) -> None:
        self.history.remove(lambda each: (each.collection, each.conversation) == conversation)

    def ask(
        self,
        question: str,
        options: AskOptions = DEFAULTS,
        tenant: str = "",
        deadline: float = inf,
        channel: AnswerChannel | None = None,
        origin: AnswerOrigin | None = None,
        rehearsed: bool = False,
    ) -> Future[Answer]:
        """Queue a question. It is answered together with others.

        The future may be cancelled until the answer is there. It fails with what `Engine.prefill` raised, with
        Outdated, Expired or Stopping.

        Args:
            question: The question.
            options: How it is asked. Questions of one conversation are answered one after another.
            tenant: The tenant whose request it is.
            deadline: On the monotonic clock.
            channel: Receives the progress of the answer.
            origin: Receives what the answer is read from.
            rehearsed: Nobody has asked: metrics, history and quotas do not count the question.

        Raises:
            Busy: The queue is full.
            Stopping: The service is shutting down.
        """
        if options.answer_schema is None and rule_of(question, self.profile.extractive):
            return self.submit(partial(_answer_by_rule, question, options, channel), tenant=tenant)
        records = self._unrecorded if rehearsed else self._records
        delivery = Delivery(records, Future(), tenant, channel, origin)
        self._enqueue(Request(question, options, delivery, tenant, deadline), delivery.future)
        return delivery.future

    def _enqueue(self, request: QueuedTask | Request, future: Future[Any]) -> None:
        with self._changed:
            if self._pausing:
                raise Stopping("the service is shutting down")
            if (rest := self._begins_at - time.monotonic()) > 0:
                raise Restarting(math.ceil(rest) + 1)
            if self._queue.full(request.tenant):
                self._queue.sweep(self._abandoned)
            if self._queue.full(request.tenant):
                self.metrics.ended("refused", request.tenant)
                raise Busy(len(self._queue), self._queue.retry_after(request.tenant))
            self._queue.enqueue(request)
            self._waited_for.add(future)
            self._changed.notify()
        future.add_done_callback(self._waited_for.discard)

    def _abandoned(self, request: QueuedTask | Request) -> bool:
        """Whether nobody waits for the request any more. It must be dropped then."""
        if isinstance(request, QueuedTask):
            return request.gone()
        return self._loop is not None and self._loop.abandoned(request)

    def wake(self) -> None:
        """Tell the thread that a job was queued."""
        with self._changed:
            self._documents_queued, self._ingest_fault = True, None
            self._changed.notify()

    def check_ingest(self, job_id: str) -> None:
        """Raise why a job that is not finished is not worth waiting for.

        Raises:
            Stopping: The service is shutting down. The next start resumes the job.
            StoreFull: There is no space to ingest, or to record what came of it.
            CatalogCorrupt: Nothing is ingested any more.
        """
        if self._pausing:
            raise Stopping(f"the service is shutting down; job {job_id} continues after the next start")
        fault = self._ingest_fault
        if isinstance(fault, StoreFull | CatalogCorrupt):
            raise type(fault)(fault.message)

    def health(self) -> dict[str, Any]:
        """Return the engine's health as it was when last examined, and the load as it is now.

        `waiting` counts the queued requests, `queue` is the capacity of the queue and `running` counts the answers
        being decoded. `replaced` counts how often the loop of this thread died and began anew. Further keys count the
        questions that ended without an answer since the start, by outcome (ragkv/metrics/sums.py).
        """
        status = {"status": "failed"} if self._ready.done() and not self._thread.is_alive() else {}
        running = self._loop.count if self._loop is not None else 0
        now = {"waiting": len(self._queue), "queue": self._queue.capacity, "running": running}
        now["replaced"] = self._deaths
        return {
            **self._health.latest,
            **self._damage(),
            **status,
            **now,
            **{str(how): count for how, count in self.metrics.sums.ended.items()},
        }

    def _damage(self) -> dict[str, Any]:
        """Return what a damaged catalogue changes in the health, from the moment when any request found it."""
        damage = self.catalog_service.damage if hasattr(self, "catalog_service") else None
        return {} if damage is None else {"status": "failed", "reason": damage.public, "catalogue": damage.public}

    @property
    def running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """Whether the service is shutting down."""
        return self._pausing

    def pause(self, seconds: float = inf) -> None:
        """Begin the shutdown. Nothing new is accepted, and the running document is queued again at its next step.

        Args:
            seconds: Time until `close` must have returned.
        """
        self._pausing = True
        self._ends = min(self._ends, time.monotonic() + seconds)
        if hasattr(self, "jobs"):
            self.jobs.pause()

    def reject_waiting(self) -> None:
        """Fail all requests that still wait or run with Stopping."""
        self.pause()
        for future in list(self._waited_for):
            reject(future, Stopping("the service is shutting down"))

    def close(self, seconds: float) -> None:
        """Finish the running answers, reject the queued requests and close the engine.

        Args:
            seconds: Longest wait for the thread to end. An earlier end given to `pause` holds.
        """
        self.pause(seconds)
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(max(1.0, self._ends - time.monotonic()))

    def _run(self) -> None:
        try:
            engine = Engine.open(self._settings, logger.warning)
        except BaseException as error:
            self._ready.set_exception(error)
            return
        with engine:
            try:
                self.model, self.methods = engine.model.name, METHOD_NAMES
                self.profile = engine.model.profile
                self.jobs = Jobs(engine.catalog, self._settings.max_document_bytes, self.audit.record_outcome)
                self.catalog_service = CatalogService(engine, self.jobs, self.history)
                undelivered = self.catalog_service.undelivered
                self._records = AnswerRecords(self.metrics, self.history, undelivered, self._charge)
                self._unrecorded = AnswerRecords(MetricsRecorder(), AnswerHistory(0), undelivered)
                self.passage_search = PassageSearch(engine.retriever, self._settings.queue)
                self.text_service = TextService(engine.retriever, self._settings.queue, self._settings.deadline)
                if engine.reuse_refused:
                    logger.warning("every question is answered by full: %s", engine.reuse_refused)
                self._resume(engine)
                engine.retriever.views.start_follower()
                self._ready.set_result(None)
            except BaseException as error:
                self._ready.set_exception(error)
                return
            self._follower = CatalogFollower(engine, self.catalog_service)
            try:
                while not self._serve_again(engine):
                    pass
            finally:
                self.reject_waiting()
                self._follower.close()

    def _resume(self, engine: Engine) -> None:
        """Take up what the last process, or the last loop of this one, has left behind."""
        requeued = self.jobs.recover()
        if requeued:
            logger.info("%d documents are queued again: they were not finished", requeued)
        set_aside = self.jobs.set_aside()
        if set_aside:
            words = (
                "%d documents are set aside, at last %r of collection %r (%s); `ragkv doctor` lists and removes them"
            )
            last = set_aside[-1]
            logger.warning(words, len(set_aside), last.document_id, last.collection, last.reason)
        if self._pausing:
            self.jobs.pause()
        self._ingest_turns, self._reembedding = IngestTurns(self.jobs), ReembeddingTask(engine)
        self._documents_queued = True
        self._health.examine(engine, self.jobs, now=True)

    def _serve_again(self, engine: Engine) -> bool:
        """Serve until `close` or until a fault that nobody expects. Returns whether this was the end.

        Only the state of this thread is made anew. The engine, whose parts other threads use, keeps no part of a
        request that failed.
        """
        began = time.monotonic()
        try:
            if self._begins_at:  # the start has done it for the first loop
                self._resume(engine)
            self._loop = ServingLoop(engine)
            self._begins_at = 0.0
            self._serve(engine, self._loop)
            return True
        except BaseException as error:
            if self._closing:
                raise
            self._bury(error, time.monotonic() - began)
        finally:
            if self._loop is not None:
                with suppress(Exception):
                    self._loop.clear()
        with self._changed:
            self._changed.wait_for(lambda: self._closing, self._begins_at - time.monotonic())
        return self._closing

    def _bury(self, error: BaseException, lived: float) -> None:
        """Record the death of a loop, and fail all requests that wait or run."""
        self._deaths_in_row = 1 if lived >= LIVED_SECONDS else self._deaths_in_row + 1
        pause = PAUSES[min(self._deaths_in_row, len(PAUSES)) - 1]
        words = "the engine ended unexpectedly, the %d. time in a row; another takes its place in %g s"
        logger.critical(words, self._deaths_in_row, pause, exc_info=error)
        self._health.fail("the engine ended unexpectedly and is replaced")
        with self._changed:
            self._begins_at = time.monotonic() + pause
            failed = list(self._waited_for)
            self._queue.sweep(lambda request: True)
        for future in failed:
            reject(future, Restarting(math.ceil(pause) + 1))
        self._deaths += 1

    def _serve(self, engine: Engine, loop: ServingLoop) -> None:
        """Alternate turns of questions with steps of ingest until `close`; then finish the running answers."""
        ingested = False
        while not self._closing:
            self._take_turn(engine, loop, ingesting=False)
            with closing(self._background(engine)) as steps, self.jobs.counting_deaths():
                for _ in steps:
                    ingested = True
                    self._take_turn(engine, loop, ingesting=True)
                    self._health.examine(engine, self.jobs)
            if self._documents_queued:
                continue
            self._health.examine(engine, self.jobs, now=ingested)
            ingested = False
            self._wait(loop.idle_seconds)
        while loop.count:
            time.sleep(loop.idle_seconds)
            self._follower.catch_up()
            loop.step()
        self.catalog_service.evict_unreferenced(engine)

    def _take_turn(self, engine: Engine, loop: ServingLoop, ingesting: bool) -> None:
        """Serve some of the waiting requests.

        Not all of them: more may arrive than are answered, and documents wait for their turn too.

        Args:
            engine: The engine.
            loop: The answers that run.
            ingesting: Whether a document is being ingested. The answers that run then use up the steps of this turn,
                because the next chunk makes them wait.
        """
        taken = 0
        self.catalog_service.evict_unreferenced(engine)
        for _ in range(STEPS):
            self._follower.catch_up()
            for seconds in loop.step():
                self._queue.record_seconds(seconds)
            served = taken
            while taken < TURN and (first := self._serve_first(engine, loop)):
                taken += 1
                if isinstance(first, QueuedTask):
                    break
            if taken == served and (loop.idle_seconds or (taken == TURN and not ingesting)):
                return

    def _serve_first(self, engine: Engine, loop: ServingLoop) -> Request | QueuedTask | None:
        """Begin the first request of the queue that may be served now, and return it; None when there is none."""
        with self._changed:
            self._queue.sweep(self._abandoned)
            first = self._queue.take(
                aside=lambda request: loop.has_conversation(request.conversation),
                ready=lambda request: not self._closing and (loop.free or isinstance(request, QueuedTask)),
            )
            following = self._queue.first(TURN - 1)
        if first is None:
            return None
        if isinstance(first, Request):
            loop.start(first, [request.question for request in following if isinstance(request, Request)])
            return first
        started = time.monotonic()
        try:
            with working_for(first.context):
                resolve(first.future, first.work(engine))
        except BaseException as error:
            reject(first.future, engine.free_memory(error))
        self._queue.record_seconds(time.monotonic() - started)
        return first

    def _background(self, engine: Engine) -> Generator[None, None, None]:
        """Ingest until nothing waits, and embed again what an earlier embedder has embedded, by turns."""
        with closing(self._ingest(engine)) as ingest:
            for _ in ingest:
                yield
                if not self._pausing and self._reembedding.step():
                    yield
        while not self._pausing and not self._documents_queued and self._reembedding.step():
            yield

    def _ingest(self, engine: Engine) -> Generator[IngestStep, None, None]:
        """Ingest until nothing waits, step by step; tenants and jobs take turns (ingest/turns.py).

        Afterwards `_documents_queued` says whether another document may wait. A full disk or a locked catalogue ends
        the steps; the documents are tried again later.
        """
        with self._changed:
            self._documents_queued = False
        try:
            started = yield from self._ingest_turns.steps(engine)
        except CatalogCorrupt as error:
            self._ingest_fault = error
            logger.critical("ingest ends: %s", error)
            self.jobs.pause()
        except RagkvError as error:
            self._ingest_fault = error
            logger.warning("ingest waits: %s", error)
        else:
            if started:
                self._documents_queued = True

    def _wait(self, seconds: float) -> None:
        """Wait for something to do. seconds: until a question that waits goes on; infinite without one."""
        with self._changed:
            if seconds < IDLE_SECONDS:
                self._changed.wait(seconds)
                return
            self._changed.wait_for(
                lambda: self._queue or self._documents_queued or self._closing or self.catalog_service.has_unreferenced,
                IDLE_SECONDS,
            )


def _answer_by_rule(question: str, options: AskOptions, channel: AnswerChannel | None, engine: Engine) -> Answer:
    """Answer a question about the service itself.

    History and metrics do not have it: it was read from no chunk, and first tokens would look quicker than they are.
    """
    answer = engine.answer_by_rule(question, options)
    assert answer is not None, "the rules that queue a question are those that answer it"
    if channel is not None:
        channel.ruled()
    return answer
