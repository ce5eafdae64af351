"""The order of the queue: tenants take turns, each in order, and a new tenant finds room."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st

from api.runtime.request_queue import QueuedQuestion, QueuedTask, RequestQueue, SessionName, reject, resolve
from ragkv.types import AskOptions


def task(tenant: str, session: SessionName | None = None) -> QueuedTask:
    return QueuedTask(lambda engine: None, Future(), session, tenant)


def drain(queue: RequestQueue) -> list[QueuedTask]:
    taken = []
    while (first := queue.take(lambda request: False, lambda request: True)) is not None:
        taken.append(first)
    return taken


def fill(queue: RequestQueue, tenants: str) -> list[QueuedTask]:
    """One task for each letter that finds room."""
    queued = []
    for tenant in tenants:
        if not queue.full(tenant):
            queued.append(task(tenant))
            queue.enqueue(queued[-1])
    return queued


def test_tenants_take_turns_and_each_ones_requests_are_served_as_they_came() -> None:
    queue = RequestQueue(16)
    queued = fill(queue, "aaaabbc")
    taken = drain(queue)
    assert [each.tenant for each in taken] == list("abcabaa")
    for tenant in "abc":
        own = [each for each in queued if each.tenant == tenant]
        assert [each for each in taken if each.tenant == tenant] == own
    assert len(queue) == 0


def test_a_tenant_that_was_served_waits_for_those_who_were_not() -> None:
    queue = RequestQueue(16)
    fill(queue, "aab")
    first = queue.take(lambda request: False, lambda request: True)
    fill(queue, "c")
    assert first is not None
    assert [first.tenant, *(each.tenant for each in drain(queue))] == list("abac")


def test_one_tenant_of_several_fills_half_of_the_queue_and_a_new_one_finds_room() -> None:
    queue = RequestQueue(32, shared=True)
    assert len(fill(queue, "a" * 40)) == 16
    assert len(fill(queue, "b" * 40)) == 8
    assert [queue.full(tenant) for tenant in "abc"] == [True, True, False]
    alone = RequestQueue(32)
    assert len(fill(alone, "a" * 40)) == 32


def test_a_request_that_is_aside_is_passed_over_and_one_that_is_not_ready_is_waited_for() -> None:
    queue = RequestQueue(16)
    kept, free = task("a", ("default", "chat")), task("a")
    queue.enqueue(kept)
    queue.enqueue(free)
    assert queue.take(lambda request: request.session is not None, lambda request: True) is free
    queue.enqueue(free)
    assert queue.take(lambda request: False, lambda request: request.session is None) is None
    assert drain(queue) == [kept, free]


def test_an_abandoned_request_leaves_its_place() -> None:
    queue = RequestQueue(2)
    first, second = fill(queue, "ab")
    assert queue.full("c")
    first.future.cancel()
    queue.sweep(lambda request: request.future.done())
    assert not queue.full("c")
    assert drain(queue) == [second]


@given(st.text(alphabet="abcde", max_size=60), st.integers(1, 24))
def test_no_tenant_waits_while_another_is_served_twice(tenants: str, capacity: int) -> None:
    queue = RequestQueue(capacity, shared=True)
    queued = fill(queue, tenants)
    assert len(queued) <= capacity
    ahead = {tenant: queue.ahead(tenant) for tenant in "abcde"}
    taken = drain(queue)
    assert Counter(map(id, taken)) == Counter(map(id, queued))
    for tenant in {each.tenant for each in queued}:
        places = [place for place, each in enumerate(taken) if each.tenant == tenant]
        for before, after in zip([-1, *places], places, strict=False):
            between = [each.tenant for each in taken[before + 1 : after]]
            assert len(between) == len(set(between))
        assert ahead[tenant] >= places[-1] + 1 - len({each.tenant for each in queued})


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
    assert QueuedQuestion("Who?", options, Future()).session == ("notes", "chat")
    assert QueuedQuestion("Who?", AskOptions(collection="notes"), Future()).session is None


def test_a_refused_request_is_told_when_the_queue_will_be_served() -> None:
    queue = RequestQueue(4)
    fill(queue, "aaab")
    assert queue.retry_after("a") == 4, "one second for each before anything was served"
    for _ in range(50):
        queue.record_seconds(0.01)
    assert queue.retry_after("a") == 1
    for _ in range(50):
        queue.record_seconds(100.0)
    assert queue.retry_after("a") == 60


def test_the_questions_that_are_likely_to_come_next_are_told() -> None:
    queue = RequestQueue(16)
    fill(queue, "a")
    for tenant, question in (("a", "A1"), ("b", "B1"), ("a", "A2"), ("b", "B2")):
        queue.enqueue(QueuedQuestion(question, AskOptions(), Future(), tenant))
    assert queue.questions(0) == []
    assert queue.questions(3) == ["B1", "A1"], "of the first three requests one is a task"
    assert queue.questions(9) == ["B1", "A1", "B2", "A2"]
    assert len(queue) == 5
