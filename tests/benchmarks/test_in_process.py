"""The transport to an application in this process behaves as a connection does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from benchmarks.in_process import App, InProcessTransport, Message

START = {"type": "http.response.start", "status": 207, "headers": [(b"x-one", b"1")]}
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def client(app: App) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url="http://here:81", transport=InProcessTransport(app))


def test_a_response_is_there_before_it_is_complete() -> None:
    async def use() -> None:
        go_on = asyncio.Event()

        async def app(scope: Message, receive: Receive, send: Send) -> None:
            await send(dict(START))
            await send(part(b"first"))
            await go_on.wait()
            await send(part(b"second", more=False))

        async with client(app) as asking, asking.stream("GET", "/") as response:
            assert (response.status_code, response.headers["x-one"]) == (207, "1")
            parts = response.aiter_bytes()
            assert await anext(parts) == b"first"
            go_on.set()
            assert [each async for each in parts] == [b"second"]

    asyncio.run(asyncio.wait_for(use(), 10))


def test_the_application_gets_the_request() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        seen.update(scope, message=await receive())
        await send(dict(START))
        await send(part(b"", more=False))

    async def use() -> None:
        async with client(app) as asking:
            await asking.post("/a%20b?c=d", json=[1], headers={"X-Two": "2"})

    asyncio.run(use())
    assert (seen["method"], seen["path"], seen["raw_path"], seen["query_string"]) == ("POST", "/a b", b"/a%20b", b"c=d")
    assert (b"x-two", b"2") in seen["headers"]
    assert seen["server"] == ("here", 81)
    assert seen["message"] == {"type": "http.request", "body": b"[1]", "more_body": False}


def test_an_application_hears_that_its_client_left() -> None:
    heard = list[str]()

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send(dict(START))
        await send(part(b"first"))
        heard.append((await receive())["type"])

    async def use() -> None:
        async with client(app) as asking, asking.stream("GET", "/") as response:
            assert await anext(response.aiter_bytes()) == b"first"

    asyncio.run(asyncio.wait_for(use(), 10))
    assert heard == ["http.disconnect"]


@pytest.mark.parametrize("started", [False, True])
def test_a_fault_of_the_application_is_a_broken_connection(started: bool) -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if started:
            await send(dict(START))
            await send(part(b"half"))
        raise RuntimeError("a fault")

    async def use() -> None:
        async with client(app) as asking:
            await asking.get("/")

    with pytest.raises(httpx2.ReadError):
        asyncio.run(asyncio.wait_for(use(), 10))
