"""HEAD wherever GET is: the headers of that answer, without its body.

Link checkers, uptime monitors and some proxies ask so. Everything behind the outermost middleware sees a GET; the log
and the metrics know better (`method_of`).
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class _Enough(OSError):
    """The headers of a stream are sent, and its body has no reader."""


def method_of(scope: Scope) -> str:
    """Return the method that the client sent."""
    method: str = scope.get("state", {}).get("method") or scope["method"]
    return method


async def answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a HEAD as a GET without its body.

    Args:
        app: What answers a GET.
        scope: Of the request. Its state belongs to this request alone.
        receive: Of the request.
        send: Of the request.
    """
    ended = False

    async def send_head(message: Message) -> None:
        nonlocal ended
        if message["type"] == "http.response.start":
            await send(message)
        elif not ended:
            ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        if message["type"] == "http.response.body" and message.get("more_body", False):
            raise _Enough

    scope["state"]["method"] = "HEAD"
    try:
        await app({**scope, "method": "GET"}, receive, send_head)
    except Exception:
        if not ended:
            raise
