"""Who is next in the line: turns between tenants, order within one, and room for whoever comes new."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st

from api.runtime.request_queue import QueuedTask, RequestQueue, SessionName, reject, resolve


def task(tenant: str, turn: SessionName | None = None) -> QueuedTask:
    return QueuedTask(lambda engine: None, Future(), turn, tenant)


def drain(line: RequestQueue) -> list[QueuedTask]:
    taken = []
    while (first := line.take(lambda what: False, lambda what: True)) is not None:
        taken.append(first)
    return taken


def fill(line: RequestQueue, tenants: str) -> list[QueuedTask]:
    """One task for each letter that finds room."""
    joined = []
    for tenant in tenants:
        if not line.full(tenant):
            joined.append(task(tenant))
            line.join(joined[-1])
    return joined


def test_tenants_take_turns_and_each_ones_requests_are_served_as_they_came() -> None:
    line = RequestQueue(16)
    joined = fill(line, "aaaabbc")
    taken = drain(line)
    assert [each.tenant for each in taken] == list("abcabaa")
    for tenant in "abc":
        own = [each for each in joined if each.tenant == tenant]
        assert [each for each in taken if each.tenant == tenant] == own
    assert len(line) == 0


def test_a_tenant_that_was_served_waits_for_those_who_were_not() -> None:
    line = RequestQueue(16)
    fill(line, "aab")
    first = line.take(lambda what: False, lambda what: True)
    fill(line, "c")
    assert first is not None
    assert [first.tenant, *(each.tenant for each in drain(line))] == list("abac")


def test_one_tenant_of_several_fills_half_of_the_line_and_a_new_one_finds_room() -> None:
    line = RequestQueue(32, shared=True)
    assert len(fill(line, "a" * 40)) == 16
    assert len(fill(line, "b" * 40)) == 8
    assert [line.full(tenant) for tenant in "abc"] == [True, True, False]
    alone = RequestQueue(32)
    assert len(fill(alone, "a" * 40)) == 32


def test_whoever_steps_aside_holds_nobody_up_and_whoever_is_not_ready_does() -> None:
    line = RequestQueue(16)
    kept, free = task("a", ("default", "talk")), task("a")
    line.join(kept)
    line.join(free)
    assert line.take(lambda what: what.session is not None, lambda what: True) is free
    line.join(free)
    assert line.take(lambda what: False, lambda what: what.session is None) is None
    assert drain(line) == [kept, free]


def test_whoever_is_gone_leaves_a_place() -> None:
    line = RequestQueue(2)
    first, second = fill(line, "ab")
    assert line.full("c")
    first.future.cancel()
    line.sweep(lambda what: what.future.done())
    assert not line.full("c")
    assert drain(line) == [second]


@given(st.text(alphabet="abcde", max_size=60), st.integers(1, 24))
def test_nobody_waits_while_another_is_served_twice(tenants: str, capacity: int) -> None:
    line = RequestQueue(capacity, shared=True)
    joined = fill(line, tenants)
    assert len(joined) <= capacity
    ahead = {tenant: line.ahead(tenant) for tenant in "abcde"}
    taken = drain(line)
    assert Counter(map(id, taken)) == Counter(map(id, joined))
    for tenant in {each.tenant for each in joined}:
        places = [place for place, each in enumerate(taken) if each.tenant == tenant]
        for before, after in zip([-1, *places], places, strict=False):
            between = [each.tenant for each in taken[before + 1 : after]]
            assert len(between) == len(set(between))
        assert ahead[tenant] >= places[-1] + 1 - len({each.tenant for each in joined})


def test_a_future_that_was_settled_stays_as_it_is() -> None:
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
