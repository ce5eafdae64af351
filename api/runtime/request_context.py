"""What is known of one HTTP request while it is served. Its log line and its trace are made from it.

`bind` sets the context of the request's own task. `working_for` sets it in the engine's thread while that works for the
request. Log lines written in either carry the id of the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ragkv.report import Report

if TYPE_CHECKING:
    from ragkv.timing import StepTimer  # imports torch, which `ragkv mcp --url` does without


Origin = Literal["api", "page"]
"""Where a question is asked: with the API, or on the page of the dashboard."""


@dataclass
class RequestContext:
    """The context of one request.

    Attributes:
        id: Id of the request; empty where there is none.
        tenant: Its tenant; empty where there is none.
        fault: Code of the problem it was answered with.
        timer: Of its question, once that is prefilled.
        report: Of its answer, once that is there.
        origin: Where its question is asked.
    """

    id: str = ""
    tenant: str = ""
    fault: str = ""
    timer: StepTimer | None = None
    report: Report | None = None
    origin: Origin = "api"


_CURRENT: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)


def current() -> RequestContext:
    """Return the context of the current request; outside of any, a new one that nobody keeps."""
    return _CURRENT.get() or RequestContext()


def bind(context: RequestContext) -> None:
    """Make this the context of the running task until its end: the server logs a fault after our last line."""
    _CURRENT.set(context)


@contextmanager
def working_for(context: RequestContext) -> Iterator[None]:
    """Make this the current context inside the `with` block."""
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)
