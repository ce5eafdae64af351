"""Answering: the questions whose answers are being decoded, all of them together, a step at a time.

A future stays pending until its answer is there, so that whoever waits for it may cancel it at any time: before its
next step the request is let go of. So is one whose time is up.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from api.errors import fault_of
from api.runtime.answer_history import AnswerHistory, RecordedAnswer
from api.runtime.request_context import working_for
from api.runtime.request_queue import QueuedQuestion, QueuedTask, SessionName, reject, resolve
from ragkv.engine.batch import Batch, Event
from ragkv.engine.engine import Engine
from ragkv.engine.request import RequestState
from ragkv.errors import Expired
from ragkv.metrics.sums import MetricsRecorder
from ragkv.report import Answer, Report

logger = logging.getLogger("ragkv.api")


@dataclass
class _Open:
    question: QueuedQuestion
    request: RequestState
    seconds: float


class DecodeLoop:
    """Owned by the thread of the engine; the count may be read from any."""

    def __init__(self, engine: Engine, metrics: MetricsRecorder, history: AnswerHistory):
        """tally: told how each question ends · history: keeps the answers."""
        self._engine, self._metrics, self._history = engine, metrics, history
        self._batch = Batch(engine.model, engine.settings.batch, engine.settings.batch_bytes, engine.graph_decoder)
        self._open: dict[int, _Open] = {}

    @property
    def free(self) -> bool:
        """Whether another question may begin."""
        return self._batch.free

    @property
    def count(self) -> int:
        """Questions that were begun and are not answered."""
        return len(self._open)

    def answers_session(self, turn: SessionName | None) -> bool:
        """Whether a turn of this conversation is being answered."""
        return turn is not None and any(each.question.session == turn for each in self._open.values())

    def abandoned(self, what: QueuedQuestion | QueuedTask) -> bool:
        """Whether nobody waits for it any more, or may; counted, so to be asked no more when it is True."""
        if isinstance(what, QueuedQuestion):
            if time.monotonic() >= what.deadline:
                reject(what.future, Expired())
                self._metrics.ended("expired")
            elif what.future.cancelled():
                self._metrics.ended("cancelled")
        return what.future.done()

    def prefill(self, question: QueuedQuestion) -> None:
        """Read a question, up to its first token's logits."""
        started = time.monotonic()
        with working_for(question.context):
            try:
                begun = question.prefill(self._engine)
            except BaseException as error:
                self._fail(question, error)
                return
        question.context.timer = begun.timer
        id = self._batch.join(begun.sequence)
        self._open[id] = _Open(question, begun, time.monotonic() - started)
        if question.channel is not None:
            question.channel.prefilled(begun)

    def step(self) -> list[float]:
        """One token for all that run; returns the engine's time, in seconds, for each question that was answered."""
        for id, each in list(self._open.items()):
            if self.abandoned(each.question):
                self._batch.cancel(id)
                del self._open[id]
        if not self._open:
            return []
        started = time.monotonic()
        events = self._batch.step()
        share = (time.monotonic() - started) / max(1, len(events))
        taken = []
        for event in events:
            each = self._open[event.id]
            each.seconds += share
            if event.ended:
                taken.append(self._close(event))
            elif each.question.channel is not None:
                each.question.channel.publish(each.request.detokenizer.stable_text())
        return taken

    def clear(self) -> None:
        """Let go of all that is open."""
        self._batch.clear()
        self._open.clear()

    def _close(self, event: Event) -> float:
        each = self._open.pop(event.id)
        with working_for(each.question.context):
            if event.fault is not None:
                self._fail(each.question, event.fault)
            elif not self.abandoned(each.question):
                self._finish(each)
        return each.seconds

    def _finish(self, each: _Open) -> None:
        try:
            answer = self._engine.finalize(each.request)
        except BaseException as error:
            self._fail(each.question, error)
            return
        full_ms = _full(self._engine, answer.report)
        self._metrics.answered(answer.report, full_ms)
        self._record_answer(each, answer, full_ms)
        each.question.context.report = answer.report
        resolve(each.question.future, answer)

    def _record_answer(self, each: _Open, answer: Answer, full_ms: float) -> None:
        """Into the history, before whoever asked has the answer: he may look for it there at once."""
        question, talk = each.question, each.request.session
        if not self._history.limit or not question.context.id:
            return
        try:
            read = self._engine.map(each.request)
        except Exception:  # the answer is right without the picture of it
            logger.exception("an answer is not remembered: its map cannot be made")
            return
        whose = (question.context.id, question.tenant, talk.collection, talk.name)
        self._history.record(RecordedAnswer(*whose, answer, read, full_ms))

    def _fail(self, question: QueuedQuestion, error: BaseException) -> None:
        status = fault_of(error).status if isinstance(error, Exception) else 500
        if status == 500:  # where it went wrong is told with the response, if there is anybody to get one
            logger.error("a question failed: %s", type(error).__name__)
        self._metrics.ended("invalid" if status < 500 else "failed")
        reject(question.future, error)


def _full(engine: Engine, report: Report) -> float:
    """Milliseconds to the first token, had chunks and question been prefilled: estimated, its own retrieval included; 0
    where nothing was measured."""
    prefill = engine.costs.full(report.tokens.context + report.tokens.question)
    return report.timings_ms.retrieve + prefill if prefill else 0.0
