"""Account: what is known of one request while it is served. Its log line and its trace are made of it.

The request's own task has it from the middleware on (`bind`), the engine's thread while it works for the request
(`at_work`); whatever is logged there says whose it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ragkv.report import Report
from ragkv.timing import StepTimer


@dataclass
class RequestContext:
    """id, tenant: of the request, "" where there is none · fault: the code of the problem it was answered with ·
    watch: of its question, once that was read · report: of its answer, once that is there."""

    id: str = ""
    tenant: str = ""
    fault: str = ""
    timer: StepTimer | None = None
    report: Report | None = None


_CURRENT: ContextVar[RequestContext | None] = ContextVar("account", default=None)


def current() -> RequestContext:
    """Of the request that this is done for; one that nobody keeps where it is for none."""
    return _CURRENT.get() or RequestContext()


def bind(account: RequestContext) -> None:
    """From here on this task works for it. To its end: the server's line about a fault comes after the last of ours."""
    _CURRENT.set(account)


@contextmanager
def working_for(account: RequestContext) -> Iterator[None]:
    """In here this thread works for it."""
    token = _CURRENT.set(account)
    try:
        yield
    finally:
        _CURRENT.reset(token)
