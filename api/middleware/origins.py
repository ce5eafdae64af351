"""Origins whose pages may use the API from a browser (CORS): those of RAGKV_ORIGINS, by default none.

A preflight needs no key, because a browser cannot send one with it. A page has to send a key wherever the service has
keys: the dashboard's ticket is for its own pages. No cookie is allowed, so an origin gets what its user's key gets, and
nothing of the dashboard.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ragkv.config import ServingSettings
from ragkv.errors import ConfigError

ANY = "*"
METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")
EXPOSED = ("Location", "Retry-After", "WWW-Authenticate", "X-Ragkv-Marked", "X-Ragkv-Pages", "X-Request-ID")
"""Headers of responses that scripts may read, besides those that they always may."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#,@*]+")


@dataclass(frozen=True)
class Origins:
    """Origins that are allowed.

    Attributes:
        names: The origins, as browsers write them; `*` allows every one.
    """

    names: frozenset[str] = frozenset()

    def allows(self, origin: str) -> bool:
        """Return whether pages of an origin may use the API."""
        return ANY in self.names or origin in self.names

    def around(self) -> Callable[[ASGIApp], CORSMiddleware]:
        """Return what puts the middleware around an application."""
        return partial(
            CORSMiddleware,
            allow_origins=sorted(self.names),
            allow_methods=METHODS,
            allow_headers=(ANY,),
            allow_private_network=True,
            expose_headers=EXPOSED,
        )


def read_origins(settings: ServingSettings) -> Origins:
    """Read the origins from the settings: comma separated, `*` for every one.

    Raises:
        ConfigError: An entry is no origin.
    """
    names = {name.strip().lower().removesuffix("/") for name in settings.origins.split(",") if name.strip()}
    for name in names:
        if name != ANY and not _ORIGIN.fullmatch(name):
            raise ConfigError(f"RAGKV_ORIGINS: {name!r} is no origin such as https://chat.example.org, nor `*`")
    return Origins(frozenset(names))
