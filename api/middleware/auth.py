"""Authentication middleware: with API keys configured, only /healthz answers without a key.

The middleware is outside all routes. A new route is therefore protected by default, and an unauthenticated client
cannot tell which routes exist. The authenticated tenant is stored as `state.tenant` of the request.

A browser cannot send a key of its own. The dashboard exchanges a key for a login ticket (dashboard/guard.py), which
gives the same access as the key.

Without keys, and with a ticket, any web page could make a browser send a form to the service. Requests that change
something or ask a question are therefore refused when they come from a page of another origin, and so are WebSockets
and all that belongs to the dashboard. Names that lead here by a trick of DNS are refused before (middleware/hosts.py).
A request with a key needs no such check, because another page does not have the key.
"""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from api.dashboard.guard import COOKIE, LOGIN, LoginTickets, accepts_html, is_dashboard_path, login_page
from api.errors import Fault, error_response
from api.middleware.keys import Keys
from api.runtime.request_context import current
from api.runtime.tenants import Tenant

PUBLIC_PATHS = frozenset({"/healthz"})
"""Exact paths that need no key."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
LOG_SECONDS = 1.0
"""Least time between two log lines about refused requests, so that guessing keys cannot fill the log."""

logger = logging.getLogger("ragkv.api")


class AuthMiddleware:
    """ASGI middleware that authenticates requests.

    Attributes:
        refused: Requests without a valid key since the start.
    """

    def __init__(self, app: ASGIApp, keys: Keys):
        self.app, self.keys, self.tickets = app, keys, LoginTickets(keys)
        self.refused = 0
        self._logged = (0, 0.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        connection = HTTPConnection(scope)
        key = _key(connection.headers)
        if self.keys and key is None and not _is_public(scope):
            self._count_refused(scope)
            return await self._refuse(_TWO_KEYS, scope, receive, send)
        if self.keys and not self._authenticate(connection, key or "") and not _is_public(scope):
            self._count_refused(scope)
            return await self._refuse(_unauthorized(bool(key)), scope, receive, send)
        if _is_cross_origin(scope, connection.headers) and not (self.keys and key):
            return await self._refuse(_CROSS_ORIGIN, scope, receive, send)
        await self.app(scope, receive, send)

    def _authenticate(self, connection: HTTPConnection, key: str) -> bool:
        """Store the tenant of the key or the ticket in the request. Return whether there is one."""
        tenant = self.keys.tenant_of(key) if key else self.tickets.tenant_of(connection.cookies.get(COOKIE, ""))
        if tenant is not None:
            connection.scope.setdefault("state", {})["tenant"] = Tenant(tenant)
            current().tenant = tenant
        return tenant is not None

    async def _refuse(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        for_browsers = is_dashboard_path(scope["path"]) or scope["path"] == "/"
        show_login = fault.status == 401 and for_browsers and accepts_html(Headers(scope=scope))
        await (login_page() if show_login else error_response(fault, scope))(scope, receive, send)

    def _count_refused(self, scope: Scope) -> None:
        self.refused += 1
        count, when = self._logged
        if time.monotonic() - when >= LOG_SECONDS:
            client = (scope.get("client") or ("an unknown address",))[0]
            logger.warning("%d requests without a valid key, the last one from %s", self.refused - count, client)
            self._logged = self.refused, time.monotonic()


_TWO_KEYS = Fault(401, "Authorization and X-API-Key hold different keys; send one of them", "two_keys")
_CROSS_ORIGIN = Fault(
    403, "requests from pages of another origin are refused unless they send an API key of this service", "other_origin"
)


def _is_cross_origin(scope: Scope, headers: Headers) -> bool:
    """Return whether a page of another origin made the browser send more than a read request of the API.

    Nothing of the dashboard is for other pages. Without WebSockets its updates are read by GET.
    """
    if scope["type"] == "http" and scope["method"] in SAFE_METHODS and not is_dashboard_path(scope["path"]):
        return False
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host", "")


def _is_public(scope: Scope) -> bool:
    """Return whether the request needs no key: the liveness check and the login."""
    if scope["type"] != "http":
        return False
    return scope["path"] in PUBLIC_PATHS or (scope["path"] == LOGIN and scope["method"] == "POST")


def _key(headers: Headers) -> str | None:
    """Return the API key of a request, "" if there is none, None if its two headers differ."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    bearer = credentials.strip() if scheme.lower() == "bearer" else ""
    key = headers.get("x-api-key", "").strip()
    return None if bearer and key and bearer != key else bearer or key


def _unauthorized(has_key: bool) -> Fault:
    missing = "send an API key: `Authorization: Bearer …` or `X-API-Key: …`"
    detail = "this API key is not known" if has_key else missing
    challenge = 'Bearer realm="ragkv"' + (', error="invalid_token"' if has_key else "")
    return Fault(401, detail, "invalid_api_key" if has_key else "no_api_key", {"WWW-Authenticate": challenge})
