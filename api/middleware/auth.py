"""Authentication middleware: with API keys or an issuer configured, only /healthz, or /health, answers without one.

The middleware is outside all routes. A new route is therefore protected by default, and an unauthenticated client
cannot tell which routes exist. The authenticated caller is stored as `state.caller` of the request. A reader may send
requests that read, and those of READERS_MAY; every other one gets 403. /mcp and the dashboard check the role
themselves, call by call.

A browser cannot send a key of its own. The dashboard exchanges a key for a login ticket (dashboard/guard.py), which
gives the same access as the key.

Without keys, and with a ticket, any web page could make a browser send a form to the service. Requests that change
something or ask a question are therefore refused when they come from a page of another origin, and so are WebSockets
and all that belongs to the dashboard. Without keys, pages of RAGKV_ORIGINS may send them (middleware/origins.py).
Names that lead here by a trick of DNS are refused before (middleware/hosts.py). A request with a key needs no such
check, because another page does not have the key.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from ragkv.api.dashboard.guard import COOKIE, LOGIN, accepts_html, is_dashboard_path, login_page, prefix_of
from ragkv.api.errors import Fault, error_response, fault_of
from ragkv.api.middleware.authenticator import Authenticator
from ragkv.api.middleware.inference_paths import INFERENCE
from ragkv.api.middleware.origins import Origins
from ragkv.api.observability.audit import AuditLog
from ragkv.api.runtime.callers import Caller, IssuerAway
from ragkv.api.runtime.request_context import current

PUBLIC_PATHS = frozenset({"/healthz", "/health"})
"""Exact paths that need no key."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
READERS_MAY = frozenset({("POST", path) for path in (*INFERENCE, "/v1/search", "/mcp", LOGIN)})
"""What readers may send besides requests that read. Conversations are their own, too."""
CONVERSATIONS = ("/v1/conversations/", "/v1/responses/")
DOCS = "/docs"
"""The page that describes the API."""
LOG_SECONDS = 1.0
"""Least time between two log lines about refused requests, so that guessing keys cannot fill the log."""

logger = logging.getLogger("ragkv.api")
_NO_OTHER_ORIGIN = Origins()


class AuthMiddleware:
    """ASGI middleware that authenticates requests.

    Attributes:
        refused: Requests without a valid key since the start.
    """

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, audit: AuditLog, origins: Origins = _NO_OTHER_ORIGIN
    ):
        self.app, self.authenticator, self.audit, self.origins = app, authenticator, audit, origins
        self.refused = 0
        self._logged = (0, 0.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401, 403 or 503."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        connection = HTTPConnection(scope)
        key, guarded = _key(connection.headers), bool(self.authenticator)
        fault = await self._authenticate(connection, key) if guarded else None
        if fault is not None and not _is_public(scope):
            self._count_refused(scope)
            return await self._refuse(fault, scope, receive, send)
        if _is_cross_origin(scope, connection.headers) and not (key if guarded else self._allows(connection)):
            return await self._refuse(_CROSS_ORIGIN, scope, receive, send)
        caller = scope.get("state", {}).get("caller")
        if caller is not None and not caller.writes and _needs_writer(scope):
            action = "delete" if scope["method"] == "DELETE" else "ingest"
            self.audit.record(caller, action, "forbidden")
            return await self._refuse(_READER, scope, receive, send)
        await self.app(scope, receive, send)

    def _allows(self, connection: HTTPConnection) -> bool:
        """Return whether a page of another origin may send this where there are no keys. The dashboard has its own."""
        path, origin = connection.scope["path"], connection.headers.get("origin", "")
        return connection.scope["type"] == "http" and not is_dashboard_path(path) and self.origins.allows(origin)

    async def _authenticate(self, connection: HTTPConnection, key: str | None) -> Fault | None:
        """Store the caller in the request. Return what to answer if there is none.

        key: what the request sends; "" for nothing, so that its ticket counts; None for two that differ.
        """
        if key is None:
            return _TWO_KEYS
        try:
            caller = await self._caller_of(connection, key)
        except IssuerAway as error:
            return replace(fault_of(error), headers={"Retry-After": "10"})
        if caller is None:
            return _unauthorized(bool(key), self.authenticator.takes_token(key))
        connection.scope.setdefault("state", {})["caller"] = caller
        current().tenant = caller.tenant.name
        return None

    async def _caller_of(self, connection: HTTPConnection, key: str) -> Caller | None:
        if key:
            return await self.authenticator.caller_of(key)
        return self.authenticator.tickets.caller_of(connection.cookies.get(COOKIE, ""))

    async def _refuse(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        for_browsers = is_dashboard_path(scope["path"]) or scope["path"] in ("/", DOCS)
        show_login = fault.status == 401 and for_browsers and accepts_html(Headers(scope=scope))
        page = login_page(prefix_of(scope)) if show_login else error_response(fault, scope)
        await page(scope, receive, send)

    def _count_refused(self, scope: Scope) -> None:
        self.refused += 1
        count, when = self._logged
        if time.monotonic() - when >= LOG_SECONDS:
            client = (scope.get("client") or ("an unknown address",))[0]
            logger.warning("%d requests without a valid key, the last one from %s", self.refused - count, client)
            self._logged = self.refused, time.monotonic()


_TWO_KEYS = Fault(401, "Authorization and X-API-Key hold different keys; send one of them", "two_keys")
_READER = Fault(403, "this needs the role writer; you have the role reader, which only reads and asks", "forbidden")
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


def _needs_writer(scope: Scope) -> bool:
    """Return whether a request may change documents. A new route is taken to do so."""
    if scope["type"] != "http" or scope["method"] in SAFE_METHODS or is_dashboard_path(scope["path"]):
        return False
    if scope["method"] == "DELETE" and scope["path"].startswith(CONVERSATIONS):
        return False
    return (scope["method"], scope["path"]) not in READERS_MAY


def _key(headers: Headers) -> str | None:
    """Return the API key of a request, "" if there is none, None if its two headers differ."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    bearer = credentials.strip() if scheme.lower() == "bearer" else ""
    key = headers.get("x-api-key", "").strip()
    return None if bearer and key and bearer != key else bearer or key


def _unauthorized(has_key: bool, is_token: bool) -> Fault:
    """Return the answer to a request without a valid key or token. It does not tell what is wrong with a token."""
    challenge = 'Bearer realm="ragkv"' + (', error="invalid_token"' if has_key else "")
    headers = {"WWW-Authenticate": challenge}
    if is_token:
        return Fault(401, "this token is not valid here; sign in again for a new one", "invalid_token", headers)
    if has_key:
        return Fault(401, "this API key is not known", "invalid_api_key", headers)
    return Fault(401, "send an API key: `Authorization: Bearer …` or `X-API-Key: …`", "no_api_key", headers)
