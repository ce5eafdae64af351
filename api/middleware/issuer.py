"""The keys of an OpenID Connect issuer: its discovery document names a key set, which is fetched and cached.

Requests go to the configured issuer only: a key set on another origin needs its address in RAGKV_OIDC_ISSUER, and
redirects are not followed. Keys are fetched again when they are an hour old, and when a token names a key that is not
among them. Two fetches are RETRY_SECONDS apart, so that made-up tokens cannot make the service ask the issuer without
end. While the issuer is away the keys that are known stay valid for a day.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx2
from joserfc.errors import JoseError
from joserfc.jwk import Key, KeySet

from ragkv.api.middleware.hosts import is_loopback
from ragkv.api.runtime.callers import IssuerAway
from ragkv.errors import ConfigError

FRESH_SECONDS = 3600.0
"""Age from which on keys are fetched again."""
KEPT_SECONDS = 24 * 3600.0
"""Age up to which keys are used while the issuer is away."""
RETRY_SECONDS = 10.0
"""Least time between two fetches."""
_TIMEOUT = 5.0
_MOST_BYTES = 2**20

logger = logging.getLogger("ragkv.api")


class IssuerKeys:
    """The keys of one issuer. It belongs to the event loop that first uses it."""

    def __init__(self, issuer: str, jwks_url: str = "", clock: Callable[[], float] = time.monotonic):
        """Take the addresses without asking them.

        Args:
            issuer: Address of the issuer, as tokens name it.
            jwks_url: Address of its key set; "": as its discovery document says.
            clock: Seconds that only grow.

        Raises:
            ConfigError: An address is not usable.
        """
        _check_address(issuer)
        if jwks_url:
            _check_address(jwks_url)
        self._issuer, self._jwks_url, self._clock = issuer, jwks_url, clock
        self._keys: KeySet | None = None
        self._fetched = self._tried = -1e9
        self._fetching: asyncio.Task[None] | None = None

    async def find(self, key_id: str | None) -> Key | None:
        """Return the key with this id; None if the issuer has none. Without an id it has to be the only key.

        Raises:
            IssuerAway: There are no keys, and the issuer does not answer.
        """
        age = self._clock() - self._fetched
        if age > KEPT_SECONDS:
            self._keys = None
        found = self._known(key_id)
        if found is None:
            await self._fetch()
            if self._keys is None:
                raise IssuerAway
            return self._known(key_id)
        if age > FRESH_SECONDS:
            self._start_fetch()  # this request need not wait
        return found

    def _known(self, key_id: str | None) -> Key | None:
        keys = list(self._keys.keys) if self._keys is not None else []
        if key_id is None:
            return keys[0] if len(keys) == 1 else None
        return next((key for key in keys if key.kid == key_id), None)

    async def _fetch(self) -> None:
        task = self._start_fetch()
        if task is not None:
            await asyncio.shield(task)  # others may wait for it, too

    def _start_fetch(self) -> asyncio.Task[None] | None:
        """Return the fetch that runs, or a new one; None if the last one was a moment ago."""
        if self._fetching is not None and not self._fetching.done():
            return self._fetching
        if self._clock() - self._tried < RETRY_SECONDS:
            return None
        self._tried = self._clock()
        self._fetching = asyncio.create_task(self._replace_keys())
        return self._fetching

    async def _replace_keys(self) -> None:
        """Fetch the keys. Where that fails, those that are known stay."""
        try:
            async with httpx2.AsyncClient(timeout=_TIMEOUT, follow_redirects=False) as http:
                url = self._jwks_url or self._read_discovery(await _get_json(http, _discovery_url(self._issuer)))
                self._keys = KeySet.import_key_set(await _get_json(http, url))
        except (httpx2.HTTPError, httpx2.InvalidURL, JoseError, KeyError, TypeError, ValueError) as error:
            logger.warning("the keys of the issuer %s could not be fetched: %s", self._issuer, _told(error))
        else:
            self._fetched = self._clock()

    def _read_discovery(self, document: Any) -> str:
        """Return the address of the key set. Raises ValueError."""
        if document["issuer"] != self._issuer:
            raise ValueError("its discovery document names another issuer")
        url = str(document["jwks_uri"])
        if _origin(url) != _origin(self._issuer):
            raise ValueError(
                "its keys are at another origin; write their address into RAGKV_OIDC_ISSUER if that is right"
            )
        return url


def _discovery_url(issuer: str) -> str:
    return f"{issuer.rstrip('/')}/.well-known/openid-configuration"


async def _get_json(http: httpx2.AsyncClient, url: str) -> Any:
    """Fetch a small JSON document. Raises ValueError or HTTPError."""
    body = b""
    async with http.stream("GET", url, headers={"Accept": "application/json"}) as response:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}")
        async for part in response.aiter_bytes():
            body += part
            if len(body) > _MOST_BYTES:
                raise ValueError("its answer is too large")
    return json.loads(body)


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def _check_address(url: str) -> None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not host or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"RAGKV_OIDC_ISSUER: {url!r} is no address such as https://login.example.org")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        raise ConfigError(f"RAGKV_OIDC_ISSUER: {url!r} has to begin with https://; http is for issuers of this machine")


def _told(error: Exception) -> str:
    """Return what the log says. What others' errors quote may come from the issuer."""
    return str(error) if type(error) is ValueError else type(error).__name__
