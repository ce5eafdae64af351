"""Path middleware: path and method of a request as the routes know them, whatever proxy stands before the service.

    RAGKV_ROOT_PATH      a proxy serves the service below this path, and may leave it in requests or take it off
    X-Forwarded-Prefix   a proxy names the path, and has taken it off: what a client says takes nothing off
    slash at the end     /v1/models/ is /v1/models: a redirect would lose the body of some clients, and the scheme of
                         others
    /dashboard           is /dashboard/
    HEAD                 is a GET whose body is not sent (head.py)

It is the outermost middleware, so keys, roles and limits are decided for the path that is answered. Addresses in
responses get the prefix again: `Location` here, those in pages by `prefix_of` (dashboard/guard.py).
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.api.dashboard.guard import ROOT, is_dashboard_path
from ragkv.api.middleware.body_limit import MCP
from ragkv.api.middleware.head import answer_head
from ragkv.config import ServingSettings
from ragkv.errors import ConfigError

HEADER = "x-forwarded-prefix"
_PREFIX = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)+")


def read_prefix(settings: ServingSettings) -> str:
    """Return the prefix that the settings name; "" for none.

    Raises:
        ConfigError: It is no path.
    """
    given = settings.root_path or urlsplit(settings.public_url).path
    prefix = _plain(given)
    if prefix is None:
        raise ConfigError(f"RAGKV_ROOT_PATH: {given!r} is no path such as /ragkv")
    return prefix


class PathMiddleware:
    """ASGI middleware around all others."""

    def __init__(self, app: ASGIApp, prefix: str):
        """Wrap `app`, which is served below a prefix, "" for none, unless a proxy names another one."""
        self.app, self.prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with the path that the routes know."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        named = _plain(Headers(scope=scope).get(HEADER, "").partition(",")[0].strip())
        prefix = named or self.prefix
        kept = [pair for pair in scope["headers"] if pair[0].lower() != HEADER.encode()]
        headers = [*kept, (HEADER.encode(), prefix.encode())] if prefix else kept  # NiceGUI reads it
        state = {**scope.get("state", {}), "prefix": prefix}
        scope = {**scope, "headers": headers, "state": state, "path": _inside(scope["path"], self.prefix)}
        if scope["type"] == "http":
            scope["path"] = _without_slash(scope)

        async def send_with_prefix(message: Message) -> None:
            if message["type"] == "http.response.start" and prefix:
                location = (found := MutableHeaders(scope=message)).get("location", "")
                if location.startswith("/") and not location.startswith(("//", prefix + "/")):
                    found["location"] = prefix + location
            await send(message)

        if scope["type"] == "http" and scope["method"] == "HEAD":
            return await answer_head(self.app, scope, receive, send_with_prefix)
        await self.app(scope, receive, send_with_prefix)


def _plain(path: str) -> str | None:
    """Return a path without slashes at its end; None if it is none that a proxy may serve a service below."""
    prefix = f"/{path.strip('/')}" if path.strip("/") else ""
    return prefix if not prefix or _PREFIX.fullmatch(prefix) else None


def _inside(path: str, prefix: str) -> str:
    if prefix and (path == prefix or path.startswith(prefix + "/")):
        return path[len(prefix) :] or "/"
    return path


def _without_slash(scope: Scope) -> str:
    """Return the path of a route, for one with a slash behind it. An id of a document may be or end with a slash."""
    path: str = scope["path"]
    if path == ROOT:
        return f"{ROOT}/"
    bare = path.removesuffix("/")
    if not bare or bare == path or is_dashboard_path(path):
        return path
    app = scope["app"]
    if bare == MCP or bare in app.openapi()["paths"]:
        return bare
    known = any(route.matches(scope)[0] is not Match.NONE for route in app.router.routes)
    return path if known else bare
