"""Asking: a question as the loop of the service sees it, until its answer is there, its client has gone, or its time is
up. Where any of these ends the waiting, the engine lets go of the question before its next step.

    await asking.whole()                        the answer; or, as it comes:
    await asking.begun()                        the question was read, or refused
    async for piece in asking.pieces(): …       the text
    asking.answer()                             and whole
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from starlette.types import Receive

from api.errors import Gone
from api.runtime.answer_channel import AnswerChannel, RetrievalDone
from api.runtime.engine_thread import EngineThread
from api.runtime.request_queue import SessionName
from ragkv.engine.engine import Engine
from ragkv.engine.request import RequestState
from ragkv.errors import Expired
from ragkv.report import Answer

KEEP_ALIVE = 10.0
"""Seconds of silence after which a stream shows that it lives: less than what proxies wait."""


class AnswerStream:
    """See the module. Of one request, in one loop."""

    def __init__(
        self,
        worker: EngineThread,
        receive: Receive,
        begin: Callable[[Engine], RequestState],
        turn: SessionName | None,
        tenant: str,
        seconds: float,
        listening: bool,
    ):
        """receive: of the request, whose body was read · seconds: from now to the last token · listening: whether
        `begun` and `pieces` are wanted, or only `whole`. Raises as `Worker.ask`."""
        self._deadline = time.monotonic() + seconds
        self._receive = receive
        self._progress = AnswerChannel()
        self._gone = False
        progress = self._progress if listening else None
        self._future = worker.ask(begin, turn, tenant, self._deadline, progress)
        self._future.add_done_callback(lambda _: self._progress.notify())
        self._watch = asyncio.create_task(self._watch_client())

    def cancel(self) -> None:
        """Nobody waits any more: in the line it never begins, in a batch it is let go of before the next step."""
        self._future.cancel()
        self._watch.cancel()

    async def whole(self) -> Answer:
        """The answer. Raises what went wrong with the question, Expired, Stopping, Gone; then nobody waits any more."""
        try:
            while not self._future.done():
                await self._wait()
            return self.answer()
        finally:
            self.cancel()

    async def prefilled(self) -> RetrievalDone:
        """The question was read. Raises as `whole`."""
        try:
            while (known := self._progress.retrieval) is None:
                if self._future.done():
                    self.answer()
                await self._wait()
            return known
        except BaseException:
            self.cancel()
            raise

    async def pieces(self) -> AsyncIterator[str]:
        """The text of the answer, piece by piece; an empty one after each KEEP_ALIVE of silence. Together they are
        exactly the answer. Raises as `whole`, but goes on waiting until `leave`."""
        said = ""
        while True:
            done = self._future.done()
            text = self.answer().answer if done else self._progress.text
            # Some tokenizers say earlier text in another way when more is known: what was said stays said.
            if len(text) > len(said) and text.startswith(said):
                yield text[len(said) :]
                said = text
            if done:
                return
            if not await self._wait(KEEP_ALIVE):
                yield ""

    def answer(self) -> Answer:
        """The answer that is there. Raises what went wrong instead."""
        return self._future.result(0)

    async def _wait(self, silence: float | None = None) -> bool:
        """Until there is news; False after so many seconds without. Raises Gone, Expired."""
        left = max(0.0, self._deadline - time.monotonic())
        try:
            async with asyncio.timeout(left if silence is None else min(left, silence)):
                await self._progress.news.wait()
        except TimeoutError:
            pass
        heard = self._progress.news.is_set()
        self._progress.acknowledge()
        if self._future.done():
            return True
        if self._gone:
            raise Gone
        if time.monotonic() >= self._deadline:
            raise Expired
        return heard

    async def _watch_client(self) -> None:
        with suppress(Exception):  # a connection that cannot be read from is as good as closed
            while (await self._receive())["type"] != "http.disconnect":
                pass
        self._gone = True
        self._progress.notify()
