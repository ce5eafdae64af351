"""The progress of one answer: the engine's thread writes it, and the event loop of the client's request reads it.

A channel holds the newest state and no list of events, so it is never larger than the answer, however slowly the client
reads. All text that came since the last look is then one piece.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from ragkv.engine.request import Request
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
        text: The part of the answer that no later token changes.
    """

    def __init__(self) -> None:
        """Make a channel in the event loop that reads it."""
        self.news = asyncio.Event()
        self.retrieval: RetrievalDone | None = None
        self.text = ""
        self._loop = asyncio.get_running_loop()
        self._notified = False

    def prefilled(self, request: Request) -> None:
        """Publish that the question is prefilled."""
        self.retrieval = RetrievalDone(request.citations, {name: request.timer.elapsed(name) for name in PREFILL_STEPS})
        self.notify()

    def ruled(self) -> None:
        """Publish that a rule answers: nothing is retrieved or prefilled."""
        self.retrieval = RetrievalDone((), dict.fromkeys(PREFILL_STEPS, 0.0))
        self.notify()

    def publish(self, text: str) -> None:
        """Publish the text of the answer so far."""
        if text != self.text:
            self.text = text
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
