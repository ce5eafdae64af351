"""Access-log middleware: calls its observers when a request is done, with what happened to it.

Observers write the log line, count the request and record its trace. They see the template of the route and never the
path or the query, because these may hold text of users.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.api.middleware.head import method_of
from ragkv.api.runtime.request_context import RequestContext, bind

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
QUIET_ROUTES = frozenset({"/healthz", "/health", "/readyz", "/metrics"})
"""Routes that are polled. They are logged at level debug and not traced."""
ASSETS = "/dashboard/_nicegui"
UNMATCHED = "unmatched"
"""Route of a path that no route matches."""

logger = logging.getLogger("ragkv.api")


@dataclass(frozen=True)
class ServedRequest:
    """A request that is done.

    Attributes:
        context: Context of the request.
        method: HTTP method; `OTHER` for one that is not in METHODS.
        route: Template of the route; UNMATCHED if there is none.
        status: HTTP status; 0 if no response was sent.
        started: Seconds of `time.perf_counter`.
        ended: Seconds of `time.perf_counter`.
        started_unix_ns: Start in Unix nanoseconds.
        trace_headers: The headers `traceparent` and `tracestate`, if the client sent them.
    """

    context: RequestContext
    method: str
    route: str
    status: int
    started: float
    ended: float
    started_unix_ns: int
    trace_headers: Mapping[str, str]

    @property
    def quiet(self) -> bool:
        """Whether the route is one of QUIET_ROUTES or a file of the dashboard."""
        return self.route in QUIET_ROUTES or self.route.startswith(ASSETS)

    def unix_ns(self, seconds: float) -> int:
        """Convert a moment of `time.perf_counter` to Unix nanoseconds.

        All moments are converted with the same offset, so a step inside the request stays inside it.
        """
        return self.started_unix_ns + round((seconds - self.started) * 1e9)


RequestObserver = Callable[[ServedRequest], None]


class AccessLogMiddleware:
    """ASGI middleware outside everything that can answer, and inside the middleware that assigns the request id."""

    def __init__(self, app: ASGIApp, observers: Sequence[RequestObserver]):
        """Wrap `app`. The observers are called in the event loop of the service."""
        self.app, self.observers = app, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and call the observers at its end."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started_unix_ns, started, status = time.time_ns(), time.perf_counter(), 0
        context = RequestContext(scope["state"]["request_id"])
        bind(context)

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note_status)
        finally:
            method = sent if (sent := method_of(scope)) in METHODS else "OTHER"
            headers = Headers(scope=scope)
            trace_headers = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
            ended = time.perf_counter()
            served = ServedRequest(
                context, method, route_of(scope), status, started, ended, started_unix_ns, trace_headers
            )
            for observer in self.observers:
                observer(served)


def route_of(scope: Scope) -> str:
    """Return the template of the route that matched the request."""
    path = getattr(scope.get("route"), "path_format", None)
    return scope.get("root_path", "") + path if isinstance(path, str) else UNMATCHED


def log_request(served: ServedRequest) -> None:
    """Write the log line of a request. The formatter adds its id and tenant (observability/logs.py)."""
    fields: dict[str, Any] = {"method": served.method, "route": served.route, "status": served.status}
    fields["ms"] = round(1000 * (served.ended - served.started), 1)
    if served.context.fault:
        fields["fault"] = served.context.fault
    report = served.context.report
    if report is not None:
        fields["answered_by"] = report.method.partition(":")[0]
        fields["ttft_ms"] = round(report.timings_ms.ttft, 1)
        for name in ("sequence", "recompute", "load", "cache_hit"):
            fields[name] = round(getattr(report.ratios, name), 4)
    logger.log(logging.DEBUG if served.quiet else logging.INFO, "request", extra=fields)
