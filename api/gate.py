"""Gate: when there are keys, nothing but /healthz answers without one.

ASGI middleware around all routes, so that one that somebody forgets to protect is protected, and one that does not
exist is not told apart from one that does. Who comes in is `state.tenant` of the request.

Without keys a browser on this machine is the way in: any page could have it send a form to the service. So what changes
something, or asks, is refused when it comes from a page of another origin. (With keys such a page lacks the key.)
"""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.account import current
from api.errors import Fault, refusal
from api.keys import Keys
from api.tenants import Tenant

OPEN = frozenset({"/healthz"})
"""Exact paths that need no key."""
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
LOG_SECONDS = 1.0
"""Between two lines about refused requests, so that whoever tries keys cannot fill the log."""

logger = logging.getLogger("ragkv.api")


class Gate:
    """refused: requests without a key that is known, since the start."""

    def __init__(self, app: ASGIApp, keys: Keys):
        self.app, self.keys = app, keys
        self.refused = 0
        self._logged = (0, 0.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] == "http" and not self.keys:
            stranger = scope["method"] not in SAFE and _elsewhere(Headers(scope=scope))
            return await (refusal(_ELSEWHERE, scope) if stranger else self.app)(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})  # there are none; nor is there a way around
        key = _key(Headers(scope=scope))
        tenant = self.keys.whose(key) if key else None
        if tenant is not None:
            scope.setdefault("state", {})["tenant"] = Tenant(tenant)
            current().tenant = tenant
        elif scope["path"] not in OPEN:
            self._note(scope)
            return await refusal(_unknown(bool(key)), scope)(scope, receive, send)
        await self.app(scope, receive, send)

    def _note(self, scope: Scope) -> None:
        self.refused += 1
        told, when = self._logged
        if time.monotonic() - when >= LOG_SECONDS:
            client = (scope.get("client") or ("an unknown address",))[0]
            logger.warning("%d requests without a valid key, the last one from %s", self.refused - told, client)
            self._logged = self.refused, time.monotonic()


_ELSEWHERE = Fault(403, "a page of another origin may not do this; set API keys to let others in", "other_origin")


def _elsewhere(headers: Headers) -> bool:
    """Whether a browser sends this for a page that did not come from here."""
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host", "")


def _key(headers: Headers) -> str:
    """The key of a request, "" where there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _unknown(given: bool) -> Fault:
    detail = "this key is not known here" if given else "send an API key: `Authorization: Bearer …` or `X-API-Key: …`"
    challenge = 'Bearer realm="ragkv"' + (', error="invalid_token"' if given else "")
    return Fault(401, detail, "invalid_api_key" if given else "no_api_key", {"WWW-Authenticate": challenge})
