"""ASGI middleware of Ray's HTTP proxy, which stands before all replicas.

It refuses heads that can be read in two ways (request_heads.py), because this proxy and a replica would be the two. It
tells the router what a request is about, and turns the proxy's own errors into those of the API. A replica that ends
while it works on a request costs a 503 with `Retry-After`, whose repetition another replica answers. So a response that
says how long it is goes on when it is complete; a stream goes on as it comes.

Ray loads `middlewares` by its name, which the variable RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH holds (CALLBACK).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.api.errors import Fault, error_response
from ragkv.api.middleware.security_headers import HEADERS
from ragkv.api.runtime.request_heads import check_headers
from ragkv.locality import HEADER, LONGEST

CALLBACK = "ragkv.api.replicas.proxy:middlewares"
"""Where Ray finds `middlewares`."""
SESSION = "x-session-id"
"""The header that Ray's proxy passes on to the router."""
ONE_PLACE = "c-one-place"
"""Key of everything that one replica does for all: the dashboard, whose pages live in its memory, and the metrics."""
_PARTS = ("v1", "dashboard", "metrics")
"""Parts of paths that tell one from the other, whichever comes first."""
HELD_BYTES = 2**20
"""Longest response that is held back until it is complete, in bytes. A longer one that breaks off stays broken."""
_RAYS_OWN = "/-/"
"""Paths that Ray's proxy answers itself: its own health and routes."""
_CONTROLS = ("serve-multiplexed-model-id", "x-request-timeout-seconds", "x-request-disconnect-disabled", SESSION)
"""Headers that control Ray's proxy. They are not the client's to send."""
_LOST = Fault(
    503,
    "the replica that worked on this request ended, or none is ready; send the request again",
    "replica_lost",
    {"Retry-After": "1"},
)


class ReplicaProxyMiddleware:
    """Prepares requests for the router, and answers for replicas that are gone."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on to Ray's proxy."""
        if scope["type"] not in ("http", "websocket") or scope["path"].startswith(_RAYS_OWN):
            return await self.app(scope, receive, send)
        if (fault := check_headers(scope["headers"])) is not None:
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})
            return await _refuse(replace(fault, headers={"Connection": "close"}), scope, receive, send)
        _direct(scope)
        if scope["type"] == "websocket":
            return await self.app(scope, receive, send)
        response = _Response(send, scope["method"] == "HEAD")
        try:
            await self.app(scope, receive, response.send)
        except Exception:
            if response.started:
                raise  # the server closes the connection, so the client sees that the response is not complete
        if not response.started:
            await _refuse(_LOST, scope, receive, send)


class _Response:
    """Passes a response on, unless Ray's proxy made it itself or it is not complete. Then nothing is sent.

    Attributes:
        started: Whether anything was sent.
    """

    def __init__(self, send: Send, is_head: bool):
        self._send = send
        self._is_head = is_head
        self._held: list[Message] = []
        self._missing = 0  # bytes that are awaited before anything is sent; none of a stream
        self.started = False

    async def send(self, message: Message) -> None:
        """Pass a message on, or keep it until the response is complete."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if "X-Content-Type-Options" not in headers:  # every response of a replica has it
                return
            if (request_id := headers.get("X-Request-ID")) is not None:
                headers["X-Request-ID"] = request_id  # the replica's; Ray's proxy adds a second one
            length = int(headers.get("Content-Length", "0"))
            has_body = not self._is_head and message["status"] not in (204, 304)
            self._missing = length if has_body and length <= HELD_BYTES else 0
        elif not self.started and not self._held:
            return  # the body of a response that the proxy made
        self._held.append(message)
        self._missing -= len(message.get("body", b""))
        if self._missing <= 0:
            self.started = True
            for held in self._held:
                await self._send(held)
            self._held.clear()


def _direct(scope: Scope) -> None:
    """Write the key of a request where Ray's proxy reads it."""
    key = _key_of(scope)
    kept = [pair for pair in scope["headers"] if pair[0].decode("latin-1").replace("_", "-") not in _CONTROLS]
    scope["headers"] = [*kept, (SESSION.encode(), key.encode())] if key else kept


def _key_of(scope: Scope) -> str:
    """Return the key of a request: what its client says, else that of its credential; "" where it has none."""
    headers = Headers(scope=scope)
    # A proxy before this one may serve the service below a path, which only the replicas know.
    if next((part for part in scope["path"].split("/") if part in _PARTS), "v1") != "v1":
        return ONE_PLACE
    sent = headers.get(HEADER, "")
    if 0 < len(sent) <= LONGEST and sent.isascii() and sent.isprintable():
        return sent
    credential = headers.get("authorization", "") or headers.get("x-api-key", "")
    return hashlib.sha256(credential.encode()).hexdigest()[:32] if credential else ""


async def _refuse(fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(HEADERS)
            headers["X-Request-ID"] = Headers(scope=scope).get("x-request-id", "")
        await send(message)

    await error_response(fault, scope)(scope, receive, send_with_headers)


def middlewares() -> list[Middleware]:
    """Return what Ray's proxy puts around itself."""
    return [Middleware(ReplicaProxyMiddleware)]
