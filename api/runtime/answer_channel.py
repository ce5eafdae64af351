"""The progress of one answer: the engine's thread writes it, and the event loop of the client's request reads it.

A channel holds the newest state and no list of events, so it is never larger than the answer, however slowly the client
reads. All text that came since the last look is then one piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ragkv.engine.request import Request
from ragkv.engine.token_scores import TokenScore
from ragkv.passages import Citation

PREFILL_STEPS = ("retrieve", "open", "plan", "load", "repair", "prefill")
"""Steps whose time is known once a question is prefilled."""


@dataclass(frozen=True)
class RetrievalDone:
    """What is known once a question is prefilled.

    Attributes:
        citations: The citations of the answer.
        timings_ms: Milliseconds of each step so far, named as in the report.
    """

    citations: tuple[Citation, ...]
    timings_ms: dict[str, float]


class AnswerChannel:
    """The progress of the answer to one question.

    Attributes:
        news: Set in the event loop whenever the state changed.
        retrieval: What is known once the question is prefilled; None before.
        said: The part of the answer that no later token changes, and the scores of its tokens, where they are asked
            for.
        tokens: Scores of the tokens of the whole answer, once it is there.
    """

    def __init__(self, listening: bool = True) -> None:
        """Make a channel in the event loop that reads it.

        Args:
            listening: Whether somebody reads the progress. Otherwise the client sees nothing before the answer.
        """
        self.news = asyncio.Event()
        self.retrieval: RetrievalDone | None = None
        self.said: tuple[str, Sequence[TokenScore]] = ("", ())
        self.tokens: Sequence[TokenScore] = ()
        self._listening = listening
        self._loop = asyncio.get_running_loop()
        self._notified = False

    @property
    def text(self) -> str:
        """The part of the answer that no later token changes."""
        return self.said[0]

    def prefilled(self, request: Request) -> None:
        """Publish that the question is prefilled."""
        times = {name: request.timer.elapsed(name) for name in PREFILL_STEPS}
        self._retrieved(RetrievalDone(request.citations, times))

    def ruled(self) -> None:
        """Publish that a rule answers: nothing is retrieved or prefilled."""
        self._retrieved(RetrievalDone((), dict.fromkeys(PREFILL_STEPS, 0.0)))

    def _retrieved(self, retrieval: RetrievalDone) -> None:
        if self._listening:
            self.retrieval = retrieval
            self.notify()

    def publish(self, text: str, tokens: Sequence[TokenScore] = ()) -> None:
        """Publish the text of the answer so far, and the scores of its tokens."""
        if text != self.text:
            self.said = text, tokens
            self.notify()

    def notify(self) -> None:
        """Set `news`, from any thread. Until the loop acknowledges, it is called only once."""
        if not self._notified:
            self._notified = True
            with suppress(RuntimeError):  # the loop is closed, so nobody listens any more
                self._loop.call_soon_threadsafe(self.news.set)

    def acknowledge(self) -> None:
        """Clear `news`. The reader looks at the state next; whatever changes afterwards notifies again."""
        self.news.clear()
        self._notified = False
