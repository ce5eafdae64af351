"""How the service listens."""

from __future__ import annotations

import asyncio
import socket

import pytest

from ragkv.api.app import listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_answer_waits_for_the_acknowledgement_of_the_one_before(host: str) -> None:
    async def delays() -> list[int]:
        """Whether Nagle's delay is off, of each connection that was accepted."""
        seen = asyncio.Queue[int]()

        def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.put_nowait(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen(host, 0) as listener:
            async with await asyncio.start_server(note, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
                writer.close()
                return [await seen.get()]

    assert asyncio.run(delays()) != [0]
