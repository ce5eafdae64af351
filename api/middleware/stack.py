"""What stands between the server and the routes, in order."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware

from ragkv.api.middleware.auth import AuthMiddleware
from ragkv.api.middleware.authenticator import Authenticator
from ragkv.api.middleware.body_limit import BodyBounds, BodyLimitMiddleware
from ragkv.api.middleware.hosts import HostMiddleware, Hosts
from ragkv.api.middleware.origins import Origins
from ragkv.api.middleware.rate_limit import RateLimitMiddleware

GZIP_BYTES = 1024
"""A smaller answer fits into a packet or two as it is."""
GZIP_LEVEL = 5
STREAMED = "application/x-ndjson"
"""Like event streams: lines wait for no more to compress."""


def add_middleware(
    app: FastAPI, authenticator: Authenticator, bounds: BodyBounds, *, hosts: Hosts, origins: Origins
) -> None:
    """Put the middleware around the routes of `app`, whose state is filled."""
    # The middleware added last runs first.
    app.add_middleware(
        GZipMiddleware,
        minimum_size=GZIP_BYTES,
        compresslevel=GZIP_LEVEL,
        exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, STREAMED),
    )
    app.add_middleware(BodyLimitMiddleware, bounds=bounds)
    app.add_middleware(RateLimitMiddleware, limiter=app.state.limiter)
    audit = app.state.engine_thread.audit
    app.add_middleware(AuthMiddleware, authenticator=authenticator, audit=audit, origins=origins)
    if origins.names:
        app.add_middleware(origins.around())
    app.add_middleware(HostMiddleware, hosts=hosts)
