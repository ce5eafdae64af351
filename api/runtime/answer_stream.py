"""A question as its HTTP request sees it, until the answer is there, the client disconnects, or the deadline passes.

Where any of these ends the wait, the engine drops the question before its next step.

    await stream.whole()                         the whole answer; or piece by piece:
    await stream.prefilled()                     the question is prefilled, or was refused
    async for piece in stream.pieces(): …        the text
    stream.answer()                              the whole answer

Nothing is returned any more once a document that it was read from is deleted or replaced: all of these raise Outdated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from starlette.types import Receive

from ragkv.api.errors import Gone
from ragkv.api.runtime.answer_channel import AnswerChannel, RetrievalDone
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.undelivered import AnswerOrigin
from ragkv.engine.token_scores import TokenScore
from ragkv.errors import Expired, Outdated
from ragkv.report import Answer
from ragkv.types import AskOptions

KEEP_ALIVE = 10.0
"""Seconds without text after which `pieces` yields an empty piece. Proxies wait longer than this."""


class AnswerStream:
    """One question of one HTTP request. It belongs to the event loop of that request.

    Attributes:
        tokens: Scores of the tokens of what `pieces` has yielded, or of the whole answer; empty unless the options ask
            for log probabilities.
    """

    def __init__(
        self,
        engine_thread: EngineThread,
        receive: Receive,
        question: str,
        options: AskOptions,
        tenant: str,
        seconds: float,
        listening: bool,
    ):
        """Queue the question.

        Args:
            engine_thread: The thread that answers it.
            receive: Of the HTTP request, whose body was read.
            question: The question.
            options: How it is asked.
            tenant: The tenant whose request it is.
            seconds: Time from now to the last token.
            listening: Whether `prefilled` and `pieces` are used, or only `whole`.

        Raises:
            Busy: The queue is full.
            Stopping: The service is shutting down.
        """
        self._deadline = time.monotonic() + seconds
        self._receive = receive
        self._channel = AnswerChannel(listening)
        self.tokens: Sequence[TokenScore] = ()
        self._disconnected = False
        self._origin = AnswerOrigin()
        self._future = engine_thread.ask(question, options, tenant, self._deadline, self._channel, self._origin)
        self._future.add_done_callback(lambda _: self._channel.notify())
        self._client_task = asyncio.create_task(self._watch_client())

    def cancel(self) -> None:
        """Give up the question. In the queue it is never prefilled, in a batch it is dropped before the next step."""
        self._future.cancel()
        self._client_task.cancel()

    async def whole(self) -> Answer:
        """Wait for the answer. The question is given up when this raises.

        Raises:
            Expired: The deadline has passed.
            Outdated: A document that it was read from was deleted or replaced.
            Stopping: The service is shutting down.
            Gone: The client has disconnected.
            Exception: What `Engine.prefill` and decoding raise.
        """
        try:
            while not self._future.done():
                await self._wait()
            return self.answer()
        finally:
            self.cancel()

    async def prefilled(self) -> RetrievalDone:
        """Wait until the question is prefilled. Raises as `whole`."""
        try:
            while (retrieval := self._channel.retrieval) is None:
                if self._future.done():
                    self.answer()
                await self._wait()
            self.check()
            return retrieval
        except BaseException:
            self.cancel()
            raise

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text of the answer piece by piece. All pieces together are exactly the answer.

        An empty piece comes after each KEEP_ALIVE without text. This raises as `whole`, but the question is not given
        up before `cancel`.
        """
        sent = ""
        while True:
            done = self._future.done()
            text, tokens = (self.answer().answer, self._channel.tokens) if done else self._channel.said
            self.check()
            # Some tokenizers render earlier text differently once more tokens are known. Sent text cannot be changed.
            if len(text) > len(sent) and text.startswith(sent):
                self.tokens = tokens
                yield text[len(sent) :]
                sent = text
            if done:
                return
            if not await self._wait(KEEP_ALIVE):
                yield ""

    def answer(self) -> Answer:
        """Return the finished answer, or raise the error that the question failed with."""
        answer = self._future.result(0)
        self.check()
        self.tokens = self._channel.tokens
        return answer

    def check(self) -> None:
        """Raise Outdated if a document that the answer was read from was deleted or replaced."""
        if self._origin.outdated:
            raise Outdated

    async def _wait(self, silence: float | None = None) -> bool:
        """Wait for news; returns False after `silence` seconds without any. Raises Gone and Expired."""
        left = max(0.0, self._deadline - time.monotonic())
        try:
            async with asyncio.timeout(left if silence is None else min(left, silence)):
                await self._channel.news.wait()
        except TimeoutError:
            pass
        has_news = self._channel.news.is_set()
        self._channel.acknowledge()
        if self._future.done():
            return True
        if self._disconnected:
            raise Gone
        if time.monotonic() >= self._deadline:
            raise Expired
        return has_news

    async def _watch_client(self) -> None:
        with suppress(Exception):  # a connection that cannot be read counts as closed
            while (await self._receive())["type"] != "http.disconnect":
                pass
        self._disconnected = True
        self._channel.notify()
