"""How an answer reaches who asked for it: the future and the channel of a request, the history and the counts.

A future stays pending until its answer is there, so that its client may cancel it at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ragkv.api.errors import fault_of
from ragkv.api.runtime.answer_channel import AnswerChannel
from ragkv.api.runtime.answer_history import AnswerHistory, RecordedAnswer
from ragkv.api.runtime.request_context import RequestContext, current, working_for
from ragkv.api.runtime.undelivered import AnswerOrigin, UndeliveredAnswers
from ragkv.engine.engine import Engine
from ragkv.engine.request import AnswerListener, KVMapOf, Request
from ragkv.engine.token_scores import TokenScore
from ragkv.errors import Expired
from ragkv.metrics.sums import MetricsRecorder
from ragkv.report import Answer

T = TypeVar("T")

Charge = Callable[[str, int], None]
"""Called with a tenant and the tokens that its question used: those of the prompt, later those of the answer."""

logger = logging.getLogger("ragkv.api")


def charge_nobody(tenant: str, tokens: int) -> None:
    """The default of `charge`: count nothing."""


@dataclass(frozen=True)
class QueuedTask:
    """Work for the engine that is no question.

    Attributes:
        work: Called with the engine.
        future: Receives what `work` returns.
        conversation: Collection and name of the conversation whose running answer the task waits for.
        tenant: The tenant whose request it is.
        context: Of the request.
    """

    work: Callable[[Engine], Any]
    future: Future[Any]
    conversation: tuple[str, str] | None = None
    tenant: str = ""
    context: RequestContext = field(default_factory=current)

    def gone(self) -> bool:
        """Return whether nobody waits any more."""
        return self.future.done()


@dataclass(frozen=True)
class AnswerRecords:
    """What a service keeps of its answers.

    Attributes:
        metrics: Counts how questions end.
        history: Keeps answers.
        undelivered: Knows which answers are outdated.
        charge: Counts tokens.
    """

    metrics: MetricsRecorder
    history: AnswerHistory
    undelivered: UndeliveredAnswers
    charge: Charge = charge_nobody


class Delivery(AnswerListener):
    """Delivers one answer.

    Attributes:
        future: Receives the answer.
        origin: Receives what the answer is read from.
    """

    def __init__(
        self,
        records: AnswerRecords,
        future: Future[Answer],
        tenant: str = "",
        channel: AnswerChannel | None = None,
        origin: AnswerOrigin | None = None,
    ):
        """Deliver to the request that asks now.

        Args:
            records: What the service keeps.
            future: Receives the answer.
            tenant: The tenant whose request it is.
            channel: Receives the progress of the answer.
            origin: Receives what the answer is read from.
        """
        self.future, self.origin = future, AnswerOrigin() if origin is None else origin
        self._records, self._tenant, self._channel = records, tenant, channel
        self._context = current()
        self._session = ("", "")

    @property
    def outdated(self) -> bool:  # type: ignore[override]
        """Whether a document that the answer is read from was deleted or replaced."""
        return self.origin.outdated

    @property
    def shown(self) -> bool:  # type: ignore[override]
        """Whether the client has seen a part of the answer."""
        return self._channel is not None and self._channel.retrieval is not None

    def working(self) -> AbstractContextManager[None]:
        """Return the context in which log lines carry the id of the request."""
        return working_for(self._context)

    def expired(self) -> None:
        """Fail the future: its deadline has passed."""
        reject(self.future, Expired())
        self._records.metrics.ended("expired", self._tenant)

    def gone(self) -> bool:
        """Return whether nobody waits any more. A cancelled question is counted each time, so it must be dropped."""
        if self.future.cancelled():
            self._records.metrics.ended("cancelled", self._tenant)
        return self.future.done()

    def prefilled(self, request: Request) -> None:
        """Publish that the question is prefilled, unless its documents have changed meanwhile."""
        self._context.timer = request.timer
        self._session = (request.session.collection, request.session.name)
        self._records.undelivered.add(self.origin, request.session.collection, request.session.rows)
        if self._channel is not None and not self.origin.outdated:
            self._channel.prefilled(request)

    def said(self, request: Request) -> None:
        """Publish the text so far. An answer that may be withheld is sent at its end, when its confidence is known."""
        if self._channel is not None and self.shown and request.options.abstain_below is None:
            text = request.detokenizer.stable_text()
            self._channel.publish(text, request.detokenizer.scores_of(text))

    def scored(self, tokens: Sequence[TokenScore]) -> None:
        """Keep the scores for the client."""
        if self._channel is not None:
            self._channel.tokens = tokens

    def used(self, tokens: int) -> None:
        """Charge the tenant."""
        self._records.charge(self._tenant, tokens)

    def answered(self, answer: Answer, full_ms: float, draw_map: KVMapOf) -> None:
        """Count, record and deliver the answer."""
        self._records.metrics.answered(answer.report, full_ms, self._tenant)
        self._record(answer, full_ms, draw_map)
        self._context.report = answer.report
        resolve(self.future, answer)

    def failed(self, error: BaseException) -> None:
        """Count the fault and deliver it."""
        status = fault_of(error).status if isinstance(error, Exception) else 500
        if status == 500:  # the traceback is logged with the response, if the client still waits for one
            logger.error("a question failed: %s", type(error).__name__)
        self._records.metrics.ended("invalid" if status < 500 else "failed", self._tenant)
        reject(self.future, error)

    def _record(self, answer: Answer, full_ms: float, draw_map: KVMapOf) -> None:
        """Record the answer in the history, before its client has it: the client may look for it at once."""
        history = self._records.history
        if not history.limit or not self._context.id:
            return
        try:
            kv_map = draw_map()
        except Exception:  # the answer is right without its map
            logger.exception("an answer is not recorded: its map cannot be made")
            return
        names = (self._context.id, self._tenant, *self._session)
        recorded = RecordedAnswer(*names, answer, kv_map, full_ms, self.origin.rows, origin=self._context.origin)
        history.record(recorded)


def resolve(future: Future[T], result: T) -> None:
    """Complete a future, unless it is done already: any thread may cancel or fail it at any time."""
    with suppress(InvalidStateError):
        future.set_result(result)


def reject(future: Future[Any], error: BaseException) -> None:
    """Fail a future, unless it is done already."""
    with suppress(InvalidStateError):
        future.set_exception(error)
