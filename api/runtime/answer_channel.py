"""Progress: how far the answer to one question is. The engine's thread writes it, the loop of who asked reads it.

It holds the newest state and no list of events, so it stays as small as the answer however slowly somebody reads: what
was said since he last looked is one piece then.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from ragkv.engine.request import RequestState
from ragkv.report import Citation

KNOWN = ("retrieve", "open", "plan", "load", "repair", "prefill")
"""Steps whose time is known when a question was read."""


@dataclass(frozen=True)
class RetrievalDone:
    """What is known when a question was read. timings_ms: of the report's, those of the steps so far."""

    citations: tuple[Citation, ...]
    timings_ms: dict[str, float]


class AnswerChannel:
    """Of one question. news: set in its loop whenever there is something new.

    retrieval: once the question was read · text: of the answer so far, what no later token changes.
    """

    def __init__(self) -> None:
        """Made in the loop that is to be told."""
        self.news = asyncio.Event()
        self.retrieval: RetrievalDone | None = None
        self.text = ""
        self._loop = asyncio.get_running_loop()
        self._notified = False

    def prefilled(self, request: RequestState) -> None:
        """The question was read."""
        self.retrieval = RetrievalDone(request.citations, {name: request.timer.elapsed(name) for name in KNOWN})
        self.notify()

    def publish(self, text: str) -> None:
        """The answer goes on."""
        if text != self.text:
            self.text = text
            self.notify()

    def notify(self) -> None:
        """There is something new. From any thread; a loop that does not listen is called once, not over and over."""
        if not self._notified:
            self._notified = True
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self.news.set)

    def acknowledge(self) -> None:
        """What is new is looked at next: whatever comes after this rings again."""
        self.news.clear()
        self._notified = False
