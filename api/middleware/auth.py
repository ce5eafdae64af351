"""Gate: when there are keys, nothing but /healthz answers without one.

ASGI middleware around all routes, so that one that somebody forgets to protect is protected, and one that does not
exist is not told apart from one that does. Who comes in is `state.tenant` of the request.

A browser has no key of its own; the dashboard gives it a ticket for one (dashboard/guard.py), which opens all that the
key opens.

Without keys, and with a ticket, a browser is a way in: any page could have it send a form to the service. So what
changes something, or asks, is refused when it comes from a page of another origin, and so is a WebSocket. (With a key
alone such a page lacks the key.)
"""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from api.dashboard.guard import COOKIE, LOGIN, LoginTickets, below, form, wants_page
from api.errors import Fault, refusal
from api.middleware.keys import Keys
from api.runtime.request_context import current
from api.runtime.tenants import Tenant

OPEN = frozenset({"/healthz"})
"""Exact paths that need no key."""
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
LOG_SECONDS = 1.0
"""Between two lines about refused requests, so that whoever tries keys cannot fill the log."""

logger = logging.getLogger("ragkv.api")


class AuthMiddleware:
    """refused: requests without a key that is known, since the start."""

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
        if self.keys and not self._known(connection, key) and not _open(scope):
            self._note(scope)
            return await self._turn_away(_unknown(bool(key)), scope, receive, send)
        if _elsewhere(scope, connection.headers) and not (self.keys and key):
            return await self._turn_away(_ELSEWHERE, scope, receive, send)
        await self.app(scope, receive, send)

    def _known(self, connection: HTTPConnection, key: str) -> bool:
        """Whether there is a tenant to whom this belongs; then the request is his."""
        tenant = self.keys.whose(key) if key else self.tickets.whose(connection.cookies.get(COOKIE, ""))
        if tenant is not None:
            connection.scope.setdefault("state", {})["tenant"] = Tenant(tenant)
            current().tenant = tenant
        return tenant is not None

    async def _turn_away(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        page = fault.status == 401 and below(scope["path"]) and wants_page(Headers(scope=scope))
        await (form() if page else refusal(fault, scope))(scope, receive, send)

    def _note(self, scope: Scope) -> None:
        self.refused += 1
        told, when = self._logged
        if time.monotonic() - when >= LOG_SECONDS:
            client = (scope.get("client") or ("an unknown address",))[0]
            logger.warning("%d requests without a valid key, the last one from %s", self.refused - told, client)
            self._logged = self.refused, time.monotonic()


_ELSEWHERE = Fault(403, "a page of another origin may not do this; set API keys to let others in", "other_origin")


def _elsewhere(scope: Scope, headers: Headers) -> bool:
    """Whether a browser does more than look, for a page that did not come from here."""
    if scope["type"] == "http" and scope["method"] in SAFE:
        return False
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host", "")


def _open(scope: Scope) -> bool:
    """Whether this needs no key: the sign of life, and showing one."""
    if scope["type"] != "http":
        return False
    return scope["path"] in OPEN or (scope["path"] == LOGIN and scope["method"] == "POST")


def _key(headers: Headers) -> str:
    """The key of a request, "" where there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _unknown(given: bool) -> Fault:
    detail = "this key is not known here" if given else "send an API key: `Authorization: Bearer …` or `X-API-Key: …`"
    challenge = 'Bearer realm="ragkv"' + (', error="invalid_token"' if given else "")
    return Fault(401, detail, "invalid_api_key" if given else "no_api_key", {"WWW-Authenticate": challenge})
