"""`/mcp`: the MCP server over streamable HTTP, behind the keys, tenants and limits of the API.

It is stateless: every POST is complete in itself, and its response may be a stream. So a restart ends no session, and
any process can answer. There is nothing to GET.
"""

from __future__ import annotations

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from ragkv.api.middleware.body_limit import MCP, BodyBounds
from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.mcp_server import Context, make_server
from ragkv.api.runtime.service_backend import ServiceBackend


def make_sessions(bounds: BodyBounds) -> StreamableHTTPSessionManager:
    """Make what handles the requests. It runs once, in the lifespan of the application.

    Host and origin are checked by the middleware, so the SDK's own check is off.
    """
    limit = bounds.of({"path": MCP})
    return StreamableHTTPSessionManager(make_server(_backend), stateless=True, max_request_body_size=limit)


def _backend(context: Context) -> ServiceBackend:
    request = context.request
    assert isinstance(request, Request)
    return ServiceBackend(request.app.state, getattr(request.state, "caller", Caller()))


class McpRoute(Route):
    """The route, which the log and the metrics name by its path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the request, and say which route it is."""
        match, child = super().matches(scope)
        return match, {**child, "route": self}


class McpEndpoint:
    """The ASGI application at /mcp."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request of the protocol. The lifespan of the application runs what handles it."""
        sessions: StreamableHTTPSessionManager = scope["app"].state.mcp_sessions
        await sessions.handle_request(scope, receive, send)


route = McpRoute(MCP, McpEndpoint(), methods=["POST"], include_in_schema=False)
