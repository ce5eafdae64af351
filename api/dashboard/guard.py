"""Guard: how people come in with a browser where there are keys, and what a browser may do with the page.

With keys the page asks for one, once. What it gives the browser for it is a ticket: the tenant, until when, and a
signature made with the hashes of all keys. So every replica knows it, and it ends when the keys change. Scripts cannot
read it, and browsers send it only with requests that the service's own pages make.

The page is drawn by scripts that NiceGUI brings, which make functions out of templates; so its policy allows inline and
evaluated scripts of this service. Nothing may be loaded from, or sent to, anywhere else: an address in somebody's text
leads nowhere, whatever became of it.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.middleware.keys import Keys

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
_REFERRER = {"Referrer-Policy": "same-origin"}  # with none at all a browser hides where its forms come from
_KEPT = "private, max-age=604800, immutable"  # files whose address holds their version


@dataclass(frozen=True)
class LoginTickets:
    """Makes and knows tickets, of these keys alone."""

    keys: Keys

    def make(self, tenant: str) -> str:
        """A ticket of a tenant, for TICKET_SECONDS from now."""
        said = f"{tenant}.{int(time.time()) + TICKET_SECONDS}"
        return f"{said}.{self._sign(said)}"

    def whose(self, ticket: str) -> str | None:
        """The tenant of a ticket that holds; None for any other text."""
        said, _, signature = ticket.rpartition(".")
        tenant, _, until = said.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(said).encode()):
            return None
        return tenant if time.time() < int(until) and tenant in self.keys.tenants else None

    def _sign(self, said: str) -> str:
        secret = hashlib.sha256(" ".join(sorted(known for known, _ in self.keys.entries)).encode()).digest()
        return hmac.new(secret, said.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


class DashboardGuard:
    """ASGI middleware: responses below ROOT carry the page's policy, and its files may be kept by the browser."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or not below(scope["path"]):
            return await self.app(scope, receive, send)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", POLICY)
                headers.update(_REFERRER)
                if scope["path"].startswith(f"{ROOT}/_nicegui/") and message["status"] == 200:
                    headers["Cache-Control"] = _KEPT
            await send(message)

        await self.app(scope, receive, guarded)


def below(path: str) -> bool:
    """Whether a path is the dashboard's."""
    return path == ROOT or path.startswith(ROOT + "/")


def wants_page(headers: Headers) -> bool:
    """Whether a browser shows the response to somebody."""
    return "text/html" in headers.get("accept", "")


def form(wrong: bool = False) -> HTMLResponse:
    """The page that asks for a key. wrong: the last one was not known."""
    told = '<p role="alert">This key is not known here.</p>' if wrong else ""
    headers = {"WWW-Authenticate": 'Bearer realm="ragkv"', "Content-Security-Policy": _FORM_POLICY, **_REFERRER}
    return HTMLResponse(_FORM.replace("<!-- told -->", told), 401, headers)


_FORM = f"""<!doctype html>
<html lang="en"><head><title>ragkv</title><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ display: grid; place-items: center; min-height: 90vh; margin: 0 1rem }}
form {{ display: grid; gap: .75rem; width: min(24rem, 100%) }}
input, button {{ font: inherit; padding: .6rem .8rem; border-radius: .4rem; border: 1px solid #8888 }}
button {{ background: #0072b2; color: #fff; border: 0; cursor: pointer }}
[role=alert] {{ margin: 0 }}
</style></head><body><form method="post" action="{LOGIN}">
<h1>ragkv</h1><label for="key">API key</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<!-- told --><button>Open the dashboard</button></form></body></html>"""
