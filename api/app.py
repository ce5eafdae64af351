"""The HTTP service: `create_app` builds it, `serve` runs it until SIGTERM or Ctrl-C.

Everything a request needs hangs on the app's state and is built in its lifespan; there are no globals.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from api import errors
from api.body_limit import BodyLimit
from api.routes import router
from api.worker import Worker
from ragkv import __version__
from ragkv.config import Settings
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

DRAIN_SECONDS = 10
_BODY_BYTES = 2 * 2**20
_SLACK_BYTES = 2**20  # of JSON around a document's text


def create_app(settings: Settings) -> FastAPI:
    """The ASGI application; its lifespan opens the engine and resumes queued jobs.

    Starting raises ConfigError or CatalogCorrupt when the engine cannot be opened.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker: Worker = app.state.worker
        try:
            await asyncio.wrap_future(worker.start())
            yield
        finally:
            worker.close(DRAIN_SECONDS)

    app = FastAPI(
        title="ragkv",
        version=__version__,
        summary="Answers questions from your documents and says what every answer reused.",
        lifespan=lifespan,
        docs_url=None,  # the pages FastAPI offers load scripts from the network
        redoc_url=None,
    )
    app.state.worker = Worker(settings)
    app.include_router(router)
    errors.install(app)
    app.add_middleware(
        BodyLimit, default=_BODY_BYTES, paths={"/v1/documents": settings.max_document_bytes + _SLACK_BYTES}
    )
    return app


def serve(settings: Settings, console: Console) -> None:
    """Listen, open the engine, serve; on SIGTERM finish what is in flight and return.

    Raises ConfigError when the address cannot be listened on, and what opening the engine raises.
    """
    listener = _listen(settings.host, settings.port)
    with listener:
        address = f"http://{_bracketed(settings.host)}:{listener.getsockname()[1]}"
        if not _is_loopback(settings.host):
            console.print(
                f"WARNING: {address} can be reached from other machines, and this release has no API keys: whoever "
                "reaches it can read, add and ask everything. Listen on 127.0.0.1 unless something in front checks.",
                style="bold red",
            )
        console.print(f"loading the model; the API will be at {address}", style="dim")
        asyncio.run(_run(settings, listener, console, address))


class _Server(uvicorn.Server):
    """Says when it serves, and tells the worker as soon as a signal asks for the end: no long ingest holds it up."""

    def __init__(self, config: uvicorn.Config, worker: Worker, started: Callable[[], None]):
        super().__init__(config)
        self._worker, self._started = worker, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        if not self.should_exit:
            self._started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._worker.pause()
        super().handle_exit(sig, frame)


async def _run(settings: Settings, listener: socket.socket, console: Console, address: str) -> None:
    app = create_app(settings)
    # The lifespan is entered here, not by uvicorn, so that a fault at start is an exception and not a log of one.
    config = uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=DRAIN_SECONDS)
    server = _Server(config, app.state.worker, lambda: console.print(f"serving at {address}", style="bold green"))
    # For the time before uvicorn listens to signals; and when it is done it raises them again, which must not kill us.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.handle_exit, signal.SIGTERM, None)
    async with app.router.lifespan_context(app):
        await server.serve(sockets=[listener])
    console.print("stopped", style="dim")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host} port {port} ({reason}); choose another --host or --port") from None
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
