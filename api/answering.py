"""Answering: the questions whose answers are being decoded, all of them together, a step at a time.

A future stays pending until its answer is there, so that whoever waits for it may cancel it at any time: before its
next step the request is let go of. So is one whose time is up.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from api.account import at_work
from api.errors import fault_of
from api.history import History, Remembered
from api.line import Question, Task, Turn, fail, give
from ragkv.batch import Batch, Event
from ragkv.begun import Begun
from ragkv.engine import Engine
from ragkv.errors import Expired
from ragkv.report import Answer, Report
from ragkv.tally import Tally

logger = logging.getLogger("ragkv.api")


@dataclass
class _Open:
    question: Question
    begun: Begun
    seconds: float


class Answering:
    """Owned by the thread of the engine; the count may be read from any."""

    def __init__(self, engine: Engine, tally: Tally, history: History):
        """tally: told how each question ends · history: keeps the answers."""
        self._engine, self._tally, self._history = engine, tally, history
        self._batch = Batch(engine.model, engine.settings.batch, engine.settings.batch_bytes, engine.steps)
        self._open: dict[int, _Open] = {}

    @property
    def free(self) -> bool:
        """Whether another question may begin."""
        return self._batch.free

    @property
    def count(self) -> int:
        """Questions that were begun and are not answered."""
        return len(self._open)

    def has(self, turn: Turn | None) -> bool:
        """Whether a turn of this conversation is being answered."""
        return turn is not None and any(each.question.turn == turn for each in self._open.values())

    def gone(self, what: Question | Task) -> bool:
        """Whether nobody waits for it any more, or may; counted, so to be asked no more when it is True."""
        if isinstance(what, Question):
            if time.monotonic() >= what.deadline:
                fail(what.done, Expired())
                self._tally.ended("expired")
            elif what.done.cancelled():
                self._tally.ended("cancelled")
        return what.done.done()

    def begin(self, question: Question) -> None:
        """Read a question, up to its first token's logits."""
        started = time.monotonic()
        with at_work(question.account):
            try:
                begun = question.begin(self._engine)
            except BaseException as error:
                self._fail(question, error)
                return
        question.account.watch = begun.watch
        id = self._batch.join(begun.run)
        self._open[id] = _Open(question, begun, time.monotonic() - started)
        if question.progress is not None:
            question.progress.began(begun)

    def step(self) -> list[float]:
        """One token for all that run; returns the engine's time, in seconds, for each question that was answered."""
        for id, each in list(self._open.items()):
            if self.gone(each.question):
                self._batch.leave(id)
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
            elif each.question.progress is not None:
                each.question.progress.said(each.begun.speech.sure())
        return taken

    def clear(self) -> None:
        """Let go of all that is open."""
        self._batch.clear()
        self._open.clear()

    def _close(self, event: Event) -> float:
        each = self._open.pop(event.id)
        with at_work(each.question.account):
            if event.fault is not None:
                self._fail(each.question, event.fault)
            elif not self.gone(each.question):
                self._finish(each)
        return each.seconds

    def _finish(self, each: _Open) -> None:
        try:
            answer = self._engine.finish(each.begun)
        except BaseException as error:
            self._fail(each.question, error)
            return
        full_ms = _full(self._engine, answer.report)
        self._tally.answered(answer.report, full_ms)
        self._remember(each, answer, full_ms)
        each.question.account.report = answer.report
        give(each.question.done, answer)

    def _remember(self, each: _Open, answer: Answer, full_ms: float) -> None:
        """Into the history, before whoever asked has the answer: he may look for it there at once."""
        question, talk = each.question, each.begun.talk
        if not self._history.limit or not question.account.id:
            return
        try:
            read = self._engine.map(each.begun)
        except Exception:  # the answer is right without the picture of it
            logger.exception("an answer is not remembered: its map cannot be made")
            return
        whose = (question.account.id, question.tenant, talk.collection, talk.name)
        self._history.record(Remembered(*whose, answer, read, full_ms))

    def _fail(self, question: Question, error: BaseException) -> None:
        status = fault_of(error).status if isinstance(error, Exception) else 500
        if status == 500:  # where it went wrong is told with the response, if there is anybody to get one
            logger.error("a question failed: %s", type(error).__name__)
        self._tally.ended("invalid" if status < 500 else "failed")
        fail(question.done, error)


def _full(engine: Engine, report: Report) -> float:
    """Milliseconds to the first token, had chunks and question been prefilled: estimated, its own retrieval included; 0
    where nothing was measured."""
    prefill = engine.costs.full(report.tokens.context + report.tokens.question)
    return report.timings_ms.retrieve + prefill if prefill else 0.0
