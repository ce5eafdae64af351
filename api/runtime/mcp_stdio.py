"""The MCP server over standard input and output, for a client that starts `ragkv mcp`.

The SDK keeps standard output for the protocol: what else is written there goes to standard error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mcp.server.stdio import stdio_server

from ragkv.api.runtime.client_backend import ClientBackend
from ragkv.api.runtime.mcp_server import make_server
from ragkv.api.runtime.tool_backend import ToolBackend
from ragkv.client import AsyncClient
from ragkv.config import Settings

CLOSE_SECONDS = 1.0
"""Longest wait for the engine at the end. Clients kill a server that stays for two seconds."""


def serve_stdio(settings: Settings, notify: Callable[[str], None]) -> None:
    """Serve one client until it closes standard input.

    The engine's thread may then still be inside one long step, which cannot be interrupted. The data on the disk is
    consistent at any moment.

    Args:
        settings: Name the service that does the work, or what an engine in this process opens.
        notify: Receives lines that a user should see.
    """
    if settings.url:
        asyncio.run(_serve_service(settings))
        return
    from ragkv.api.runtime.local_backend import LocalBackend  # imports torch, which takes seconds

    backend = LocalBackend(settings, notify)
    try:
        asyncio.run(_serve(backend))
    finally:
        backend.close(CLOSE_SECONDS)


async def _serve_service(settings: Settings) -> None:
    # The service refuses an answer that exceeds its deadline, so a slightly longer timeout is enough.
    key, timeout = settings.key.get_secret_value(), settings.deadline + 30
    async with AsyncClient(settings.url, key, timeout) as client:
        await _serve(ClientBackend(client))


async def _serve(backend: ToolBackend) -> None:
    server = make_server(lambda context: backend)
    try:
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())
    except* BrokenPipeError:
        pass  # the client has gone without waiting for a response
