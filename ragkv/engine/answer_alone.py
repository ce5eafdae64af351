"""One question through the serving loop, with nothing beside it, as `ragkv ask` and MCP over stdio answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

from ragkv.engine.loop import AnswerEngine, ServingLoop
from ragkv.engine.request import AnswerListener, KVMapOf, Request
from ragkv.errors import Expired, Stopping
from ragkv.report import Answer
from ragkv.types import AskOptions


class _OnlyListener(AnswerListener):
    """Waits for the only answer of a loop.

    Attributes:
        answer: The answer, once it is there.
        error: Why there is none.
    """

    def __init__(self, stopped: Callable[[], bool]):
        """stopped: Called before every step; True drops the question."""
        self.answer: Answer | None = None
        self.error: BaseException | None = None
        self._stopped = stopped

    def expired(self) -> None:
        """Note that the deadline has passed."""
        self.error = Expired()

    def gone(self) -> bool:
        """Return whether the question was stopped or has expired."""
        return self.error is not None or self._stopped()

    def answered(self, answer: Answer, full_ms: float, draw_map: KVMapOf) -> None:
        """Keep the answer."""
        self.answer = answer

    def failed(self, error: BaseException) -> None:
        """Keep the error."""
        self.error = error


def answer_alone(
    engine: AnswerEngine,
    question: str,
    options: AskOptions,
    deadline: float = inf,
    stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Answer one question, with nothing beside it.

    Args:
        engine: The engine.
        question: The question.
        options: How it is asked.
        deadline: On the monotonic clock.
        stopped: Called before every step; True drops the question.

    Raises:
        RagkvError: What `Engine.prefill` raises; Expired; Outdated, where its documents change all the time; Stopping,
            after `stopped`.
    """
    listener, loop = _OnlyListener(stopped), ServingLoop(engine)
    loop.start(Request(question, options, listener, deadline=deadline))
    while loop.count:
        time.sleep(loop.idle_seconds)
        loop.step()
    if listener.error is not None:
        raise listener.error
    if listener.answer is None:
        raise Stopping("the question was dropped")
    return listener.answer
