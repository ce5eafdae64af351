"""The HTTP service: `create_app` builds the application, `serve` runs it until SIGTERM or Ctrl-C.

Everything that a request needs is stored in the state of the application. There are no globals.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from ragkv import __version__
from ragkv.api import errors
from ragkv.api.dashboard import login
from ragkv.api.middleware.access_log import AccessLogMiddleware, RequestObserver, log_request
from ragkv.api.middleware.authenticator import Authenticator, open_authenticator
from ragkv.api.middleware.body_limit import BodyBounds
from ragkv.api.middleware.hosts import is_loopback, read_hosts
from ragkv.api.middleware.keys import read_operators
from ragkv.api.middleware.origins import read_origins
from ragkv.api.middleware.paths import PathMiddleware, read_prefix
from ragkv.api.middleware.security_headers import SecurityHeadersMiddleware
from ragkv.api.middleware.stack import add_middleware
from ragkv.api.observability.logs import configured_logging
from ragkv.api.observability.metrics import MetricsCollector
from ragkv.api.observability.request_counters import RequestCounters
from ragkv.api.openapi import add_security
from ragkv.api.routes import description, mcp, router
from ragkv.api.runtime.connection_count import Connections
from ragkv.api.runtime.connections import protocol_options
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.peers import NoPeers
from ragkv.api.runtime.rate_limits import RateLimiter, TenantLimits
from ragkv.config import IngestSettings, ServingSettings, Settings
from ragkv.errors import ConfigError
from ragkv.ingest.sandbox import allowance_of

if TYPE_CHECKING:
    from rich.console import Console

    from ragkv.api.observability.traces import Tracing

DRAIN_SECONDS = 10
"""Longest time from the signal to the end of the process."""
REJECT_SECONDS = 2
"""Part of DRAIN_SECONDS that is left when the requests still waiting are rejected."""
_FLUSH_SECONDS = 1.0
"""Time after DRAIN_SECONDS to send the remaining traces."""


def create_app(settings: Settings, tracing: Tracing | None = None) -> FastAPI:
    """Create the ASGI application. Its lifespan opens the engine and resumes queued jobs.

    Args:
        settings: Settings of the service.
        tracing: Replaces the tracing that the settings ask for.

    Raises:
        ConfigError: The API keys, the issuer, names, origins or the root path cannot be used, or traces or OCR are on
            and cannot be made.
            Starting the application raises it when the engine cannot be opened.
        CatalogCorrupt: Raised at start when the catalogue is damaged.
    """
    authenticator = open_authenticator(settings)
    hosts, origins, prefix = read_hosts(settings, bool(authenticator)), read_origins(settings), read_prefix(settings)
    tracing = tracing or (_open_tracing() if settings.traces else None)
    allowance_of(settings.part(IngestSettings))  # before the model is loaded
    bounds = BodyBounds(settings.max_document_bytes)
    app = _Service(
        title="ragkv",
        version=__version__,
        summary="Answers questions from your documents and says what every answer reused.",
        lifespan=_make_lifespan(bounds, tracing),
        openapi_url=None,  # routes/description.py has it, and a page: FastAPI's pages load scripts from the network
        redirect_slashes=False,  # middleware/paths.py
        # FastAPI's telemetry would record paths and error messages, and an environment variable can turn it on.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.prefix = prefix
    _fill_state(app, settings, authenticator, tracing)
    app.include_router(router)
    app.include_router(description.router)
    app.include_router(login.router)
    app.router.routes.append(mcp.route)
    errors.install(app)
    if settings.dashboard:
        from ragkv.api.dashboard.attach import attach  # takes half a second to import

        attach(app)
    add_middleware(app, authenticator, bounds, hosts=hosts, origins=origins)
    return app


def _make_lifespan(
    bounds: BodyBounds, tracing: Tracing | None
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return the lifespan: the engine is open and /mcp is served inside it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine_thread: EngineThread = app.state.engine_thread
        try:
            starting = engine_thread.start()
            app.openapi()  # the first request with a parameter needs it: nobody would be answered while it is made
            await asyncio.wrap_future(starting)
            app.state.mcp_sessions = mcp.make_sessions(bounds)
            async with app.state.mcp_sessions.run():
                yield
        finally:
            engine_thread.close(DRAIN_SECONDS)
            if tracing is not None:
                tracing.close(_FLUSH_SECONDS)

    return lifespan


def _fill_state(app: FastAPI, settings: Settings, authenticator: Authenticator, tracing: Tracing | None) -> None:
    serving = settings.part(ServingSettings)
    default = TenantLimits(serving.tenant_requests, serving.tenant_tokens, serving.tenant_bytes, serving.tenant_stored)
    app.state.limiter = limiter = RateLimiter(default, authenticator.keys.limits)
    app.state.engine_thread = engine_thread = EngineThread(
        settings, len(authenticator.tenants) > 1, lambda tenant, count: limiter.charge(tenant, "tokens", count)
    )
    app.state.requests = requests = RequestCounters()
    app.state.operators = read_operators(settings.operators, authenticator.tenants)
    app.state.metrics = MetricsCollector(engine_thread, requests, limiter)
    app.state.observers = [log_request, requests.count] + ([] if tracing is None else [tracing.record])
    app.state.settings = settings
    app.state.peers = NoPeers()  # replicas put theirs here
    app.state.connections = Connections(settings.connections)
    app.state.authenticator = authenticator
    app.state.started = int(time.time())


def _open_tracing() -> Tracing:
    try:
        from ragkv.api.observability.traces import open_tracing
    except ImportError as error:
        raise ConfigError(
            f"RAGKV_TRACES needs {error.name}, which is not installed: pip install 'opentelemetry-sdk>=1.45,<2' "
            "'opentelemetry-exporter-otlp-proto-http>=1.45,<2', or leave it unset"
        ) from None
    return open_tracing()


class _Service(FastAPI):
    """Puts paths, security headers and the access log around everything, and around the handler of errors, too."""

    def build_middleware_stack(self) -> ASGIApp:
        observers: list[RequestObserver] = self.state.observers
        logged = AccessLogMiddleware(super().build_middleware_stack(), observers)
        return PathMiddleware(SecurityHeadersMiddleware(logged), self.state.prefix)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI schema with the security schemes."""
        if not self.openapi_schema:
            self.openapi_schema = add_security(super().openapi(), bool(self.state.authenticator))
        return self.openapi_schema


def serve(settings: Settings, console: Console) -> bool:
    """Run the service until a signal ends it.

    SIGTERM lets the requests in flight finish and returns after at most DRAIN_SECONDS; once more changes nothing. Log
    lines go to standard output.

    Returns:
        Whether the engine has ended. Its thread may still be inside one long step, which cannot be interrupted.

    Raises:
        ConfigError: The service cannot listen on the address, or the engine cannot be opened.
        CatalogCorrupt: The catalogue is damaged.
    """
    listener = listen(settings.host, settings.port)
    with listener, configured_logging(settings.log, settings.log_level, sys.stdout):
        address = address_of(settings, listener.getsockname()[1])
        warning = why_exposed(settings, address)
        if warning:
            console.print(f"WARNING: {warning}", style="bold red")
        console.print(f"loading the model; the API will be at {address}", style="dim")
        ended = asyncio.run(_run(settings, listener, console, address))
        for number in (signal.SIGINT, signal.SIGTERM):  # the interpreter, as it ends, would restore their defaults
            signal.signal(number, signal.SIG_IGN)
        return ended


class _Server(uvicorn.Server):
    """Reports when it accepts connections, and pauses the engine thread at the signal so that no ingest delays it."""

    def __init__(self, config: uvicorn.Config, engine_thread: EngineThread, on_started: Callable[[], None]):
        super().__init__(config)
        self._engine_thread, self._on_started = engine_thread, on_started

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal comes. Signals are still handled after that, to the end of the process."""
        signal.signal(signal.SIGINT, self.handle_exit)  # before uvicorn's handlers, in whose place it comes afterwards
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets)
        if not self.should_exit:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown on a signal. Another signal neither hurries nor breaks it off: it ends in time anyway.

        uvicorn would end at once at a second Ctrl-C, and streams without a word.
        """
        if not self.should_exit:
            self.should_exit = True
            self._engine_thread.pause(DRAIN_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the requests in flight. Requests that still wait shortly before the limit are rejected."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(DRAIN_SECONDS - REJECT_SECONDS, self._engine_thread.reject_waiting)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


async def _run(settings: Settings, listener: socket.socket, console: Console, address: str) -> bool:
    app = create_app(settings)
    # The lifespan is entered here and not by uvicorn, which would log an error at start instead of raising it.
    # uvicorn's access log holds paths and queries, and below level `warning` uvicorn also logs request headers.
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        server_header=False,
        **protocol_options(app.state.connections),
    )
    config.load()  # NiceGUI searches for the server of its app and expects every server it finds to be loaded
    engine_thread: EngineThread = app.state.engine_thread
    server = _Server(config, engine_thread, lambda: console.print(f"serving at {address}", style="bold green"))
    # Covers the time before uvicorn handles signals, and after it. The loop's own handlers would end with the loop.
    signal.signal(signal.SIGTERM, server.handle_exit)
    async with app.router.lifespan_context(app):
        await server.serve(sockets=[listener])
    console.print("stopped", style="dim")
    return not engine_thread.running


def address_of(settings: Settings, port: int) -> str:
    """Return the address under which users reach a service that listens on a port."""
    return settings.public_url.rstrip("/") or f"http://{bracketed(settings.host)}:{port}"


def why_exposed(settings: Settings, address: str) -> str:
    """Return a warning if other machines can reach a service without keys or an issuer at its address, else ""."""
    guarded = settings.api_keys.get_secret_value() or settings.oidc_issuer
    if is_loopback(urlsplit(address).hostname or "") or guarded:
        return ""
    return (
        f"{address} can be reached from other machines, and there are no API keys: anyone who reaches it can read, add "
        "and ask everything. Make keys with `ragkv key TENANT` and set RAGKV_API_KEYS, or listen on 127.0.0.1."
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address.

    Raises:
        ConfigError: The address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns off Nagle's delay only where the protocol is named: without it every answer on a connection that is
    # kept open waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host} port {port} ({reason}); choose another --host or --port") from None
    return listener


def bracketed(host: str) -> str:
    """Return the host as it is written in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
