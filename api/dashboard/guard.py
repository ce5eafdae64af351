"""Browser access to the dashboard: login tickets, and the headers of its pages.

If the service has keys, the page asks for one, once, and gives the browser a ticket for it. A token of the issuer will
do, too. A ticket holds the caller, its expiry, and a signature made with the hashes of all keys. Every replica can
therefore verify it, and it becomes invalid when the keys change. Scripts cannot read the cookie, and browsers send it
only with requests of the service's own pages.

NiceGUI's scripts draw the page and compile templates to functions, so the content security policy allows inline and
evaluated scripts of this service. Nothing may be loaded from another origin or sent to one. An address in the text of a
user therefore leads nowhere, even if it were interpreted as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.tenants import Tenant

ROOT = "/dashboard"
LOGIN = f"{ROOT}/login"
COOKIE = "ragkv_ticket"
TICKET_SECONDS = 12 * 3600
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "font-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
_FORM_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_REFERRER = {"Referrer-Policy": "same-origin"}  # without a referrer a browser hides the origin of a form
_CACHED = "private, max-age=604800, immutable"  # the URL of a file contains its version


@dataclass(frozen=True)
class LoginTickets:
    """Issues and verifies login tickets.

    Attributes:
        secret: Signs them.
        tenants: Tenants that may use the service.
    """

    secret: bytes
    tenants: frozenset[str]

    def issue(self, caller: Caller) -> str:
        """Issue a ticket of a caller that is valid for TICKET_SECONDS, but no longer than what they showed."""
        expiry = int(min(time.time() + TICKET_SECONDS, caller.expires))
        subject = base64.urlsafe_b64encode(caller.subject.encode()).decode()
        payload = f"{caller.tenant.name}.{caller.role}.{subject}.{expiry}"
        return f"{payload}.{self._sign(payload)}"

    def caller_of(self, ticket: str) -> Caller | None:
        """Return the caller of a valid ticket; None for any other text."""
        payload, _, signature = ticket.rpartition(".")
        if not hmac.compare_digest(signature.encode("utf-8", "surrogatepass"), self._sign(payload).encode()):
            return None
        tenant, role, subject, expiry = payload.split(".")
        named = base64.urlsafe_b64decode(subject).decode()
        caller = Caller(Tenant(tenant), named, "writer" if role == "writer" else "reader", float(expiry))
        return None if caller.expired or tenant not in self.tenants else caller

    def _sign(self, payload: str) -> str:
        return hmac.new(self.secret, payload.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


class DashboardHeadersMiddleware:
    """ASGI middleware that adds the content security policy of the page, and lets browsers cache its files."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and set headers if the path is the dashboard's."""
        if scope["type"] != "http" or not is_dashboard_path(scope["path"]):
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", POLICY)
                headers.update(_REFERRER)
                if scope["path"].startswith(f"{ROOT}/_nicegui/") and message["status"] == 200:
                    headers["Cache-Control"] = _CACHED
            await send(message)

        await self.app(scope, receive, send_with_headers)


def is_dashboard_path(path: str) -> bool:
    """Return whether a path belongs to the dashboard."""
    return path == ROOT or path.startswith(ROOT + "/")


def accepts_html(headers: Headers) -> bool:
    """Return whether the client is a browser that shows the response."""
    return "text/html" in headers.get("accept", "")


def prefix_of(scope: Scope) -> str:
    """Return the path below which the client of a request sees the service; "" for none."""
    prefix: str = scope.get("state", {}).get("prefix", "")
    return prefix


def login_page(prefix: str, wrong: bool = False) -> HTMLResponse:
    """Build the page that asks for a key, or for a token.

    Args:
        prefix: Result of `prefix_of`.
        wrong: Whether to say that the last one was not known.
    """
    alert = '<p role="alert">This API key is not known.</p>' if wrong else ""
    headers = {"WWW-Authenticate": 'Bearer realm="ragkv"', "Content-Security-Policy": _FORM_POLICY, **_REFERRER}
    page = _FORM.replace("<!-- alert -->", alert).replace("<!-- prefix -->", prefix)
    return HTMLResponse(page, 401, headers)


_FORM = f"""<!doctype html>
<html lang="en"><head><title>ragkv</title><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ display: grid; place-items: center; min-height: 90vh; margin: 0 1rem }}
form {{ display: grid; gap: .75rem; width: min(24rem, 100%) }}
input, button {{ font: inherit; padding: .6rem .8rem; border-radius: .4rem; border: 1px solid #8888 }}
button {{ background: #0072b2; color: #fff; border: 0; cursor: pointer }}
[role=alert] {{ margin: 0 }}
</style></head><body><form method="post" action="<!-- prefix -->{LOGIN}">
<h1>ragkv</h1><label for="key">API key or token</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<!-- alert --><button>Open the dashboard</button></form></body></html>"""
