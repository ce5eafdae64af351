"""The questions that are being prefilled. A step runs the next pass of several of them in one forward.

A question alone has few rows, so its passes take about as long as those of several together: the weights are read once.
The passes run in the order in which the questions began, as many at once as have `Engine.group_tokens` rows together;
one that has more runs by itself. So a running answer waits for one forward of bounded size, not for a whole prefill.

A question that waits for a chunk which another process is encoding pauses (`Pause`), and the others go on.

Where it can, that forward is the one that decodes the running answers (`Company`). A budget of tokens for steps that
decode and prefill is Sarathi-Serve's (Agrawal et al., OSDI 2024, arXiv 2403.02310); vLLM schedules likewise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from torch import Tensor

from api.runtime.request_context import working_for
from api.runtime.request_queue import QueuedQuestion, SessionName
from ragkv.engine.decoding import Company
from ragkv.engine.engine import Engine
from ragkv.engine.passes import Passes, Pause
from ragkv.engine.request import RequestState
from ragkv.model.layer_pass import Pass

logger = logging.getLogger("ragkv.api")

Prefilled = Callable[[QueuedQuestion, RequestState, float], None]
"""Receives a question that is prefilled, its state, and the seconds of the engine's time that it took."""

Failed = Callable[[QueuedQuestion, BaseException], None]
"""Receives a question that cannot be prefilled, and why."""


@dataclass(eq=False)
class _Prefilling:
    """A question that is being prefilled.

    Attributes:
        question: The question.
        passes: Where its passes come from.
        next: Its next pass, or what it waits for; None before its first.
        seconds: Of the engine's time that it took so far.
        alone: Whether its passes run in no forward of others: one that it was in has failed.
    """

    question: QueuedQuestion
    passes: Passes[RequestState]
    next: Pass | Pause | None = None
    seconds: float = 0.0
    alone: bool = False

    @property
    def rows(self) -> int:
        """Rows of the next pass."""
        return len(self.next.tokens) if isinstance(self.next, Pass) else 0

    @property
    def bytes(self) -> int:
        """Bytes of the cache."""
        return self.next.cache.bytes if isinstance(self.next, Pass) else 0

    @property
    def idle_seconds(self) -> float:
        """Seconds until it goes on, 0 when it can go on now."""
        return self.next.seconds if isinstance(self.next, Pause) else 0.0


class PrefillLoop:
    """Prefills questions together. Only the engine's thread may use it, except for `count`."""

    def __init__(self, engine: Engine, prefilled: Prefilled, failed: Failed):
        """Make an empty loop that hands questions over to `prefilled` or `failed`."""
        self._engine, self._prefilled, self._failed = engine, prefilled, failed
        self._started: list[_Prefilling] = []
        self._group: list[_Prefilling] = []

    @property
    def count(self) -> int:
        """Number of questions that are started and not prefilled."""
        return len(self._started)

    @property
    def bytes(self) -> int:
        """Bytes of the caches of these questions."""
        return sum(each.bytes for each in self._started)

    @property
    def idle_seconds(self) -> float:
        """Seconds for which all questions pause, 0 when one of them can go on now; infinite without any."""
        return min((each.idle_seconds for each in self._started), default=inf)

    def reads_session(self, session: SessionName) -> bool:
        """Whether a question of this conversation is being prefilled."""
        return any(each.question.session == session for each in self._started)

    def start(self, question: QueuedQuestion, following: Sequence[str] = ()) -> None:
        """Do what comes before the first pass of a question; all of it, where recorded graphs run its passes.

        Args:
            question: The question.
            following: Questions that are likely to begin next.
        """
        with suppress(Exception):  # what goes wrong is raised again, for the question whose search it hinders
            self._engine.retriever.embed_ahead([question.question, *following])
        self._started.append(_Prefilling(question, self._engine.prefill_passes(question.question, question.options)))
        self._resume(self._started[-1], None)

    def drop(self, abandoned: Callable[[QueuedQuestion], bool]) -> None:
        """Drop the questions that nobody waits for any more."""
        gone = [each for each in self._started if abandoned(each.question)]
        for each in gone:
            self._started.remove(each)
            each.passes.close()

    def next_company(self, rows: int) -> Company:
        """Return the next passes of the questions that began first; give them to `accept` before the next call.

        Questions whose pause is over are resumed before.

        Args:
            rows: Rows that run in the same forward.
        """
        for each in [each for each in self._started if isinstance(each.next, Pause) and not each.idle_seconds]:
            self._resume(each, None)
        self._group = self._next_group(rows)
        passes = {id(each.next): each.next for each in self._group if isinstance(each.next, Pass)}
        return Company(list(passes.values()), any(each.alone for each in self._group))

    def accept(self, company: Company, seconds: float) -> None:
        """Go on with the questions whose passes are `company`. Where they did not run, they run now.

        Args:
            company: What the last call of `next_company` returned.
            seconds: Of the engine's time that its passes took, if they ran.
        """
        group, self._group = self._group, []
        if company.fault is not None:
            self._begin_again(group)
            return
        logits = company.logits
        if logits is None:
            started = time.monotonic()
            try:
                logits = self._engine.model.forward(company.passes)
            except Exception as error:
                self._fail_or_begin_again(group, error)
                return
            seconds = time.monotonic() - started
        found = {id(each): rows for each, rows in zip(company.passes, logits, strict=True)}
        for each in group:
            each.seconds += seconds / len(group)
            self._resume(each, found[id(each.next)])

    def clear(self) -> None:
        """Drop all questions."""
        self.drop(lambda question: True)

    def _next_group(self, rows: int) -> list[_Prefilling]:
        """Return the questions, in the order in which they began, whose next passes fit into a forward beside `rows`.

        Those that wait for the same chunk to be encoded have the same pass. It runs once, so all of them are returned.
        A question that runs alone comes with no others but these.
        """
        group, passes = list[_Prefilling](), set[int]()
        for each in self._started:
            if not isinstance(each.next, Pass):
                continue
            if id(each.next) not in passes:
                rows += each.rows
                if group and (each.alone or group[0].alone or rows > self._engine.group_tokens):
                    break
                passes.add(id(each.next))
            group.append(each)
        return [*group, *(each for each in self._started if id(each.next) in passes and each not in group)]

    def _resume(self, each: _Prefilling, logits: Tensor | None) -> None:
        """Go on to the next pass of a question, to a pause, or to its end.

        Args:
            each: The question.
            logits: Of its latest pass; None before the first and after a pause.
        """
        started = time.monotonic()
        with working_for(each.question.context):
            try:
                each.next = next(each.passes) if logits is None else each.passes.send(logits)
            except StopIteration as end:
                self._end(each, end.value, time.monotonic() - started)
            except BaseException as error:
                self._started.remove(each)
                self._failed(each.question, error)
            else:
                each.seconds += time.monotonic() - started

    def _end(self, each: _Prefilling, state: RequestState, seconds: float) -> None:
        """Hand a prefilled question over. seconds: of the engine's time since the last that were counted."""
        self._started.remove(each)
        self._prefilled(each.question, state, each.seconds + seconds)

    def _fail_or_begin_again(self, group: list[_Prefilling], error: Exception) -> None:
        """End the questions whose forward failed. If it was of several, the fault is of one: they begin again."""
        shared = len({id(asked.next) for asked in group}) > 1
        failed = [asked for asked in group if asked.alone or not shared]
        for asked in failed:
            asked.passes.close()
            self._started.remove(asked)
            self._failed(asked.question, error)
        self._begin_again([asked for asked in group if asked not in failed])

    def _begin_again(self, group: list[_Prefilling]) -> None:
        """Prefill the questions of a forward that failed once more, each alone.

        What a pass that broke off wrote is dropped with its cache.
        """
        for asked in group:
            asked.passes.close()
        for asked in group:
            asked.alone, asked.next = True, None
            asked.passes = self._engine.prefill_passes(asked.question.question, asked.question.options)
            self._resume(asked, None)
