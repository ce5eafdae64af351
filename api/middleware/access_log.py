"""Observe: looks on while a request is served, and when it is done says so: to the log, and to whoever else wants it.

What is told names a request by the template of its route, never by its path or query: these may hold user text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.runtime.request_context import RequestContext, bind

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
"""Routes that machines ask over and over: a line at debug level, no trace."""
FILES = "/dashboard/_nicegui"
UNMATCHED = "unmatched"
"""The route of a path that there is none for."""

logger = logging.getLogger("ragkv.api")


@dataclass(frozen=True)
class ServedRequest:
    """A request that is done. method: `OTHER` for what is none of METHODS · status: 0 where nothing was sent · began,
    ended: in seconds of `time.perf_counter` · unix: when it began, in Unix nanoseconds · parents: the headers
    `traceparent` and `tracestate`, where they came."""

    account: RequestContext
    method: str
    route: str
    status: int
    began: float
    ended: float
    unix: int
    parents: Mapping[str, str]

    @property
    def quiet(self) -> bool:
        """Whether it is one of QUIET, or a file of the dashboard."""
        return self.route in QUIET or self.route.startswith(FILES)

    def when(self, seconds: float) -> int:
        """A moment of `time.perf_counter` in Unix nanoseconds: by one clock, so that what was inside stays inside."""
        return self.unix + round((seconds - self.began) * 1e9)


RequestObserver = Callable[[ServedRequest], None]


class AccessLogMiddleware:
    """ASGI middleware, around all that may answer, inside what gives the request its id."""

    def __init__(self, app: ASGIApp, observers: Sequence[RequestObserver]):
        """observers: called when a request is done, in the loop of the service."""
        self.app, self.observers = app, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        unix, began, status = time.time_ns(), time.perf_counter(), 0
        account = RequestContext(scope["state"]["request_id"])
        bind(account)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            method = scope["method"] if scope["method"] in METHODS else "OTHER"
            given = Headers(scope=scope)
            parents = {name: given[name] for name in ("traceparent", "tracestate") if name in given}
            ended = time.perf_counter()
            served = ServedRequest(account, method, route_of(scope), status, began, ended, unix, parents)
            for observer in self.observers:
                observer(served)


def route_of(scope: Scope) -> str:
    """The template of the route that was found for the request."""
    path = getattr(scope.get("route"), "path_format", None)
    return scope.get("root_path", "") + path if isinstance(path, str) else UNMATCHED


def log_line(served: ServedRequest) -> None:
    """The observer that writes a line. Who asked, and for which tenant, is in all lines of a request (logs.py)."""
    told: dict[str, Any] = {"method": served.method, "route": served.route, "status": served.status}
    told["ms"] = round(1000 * (served.ended - served.began), 1)
    if served.account.fault:
        told["fault"] = served.account.fault
    report = served.account.report
    if report is not None:
        told["answered_by"] = report.method.partition(":")[0]
        told["ttft_ms"] = round(report.timings_ms.ttft, 1)
        for name in ("sequence", "recompute", "load", "cache_hit"):
            told[name] = round(getattr(report.ratios, name), 4)
    logger.log(logging.DEBUG if served.quiet else logging.INFO, "request", extra=told)
