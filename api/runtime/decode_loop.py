"""The questions that are being answered. Each step makes a token for every answer and runs passes of the questions that
are being prefilled (prefill_loop.py), in one forward where the batch allows it.

A future stays pending until its answer is there, so that its client may cancel it at any time. A request that was
cancelled, or whose deadline has passed, is dropped before the next step. So is one whose answer is outdated, because a
document that it was read from was deleted or replaced: it begins again, unless its client has seen some of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from api.errors import fault_of
from api.runtime.answer_history import AnswerHistory, RecordedAnswer
from api.runtime.prefill_loop import PrefillLoop
from api.runtime.request_context import working_for
from api.runtime.request_queue import QueuedQuestion, QueuedTask, SessionName, reject, resolve
from api.runtime.undelivered import UndeliveredAnswers
from ragkv.config import ServingSettings
from ragkv.engine.batch import Batch, Event
from ragkv.engine.engine import ATTEMPTS, Engine
from ragkv.engine.request import RequestState
from ragkv.errors import Expired, Outdated
from ragkv.metrics.sums import MetricsRecorder
from ragkv.report import Answer, Report

logger = logging.getLogger("ragkv.api")

Charge = Callable[[str, int], None]
"""Called with a tenant and the tokens that its question used: those of the prompt, later those of the answer."""


def charge_nobody(tenant: str, tokens: int) -> None:
    """The default of `charge`: count nothing."""


@dataclass
class _Running:
    """A question that is prefilled and not answered. seconds: of the engine's time that it took so far."""

    question: QueuedQuestion
    state: RequestState
    seconds: float


class DecodeLoop:
    """Prefills questions and decodes their answers, several together.

    Only the engine's thread may use it, except for `count`.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: MetricsRecorder,
        history: AnswerHistory,
        charge: Charge = charge_nobody,
        undelivered: UndeliveredAnswers | None = None,
    ):
        """Make an empty loop.

        Args:
            engine: The engine.
            metrics: Counts how questions end.
            history: Keeps answers.
            charge: Counts tokens.
            undelivered: Knows which answers are outdated; None looks after those of this loop alone.
        """
        self._undelivered = UndeliveredAnswers(engine.catalog) if undelivered is None else undelivered
        self._engine, self._metrics, self._history, self._charge = engine, metrics, history, charge
        serving = engine.settings.part(ServingSettings)
        self._batch = Batch(engine.model, serving.batch, serving.batch_bytes, engine.graph_decoder)
        self._prefills = PrefillLoop(engine, self._join, self._fail)
        self._running: dict[int, _Running] = {}

    @property
    def free(self) -> bool:
        """Whether there is room for another question.

        Its memory is not known before it begins, so one more may begin than fits.
        """
        batch, prefills = self._batch, self._prefills
        if not batch.free or batch.running + prefills.count >= batch.limit:
            return False
        return not prefills.count or batch.held + prefills.bytes < batch.bytes

    @property
    def count(self) -> int:
        """Number of questions that are started and not answered."""
        return self._prefills.count + len(self._running)

    @property
    def idle_seconds(self) -> float:
        """Seconds until a step has something to do, 0 when it has now; infinite without a question."""
        return 0.0 if self._running else self._prefills.idle_seconds

    def answers_session(self, session: SessionName | None) -> bool:
        """Whether a question of this conversation is being answered."""
        if session is None:
            return False
        running = any(each.question.session == session for each in self._running.values())
        return running or self._prefills.reads_session(session)

    def abandoned(self, request: QueuedQuestion | QueuedTask) -> bool:
        """Whether nobody waits for the request any more. An expired question is rejected here.

        Each True is counted in the metrics, so the caller must drop the request then.
        """
        if isinstance(request, QueuedQuestion):
            if time.monotonic() >= request.deadline:
                reject(request.future, Expired())
                self._metrics.ended("expired", request.tenant)
            elif request.future.cancelled():
                self._metrics.ended("cancelled", request.tenant)
        return request.future.done()

    def start(self, question: QueuedQuestion, following: Sequence[str] = ()) -> None:
        """Begin to prefill a question. The steps prefill it up to the logits of its first token, and then decode.

        Args:
            question: The question.
            following: Questions that are likely to begin next. They are embedded together with this one.
        """
        self._prefills.start(question, following)

    def _join(self, question: QueuedQuestion, state: RequestState, seconds: float) -> None:
        """Add a prefilled question to the batch."""
        question.context.timer = state.timer
        context = sum(len(hit.chunk.tokens) for hit in state.hits)
        self._charge(question.tenant, context + len(state.question_tokens))
        id = self._batch.join(state.sequence)
        self._running[id] = _Running(question, state, seconds)
        self._undelivered.add(question.origin, state.session.collection, state.session.rows)
        if question.channel is not None and not question.origin.outdated:
            question.channel.prefilled(state)

    def step(self) -> list[float]:
        """Run a forward of prefills and of the latest tokens of all answers; sample the next token of each.

        A token is published before its pass runs, and an answer ends before the next forward.

        Returns:
            The engine's time, in seconds, for each question that was answered in this step.
        """
        self._drop()
        company, rows = self._prefills.next_company(self._batch.running), self._batch.running
        started = time.monotonic()
        events = self._batch.forward(company)
        seconds = time.monotonic() - started
        beside = 0.0 if company.logits is None else seconds * company.rows / (company.rows + rows)
        if company.passes:
            self._prefills.accept(company, beside)
        started = time.monotonic()
        events += self._batch.sample()
        share = (seconds - beside + time.monotonic() - started) / max(1, len(events))
        return [taken for event in events if (taken := self._take(event, share)) is not None]

    def _drop(self) -> None:
        """Drop the questions that nobody waits for any more, and those whose answers are outdated."""
        self._prefills.drop(self.abandoned)
        for id, each in list(self._running.items()):
            abandoned = self.abandoned(each.question)
            if abandoned or each.question.origin.outdated:
                self._charge(each.question.tenant, len(each.state.sequence.tokens))
                self._batch.cancel(id)
                del self._running[id]
                if not abandoned:
                    self._fail(each.question, Outdated())

    def _take(self, event: Event, share: float) -> float | None:
        """Publish a token, or end an answer and return the engine's time for it. share: time that the event took."""
        each = self._running[event.id]
        each.seconds += share
        if event.ended:
            return self._end(event)
        channel = each.question.channel
        if channel is not None and channel.retrieval is not None and each.question.options.abstain_below is None:
            # An answer that may be withheld is sent when its confidence is known, at its end.
            channel.publish(each.state.detokenizer.stable_text())
        return None

    def clear(self) -> None:
        """Drop all questions."""
        self._prefills.clear()
        self._batch.clear()
        self._running.clear()

    def _end(self, event: Event) -> float:
        each = self._running.pop(event.id)
        self._charge(each.question.tenant, len(each.state.sequence.tokens))
        with working_for(each.question.context):
            if event.fault is not None:
                self._fail(each.question, event.fault)
            elif not self.abandoned(each.question):
                self._finalize(each)
        return each.seconds

    def _finalize(self, each: _Running) -> None:
        try:
            answer = self._engine.finalize(each.state)
        except BaseException as error:
            self._fail(each.question, error)
            return
        full_ms = _full_recompute_ms(self._engine, answer.report)
        self._metrics.answered(answer.report, full_ms, each.question.tenant)
        self._record_answer(each, answer, full_ms)
        each.question.context.report = answer.report
        resolve(each.question.future, answer)

    def _record_answer(self, each: _Running, answer: Answer, full_ms: float) -> None:
        """Record the answer in the history, before its client has it: the client may look for it at once."""
        question, session = each.question, each.state.session
        if not self._history.limit or not question.context.id:
            return
        try:
            kv_map = self._engine.map(each.state)
        except Exception:  # the answer is right without its map
            logger.exception("an answer is not recorded: its map cannot be made")
            return
        names = (question.context.id, question.tenant, session.collection, session.name)
        self._history.record(RecordedAnswer(*names, answer, kv_map, full_ms, question.origin.rows))

    def _fail(self, question: QueuedQuestion, error: BaseException) -> None:
        shown = question.channel is not None and question.channel.retrieval is not None
        if isinstance(error, Outdated) and not shown and question.origin.attempts < ATTEMPTS:
            self._prefills.start(question)
            return
        error = self._engine.free_memory(error)
        status = fault_of(error).status if isinstance(error, Exception) else 500
        if status == 500:  # the traceback is logged with the response, if the client still waits for one
            logger.error("a question failed: %s", type(error).__name__)
        self._metrics.ended("invalid" if status < 500 else "failed", question.tenant)
        reject(question.future, error)


def _full_recompute_ms(engine: Engine, report: Report) -> float:
    """Estimate the milliseconds to the first token with full recompute, retrieval included; 0 without measurements."""
    prefill = engine.costs.full(report.tokens.context + report.tokens.question)
    return report.timings_ms.retrieve + prefill if prefill else 0.0
