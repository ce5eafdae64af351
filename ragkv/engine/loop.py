"""The serving loop: questions are prefilled together and their answers decoded together. It drives every question.

A step makes a token for every answer and runs the next passes of the questions that are being prefilled, in one forward
where the batch allows it (`PrefillGroup`). scheduler.py chooses those passes. A question that waits for a chunk which
another process is encoding pauses (`Pause`), and the others go on.

A request that nobody waits for, or whose deadline has passed, is dropped before the next step. So is one whose answer
is outdated, because a document that it was read from was deleted or replaced: it begins again, unless somebody has seen
some of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Protocol

from torch import Tensor

from ragkv.config import ServingSettings, Settings
from ragkv.engine.batch import Batch, Event
from ragkv.engine.cost_model import CostModel
from ragkv.engine.decoding import PrefillGroup
from ragkv.engine.kv_map import KVMap
from ragkv.engine.passes import Passes, Pause
from ragkv.engine.request import Request
from ragkv.engine.scheduler import next_group
from ragkv.errors import Outdated
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder
from ragkv.model.layer_pass import Pass
from ragkv.report import Answer, Report
from ragkv.retrieval import Retriever

ATTEMPTS = 3
"""How often a question is prefilled, where documents that it read are deleted or replaced meanwhile."""


class AnswerEngine(Protocol):
    """What the loop needs of the engine (engine.py)."""

    settings: Settings
    model: DecoderModel
    graph_decoder: GraphDecoder | None
    retriever: Retriever
    group_tokens: int

    @property
    def costs(self) -> CostModel: ...

    def prefill_passes(self, request: Request) -> Passes[Request]: ...

    def finalize(self, request: Request) -> Answer: ...

    def map(self, request: Request) -> KVMap: ...

    def free_memory(self, error: BaseException) -> BaseException: ...


class ServingLoop:
    """Prefills questions and decodes their answers, several together.

    Only the engine's thread may use it, except for `count`.
    """

    def __init__(self, engine: AnswerEngine, clock: Callable[[], float] = time.monotonic):
        """Make an empty loop. clock: that of the deadlines."""
        self._engine, self._clock = engine, clock
        serving = engine.settings.part(ServingSettings)
        self._batch = Batch(engine.model, serving.batch, serving.batch_bytes, engine.graph_decoder)
        self._started = list[Request]()
        self._running = dict[int, Request]()

    @property
    def free(self) -> bool:
        """Whether there is room for another question.

        Its memory is not known before it begins, so one more may begin than fits.
        """
        batch, started = self._batch, self._started
        if not batch.free or batch.running + len(started) >= batch.limit:
            return False
        return not started or batch.held + sum(request.bytes for request in started) < batch.bytes

    @property
    def count(self) -> int:
        """Number of questions that are started and not answered."""
        return len(self._started) + len(self._running)

    @property
    def idle_seconds(self) -> float:
        """Seconds until a step has something to do, 0 when it has now; infinite without a question."""
        if self._running:
            return 0.0
        return min((request.idle_seconds for request in self._started), default=inf)

    def has_conversation(self, conversation: tuple[str, str] | None) -> bool:
        """Whether a question of this conversation is being answered."""
        if conversation is None:
            return False
        return any(request.conversation == conversation for request in (*self._started, *self._running.values()))

    def abandoned(self, request: Request) -> bool:
        """Whether nobody waits for the request any more. Its listener hears of a deadline that has passed."""
        if self._clock() >= request.deadline:
            request.listener.expired()
            return True
        return request.listener.gone()

    def start(self, request: Request, following: Sequence[str] = ()) -> None:
        """Do what comes before the first pass of a question; all of it, where recorded graphs run its passes.

        Args:
            request: The question.
            following: Questions that are likely to begin next. They are embedded together with this one.
        """
        with suppress(Exception):  # what goes wrong is raised again, for the question whose search it hinders
            self._engine.retriever.embed_ahead([request.question, *following])
        request.work, request.next = self._engine.prefill_passes(request), None
        self._started.append(request)
        self._resume(request, None)

    def step(self) -> list[float]:
        """Run a forward of prefills and of the latest tokens of all answers; sample the next token of each.

        A token is published before its pass runs, and an answer ends before the next forward.

        Returns:
            The engine's time, in seconds, for each question that was answered in this step.
        """
        self._drop()
        requests, group, rows = *self._next_group(), self._batch.running
        started = time.monotonic()
        events = self._batch.forward(group)
        seconds = time.monotonic() - started
        beside = 0.0 if group.logits is None else seconds * group.rows / (group.rows + rows)
        if requests:
            self._go_on(requests, group, beside)
        started = time.monotonic()
        events += self._batch.sample()
        share = (seconds - beside + time.monotonic() - started) / max(1, len(events))
        return [taken for event in events if (taken := self._take(event, share)) is not None]

    def clear(self) -> None:
        """Drop all questions."""
        for request in self._started:
            request.work.close()
        self._started.clear()
        self._batch.clear()
        self._running.clear()

    def _drop(self) -> None:
        """Drop the questions that nobody waits for any more, and those whose answers are outdated."""
        for request in [request for request in self._started if self.abandoned(request)]:
            self._started.remove(request)
            request.work.close()
        for id, request in list(self._running.items()):
            abandoned = self.abandoned(request)
            if abandoned or request.listener.outdated:
                request.listener.used(len(request.sequence.tokens))
                self._batch.cancel(id)
                del self._running[id]
                if not abandoned:
                    self._fail(request, Outdated())

    def _next_group(self) -> tuple[list[Request], PrefillGroup]:
        """Return the requests whose passes run next, and those passes. Requests whose pause is over go on before."""
        for request in list(self._started):
            if isinstance(request.next, Pause) and not request.idle_seconds:
                self._resume(request, None)
        requests = next_group(self._started, self._batch.running, self._engine.group_tokens)
        passes = {request.pass_id: request.next for request in requests if isinstance(request.next, Pass)}
        return requests, PrefillGroup(list(passes.values()), any(request.alone for request in requests))

    def _go_on(self, requests: list[Request], group: PrefillGroup, seconds: float) -> None:
        """Go on with the requests of a group. Where its passes did not run beside the answers, they run now.

        Args:
            requests: Those whose passes are in the group.
            group: The passes.
            seconds: Of the engine's time that they took, if they ran.
        """
        if group.fault is not None:
            self._begin_again(requests)
            return
        logits = group.logits
        if logits is None:
            started = time.monotonic()
            try:
                logits = self._engine.model.forward(group.passes)
            except Exception as error:
                self._fail_or_begin_again(requests, error)
                return
            seconds = time.monotonic() - started
        rows_of = {id(done): rows for done, rows in zip(group.passes, logits, strict=True)}
        for request in requests:
            request.seconds += seconds / len(requests)
            self._resume(request, rows_of[request.pass_id])

    def _resume(self, request: Request, logits: Tensor | None) -> None:
        """Go on to the next pass of a question, to a pause, or to its end.

        Args:
            request: The question.
            logits: Of its latest pass; None before the first and after a pause.
        """
        began, error, ended = time.monotonic(), None, False
        with request.listener.working():
            try:
                request.next = next(request.work) if logits is None else request.work.send(logits)
            except StopIteration:
                request.next, ended = None, True
            except BaseException as raised:
                error = raised
            request.seconds += time.monotonic() - began
            if ended:
                self._started.remove(request)
                self._join(request)
            elif error is not None:
                self._started.remove(request)
                self._fail(request, error)

    def _join(self, request: Request) -> None:
        """Add a prefilled question to the batch."""
        request.attempts += 1
        request.listener.used(sum(len(hit.chunk.tokens) for hit in request.hits) + len(request.question_tokens))
        self._running[self._batch.join(request.sequence)] = request
        request.listener.prefilled(request)

    def _fail_or_begin_again(self, requests: list[Request], error: Exception) -> None:
        """End the questions whose forward failed. If it was of several, the fault is of one: they begin again."""
        shared = len({request.pass_id for request in requests}) > 1
        failed = [request for request in requests if request.alone or not shared]
        for request in failed:
            request.work.close()
            self._started.remove(request)
            self._fail(request, error)
        self._begin_again([request for request in requests if request not in failed])

    def _begin_again(self, requests: list[Request]) -> None:
        """Prefill the questions of a forward that failed once more, each alone.

        What a pass that broke off wrote is dropped with its cache.
        """
        for request in requests:
            request.work.close()
        for request in requests:
            request.alone, request.next, request.work = True, None, self._engine.prefill_passes(request)
            self._resume(request, None)

    def _take(self, event: Event, share: float) -> float | None:
        """Publish a token, or end an answer and return the engine's time for it. share: time that the event took."""
        request = self._running[event.id]
        request.seconds += share
        if not event.ended:
            request.listener.said(request)
            return None
        request.listener.used(len(request.sequence.tokens))
        with request.listener.working():
            if event.fault is not None:
                self._fail(request, event.fault)
            elif not self.abandoned(request):
                self._finalize(request)
        del self._running[event.id]  # last, so that an answer which runs no more is there
        return request.seconds

    def _finalize(self, request: Request) -> None:
        try:
            answer = self._engine.finalize(request)
        except BaseException as error:
            self._fail(request, error)
            return
        full_ms = _full_recompute_ms(self._engine, answer.report)
        if not answer.report.abstained:
            request.listener.scored(request.detokenizer.scores_of(request.detokenizer.text.strip()))
        request.listener.answered(answer, full_ms, lambda: self._engine.map(request))

    def _fail(self, request: Request, error: BaseException) -> None:
        if isinstance(error, Outdated) and not request.listener.shown and request.attempts < ATTEMPTS:
            self.start(request)
        else:
            request.listener.failed(self._engine.free_memory(error))


def _full_recompute_ms(engine: AnswerEngine, report: Report) -> float:
    """Estimate the milliseconds to the first token with full recompute, retrieval included; 0 without measurements."""
    prefill = engine.costs.full(report.tokens.context + report.tokens.question)
    return report.timings_ms.retrieve + prefill if prefill else 0.0
