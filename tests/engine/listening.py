"""A listener that completes a future, and requests that have it."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from ragkv.engine.request import AnswerListener, KVMapOf, Request
from ragkv.errors import Expired
from ragkv.report import Answer


class FutureListener(AnswerListener):
    """Completes a future. Whoever cancels it waits no more."""

    def __init__(self) -> None:
        self.future: Future[Answer] = Future()

    def expired(self) -> None:
        self.failed(Expired())

    def gone(self) -> bool:
        return self.future.done()

    def answered(self, answer: Answer, full_ms: float, draw_map: KVMapOf) -> None:
        self.future.set_result(answer)

    def failed(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # it was cancelled
            self.future.set_exception(error)


def future_of(request: Request) -> Future[Answer]:
    """The future of a request with a `FutureListener`."""
    assert isinstance(request.listener, FutureListener)
    return request.listener.future
