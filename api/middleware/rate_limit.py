"""Rate-limit middleware: answers 429 to a tenant that used up a quota, and tells every tenant its quotas.

It is inside authentication, so the tenant is known, and outside the body limit, so bytes are counted as they arrive. It
concerns the API (`/v1/`, and Ollama's `/api/`) and the MCP server (`/mcp`): the dashboard, health and metrics stay
reachable. What a request to `/mcp` uses is known when its tool is called (runtime/service_backend.py).
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.api.errors import Fault, error_response
from ragkv.api.middleware.body_limit import MCP
from ragkv.api.middleware.inference_paths import INFERENCE
from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.rate_limits import Exhausted, RateLimiter, Resource

PREFIXES = ("/v1/", "/api/")
DOCUMENTS = "/v1/documents"


class RateLimitMiddleware:
    """ASGI middleware that counts and limits the requests of each tenant."""

    def __init__(self, app: ASGIApp, limiter: RateLimiter):
        self.app, self.limiter = app, limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 429."""
        if scope["type"] != "http" or not (scope["path"].startswith(PREFIXES) or scope["path"] == MCP):
            return await self.app(scope, receive, send)
        tenant: str = scope.get("state", {}).get("caller", Caller()).tenant.name
        resources = _resources(scope)

        async def send_with_quotas(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self.limiter.headers(tenant))
            await send(message)

        exhausted = self.limiter.admit(tenant, resources)
        if exhausted is not None:
            return await error_response(quota_fault(exhausted), scope)(scope, receive, send_with_quotas)

        async def receive_and_count() -> Message:
            message = await receive()
            if "bytes" in resources and (size := len(message.get("body", b""))):
                self.limiter.charge(tenant, "bytes", size)
            return message

        await self.app(scope, receive_and_count, send_with_quotas)


def _resources(scope: Scope) -> frozenset[Resource]:
    """Return what a request may use."""
    path, method = scope["path"], scope["method"]
    if method == "POST" and path in INFERENCE:
        return frozenset({"tokens"})
    if method in ("POST", "PUT") and (path == DOCUMENTS or path.startswith(DOCUMENTS + "/")):
        return frozenset({"bytes"})
    return frozenset()


def quota_fault(exhausted: Exhausted) -> Fault:
    """Return the answer to a tenant that used up a quota."""
    what = {"requests": "requests", "tokens": "tokens", "bytes": "bytes of documents"}[exhausted.resource]
    detail = f"the {what} of this minute are used up; come back in {exhausted.retry_after} s"
    return Fault(429, detail, "rate_limited", {"Retry-After": str(exhausted.retry_after)})
