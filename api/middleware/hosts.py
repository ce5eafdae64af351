"""Host middleware: the names under which the service answers, so that no web page can reach it by another name.

A page of `evil.example` can let its own name point to 127.0.0.1 (DNS rebinding). To the browser, requests of that page
are then requests to its own origin: it may send them and read the responses. Only the header `Host` shows the name.

Without API keys the service therefore answers to these names only:

    localhost, *.localhost     browsers resolve them to this machine, whatever a DNS server says
    127.0.0.0/8, ::1           an address is no name, so nobody can point it elsewhere
    the connection's address   the address that the client connected to: probes of Kubernetes send the pod's
    RAGKV_HOSTS                and RAGKV_HOST, and the host of RAGKV_PUBLIC_URL

With keys a foreign page has no key, so every name is accepted, unless RAGKV_HOSTS is set. Then the names above count.

A `Host` that RFC 9110 does not allow is refused with and without keys: two programs may take two names from it. Names
are compared as a whole, never by what they begin with.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ragkv.api.errors import Fault, error_response
from ragkv.config import ServingSettings
from ragkv.errors import ConfigError

ANY = "*"
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|[0-9a-f.]*+:[0-9a-f:.]*")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|((?:[a-z0-9._~!$&'()*+,;=-]|%[0-9a-f]{2})+))(?::([0-9]{0,5}))?")
"""uri-host [":" port] of RFC 3986, without addresses of future versions and zones."""
_LOCALHOST = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*localhost")
_MOST_PORT = 65_535
_MALFORMED = Fault(400, "the header Host is no name or address with an optional port", "bad_host")
_UNKNOWN = Fault(
    403,
    "this service does not answer under the name in the header Host; whoever runs it can add the name to RAGKV_HOSTS",
    "unknown_host",
)


@dataclass(frozen=True)
class Hosts:
    """The names under which the service answers.

    Attributes:
        names: Names and addresses besides those of this machine, in lower case; None accepts every name.
    """

    names: frozenset[str] | None

    def fault_of(self, scope: Scope) -> Fault | None:
        """Return why the request is refused; None if it names one of the hosts. One without a `Host` has no browser."""
        headers = Headers(scope=scope).getlist("host")
        if not any(headers):
            return None
        name = parse_host(headers[0]) if len(headers) == 1 else None
        if name is None:
            return _MALFORMED
        reached = (scope.get("server") or ("",))[0]
        known = self.names is None or name in self.names or is_loopback(name) or (_is_address(name) and name == reached)
        return None if known else _UNKNOWN


def read_hosts(settings: ServingSettings, keys: bool) -> Hosts:
    """Read the names from the settings.

    Args:
        settings: `hosts` (names and addresses, comma separated; `*` accepts every name), `host` and `public_url`.
        keys: Whether the service has API keys.

    Raises:
        ConfigError: An entry is no name, or the URL names no host.
    """
    names = {name.strip().lower() for name in settings.hosts.split(",") if name.strip()}
    for name in names:
        if name != ANY and not _NAME.fullmatch(name):
            raise ConfigError(f"RAGKV_HOSTS: {name!r} is no host name; give names without http:// and without a port")
    own = {settings.host.lower(), *_host_of(settings.public_url)}
    return Hosts(None if ANY in names or (keys and not names) else frozenset(map(_shortest, names | own)))


def _host_of(url: str) -> Iterable[str]:
    if not url:
        return ()
    host = urlsplit(url).hostname
    if host is None or not url.startswith(("http://", "https://")):
        raise ConfigError(f"RAGKV_PUBLIC_URL: {url!r} is no address such as https://ragkv.example.org")
    return (host,)


class HostMiddleware:
    """ASGI middleware that refuses requests under other names, before anything else looks at them."""

    def __init__(self, app: ASGIApp, hosts: Hosts):
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400 or 403."""
        if scope["type"] == "lifespan" or (fault := self.hosts.fault_of(scope)) is None:
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        await error_response(fault, scope)(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address always means this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return _LOCALHOST.fullmatch(host) is not None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shortest(name: str) -> str:
    """Return an address as `parse_host` writes it, and a name without the dot at its end."""
    return str(ipaddress.ip_address(name)) if _is_address(name) else name.removesuffix(".")


def parse_host(header: str) -> str | None:
    """Return the name in a `Host` header: without port, brackets of IPv6 and the dot at its end, in lower case.

    Returns:
        The name, an address in its shortest form; None if the header is malformed.
    """
    host = _HOST.fullmatch(header.lower()) if header.isascii() else None
    if host is None or int(host[3] or 0) > _MOST_PORT:
        return None
    try:
        return str(ipaddress.IPv6Address(host[1])) if host[1] else host[2].removesuffix(".") or None
    except ValueError:
        return None
