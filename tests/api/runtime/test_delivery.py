"""Delivery of an answer: a future that is done stays as it is, and a client that left is counted once."""

from __future__ import annotations

from concurrent.futures import Future

from ragkv.api.runtime.delivery import reject, resolve
from ragkv.engine.request import Request
from ragkv.types import AskOptions


def test_a_future_that_is_done_stays_as_it_is() -> None:
    cancelled, failed, given_ = Future[int](), Future[int](), Future[int]()
    cancelled.cancel()
    reject(failed, ValueError("first"))
    resolve(given_, 1)
    for future in (cancelled, failed, given_):
        resolve(future, 2)
        reject(future, ValueError("second"))
    assert cancelled.cancelled()
    assert str(failed.exception()) == "first"
    assert given_.result() == 1


def test_a_question_belongs_to_the_conversation_of_its_options() -> None:
    options = AskOptions(collection="notes", conversation="chat")
    assert Request("Who?", options).conversation == ("notes", "chat")
    assert Request("Who?", AskOptions(collection="notes")).conversation is None
