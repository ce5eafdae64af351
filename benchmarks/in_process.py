"""A transport of httpx2 that calls an ASGI application in this process, and streams what it sends.

`httpx2.ASGITransport` returns a response when it is complete, so the first token of a streamed answer would seem to
come with the last one. Here a response begins with its first message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx2

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class InProcessTransport(httpx2.AsyncBaseTransport):
    """Sends requests to an application of the same event loop, without sockets."""

    def __init__(self, app: App):
        """app: the application. Its lifespan belongs to the caller."""
        self._app = app

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Call the application; return when its response starts.

        Raises:
            httpx2.ReadError: It ended without a response.
        """
        exchange = _Exchange(await request.aread())
        scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "server": (request.url.host, request.url.port),
            "client": ("127.0.0.1", 0),
        }
        exchange.start(self._app(scope, exchange.receive, exchange.send))
        try:
            start = await exchange.next()
        except BaseException:
            await exchange.aclose()
            raise
        if start is None:
            await exchange.aclose()
            raise httpx2.ReadError("the application ended without a response", request=request)
        return httpx2.Response(start["status"], headers=start["headers"], stream=exchange)


class _Exchange(httpx2.AsyncByteStream):
    """One request and its response, whose body this is."""

    def __init__(self, body: bytes):
        self._body: bytes | None = body
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()
        self._closed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, call: Awaitable[None]) -> None:
        """Run the call of the application. What it raises ends the response, as a broken connection does."""

        async def run() -> None:
            try:
                await call
            except Exception:
                pass
            finally:
                self._sent.put_nowait(None)

        self._task = asyncio.create_task(run())

    async def receive(self) -> Message:
        """Give the application the body, and then the end of the connection once the client has left."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Take a message of the response."""
        self._sent.put_nowait(message)

    async def next(self) -> Message | None:
        """Return the next message; None at the end."""
        return await self._sent.get()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body as they come. A response that breaks off raises httpx2.ReadError."""
        while (message := await self.next()) is not None:
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                return
        raise httpx2.ReadError("the application broke off its response")

    async def aclose(self) -> None:
        """Leave, as a client that closes its connection, and wait until the application has noticed."""
        self._closed.set()
        if self._task is not None:
            await self._task
