"""The HTTP service: `create_app` builds it, `serve` runs it until SIGTERM or Ctrl-C.

Everything a request needs hangs on the app's state and is built in its lifespan; there are no globals.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from api import errors
from api.dashboard import login
from api.middleware.access_log import AccessLogMiddleware, RequestObserver, log_line
from api.middleware.auth import AuthMiddleware
from api.middleware.body_limit import BodyBounds, BodyLimitMiddleware
from api.middleware.keys import read_keys
from api.middleware.security_headers import SecurityHeadersMiddleware
from api.observability.logs import written
from api.observability.metrics import MetricsCollector
from api.observability.request_counters import RequestCounters
from api.openapi import secured
from api.routes import router
from api.runtime.engine_thread import EngineThread
from ragkv import __version__
from ragkv.config import Settings
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from api.observability.traces import Tracing

DRAIN_SECONDS = 10
"""From the signal to the end, at most."""
_FAREWELL_SECONDS = 2
"""Of these, for telling those whose answers are not done."""
_FLUSH_SECONDS = 1.0
"""After these, for traces that were not sent yet."""


def create_app(settings: Settings, tracing: Tracing | None = None) -> FastAPI:
    """The ASGI application; its lifespan opens the engine and resumes queued jobs.

    tracing: in place of what the settings say.

    Raises ConfigError for API keys that cannot be read and for traces that cannot be made; starting raises ConfigError
    or CatalogCorrupt when the engine cannot be opened.
    """
    keys = read_keys(settings.api_keys.get_secret_value())
    tracing = tracing or (_tracing() if settings.traces else None)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker: EngineThread = app.state.worker
        try:
            await asyncio.wrap_future(worker.start())
            yield
        finally:
            worker.close(DRAIN_SECONDS)
            if tracing is not None:
                tracing.close(_FLUSH_SECONDS)

    app = _Service(
        title="ragkv",
        version=__version__,
        summary="Answers questions from your documents and says what every answer reused.",
        lifespan=lifespan,
        docs_url=None,  # the pages FastAPI offers load scripts from the network
        redoc_url=None,
        # FastAPI's own would tell paths and what errors say, and start by itself where the environment says so.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.worker = worker = EngineThread(settings, shared=len(keys.tenants) > 1)
    app.state.requests = requests = RequestCounters()
    app.state.metrics = MetricsCollector(worker, requests)
    app.state.observers = [log_line, requests.came] + ([] if tracing is None else [tracing.record])
    app.state.settings = settings
    app.state.keys = keys
    app.state.started = int(time.time())
    app.include_router(router)
    app.include_router(login.router)
    errors.install(app)
    if settings.dashboard:
        from api.dashboard.attach import attach  # not before it is wanted: it takes half a second to import

        attach(app)
    app.add_middleware(BodyLimitMiddleware, bounds=BodyBounds(settings.max_document_bytes))
    app.add_middleware(AuthMiddleware, keys=keys)  # around the limit: what is added last comes first
    return app


def _tracing() -> Tracing:
    try:
        from api.observability.traces import open_tracing
    except ImportError as error:
        raise ConfigError(
            f"RAGKV_TRACES needs what is not installed ({error.name}): pip install 'ragkv[otel]', or leave it unset"
        ) from None
    return open_tracing()


class _Service(FastAPI):
    """Strict headers and the observers are around everything, the handler of unexpected errors included."""

    def build_middleware_stack(self) -> ASGIApp:
        observers: list[RequestObserver] = self.state.observers
        return SecurityHeadersMiddleware(AccessLogMiddleware(super().build_middleware_stack(), observers))

    def openapi(self) -> dict[str, Any]:
        """The schema, with the keys that are asked for."""
        if not self.openapi_schema:
            self.openapi_schema = secured(super().openapi(), bool(self.state.keys))
        return self.openapi_schema


def serve(settings: Settings, console: Console) -> bool:
    """Listen, open the engine, serve; on SIGTERM finish what is in flight and return, DRAIN_SECONDS later at most.

    Returns whether the engine has ended: its thread may be in the middle of one long step, which nothing interrupts.
    What is logged goes to standard output. Raises ConfigError when the address cannot be listened on, and what opening
    the engine raises.
    """
    listener = listen(settings.host, settings.port)
    with listener, written(settings.log, settings.log_level, sys.stdout):
        address = f"http://{bracketed(settings.host)}:{listener.getsockname()[1]}"
        if not is_loopback(settings.host) and not settings.api_keys.get_secret_value():
            console.print(
                f"WARNING: {address} can be reached from other machines, and there are no API keys: whoever reaches it "
                "can read, add and ask everything. Make keys with `ragkv key TENANT` and set RAGKV_API_KEYS, or listen "
                "on 127.0.0.1.",
                style="bold red",
            )
        console.print(f"loading the model; the API will be at {address}", style="dim")
        return asyncio.run(_run(settings, listener, console, address))


class _Server(uvicorn.Server):
    """Says when it serves, and tells the worker as soon as a signal asks for the end: no long ingest holds it up."""

    def __init__(self, config: uvicorn.Config, worker: EngineThread, started: Callable[[], None]):
        super().__init__(config)
        self._worker, self._started = worker, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        if not self.should_exit:
            self._started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._worker.pause(DRAIN_SECONDS)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what is in flight; whoever waits when the time is nearly up is told so, and goes."""
        timer = asyncio.get_running_loop().call_later(DRAIN_SECONDS - _FAREWELL_SECONDS, self._worker.reject_waiting)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


async def _run(settings: Settings, listener: socket.socket, console: Console, address: str) -> bool:
    app = create_app(settings)
    # The lifespan is entered here, not by uvicorn, so that a fault at start is an exception and not a log of one.
    # Its lines about requests hold their paths and queries; below `warning` it tells their headers, too.
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        server_header=False,
        http="h11",  # it bounds what the head of a request may hold
    )
    config.load()  # NiceGUI looks for the server of its app, and takes every one for loaded
    server = _Server(config, app.state.worker, lambda: console.print(f"serving at {address}", style="bold green"))
    # For the time before uvicorn listens to signals; and when it is done it raises them again, which must not kill us.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.handle_exit, signal.SIGTERM, None)
    async with app.router.lifespan_context(app):
        await server.serve(sockets=[listener])
    console.print("stopped", style="dim")
    return not app.state.worker.running


def listen(host: str, port: int) -> socket.socket:
    """A socket bound there. Raises ConfigError when that is not possible."""
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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bracketed(host: str) -> str:
    """As it stands in a URL."""
    return f"[{host}]" if ":" in host else host
