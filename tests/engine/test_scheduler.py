"""Which request is next: tenants take turns, each in order, a new tenant finds room; passes share a bounded forward."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from ragkv.engine.scheduler import TenantQueue, next_group


@dataclass(eq=False)
class Asked:
    """A request that waits, or one that is being prefilled."""

    tenant: str = ""
    conversation: str = ""
    left: bool = False
    rows: int = 1
    pass_id: int = 0
    alone: bool = False


def drain(queue: TenantQueue[Asked]) -> list[Asked]:
    taken = []
    while (first := queue.take(lambda request: False, lambda request: True)) is not None:
        taken.append(first)
    return taken


def fill(queue: TenantQueue[Asked], tenants: str) -> list[Asked]:
    """One request for each letter that finds room."""
    queued = []
    for tenant in tenants:
        if not queue.full(tenant):
            queued.append(Asked(tenant))
            queue.enqueue(queued[-1])
    return queued


def test_tenants_take_turns_and_each_ones_requests_are_served_as_they_came() -> None:
    queue = TenantQueue[Asked](16)
    queued = fill(queue, "aaaabbc")
    taken = drain(queue)
    assert [each.tenant for each in taken] == list("abcabaa")
    for tenant in "abc":
        own = [each for each in queued if each.tenant == tenant]
        assert [each for each in taken if each.tenant == tenant] == own
    assert len(queue) == 0


def test_a_tenant_that_was_served_waits_for_those_who_were_not() -> None:
    queue = TenantQueue[Asked](16)
    fill(queue, "aab")
    first = queue.take(lambda request: False, lambda request: True)
    fill(queue, "c")
    assert first is not None
    assert [first.tenant, *(each.tenant for each in drain(queue))] == list("abac")


def test_one_tenant_of_several_fills_half_of_the_queue_and_a_new_one_finds_room() -> None:
    queue = TenantQueue[Asked](32, shared=True)
    assert len(fill(queue, "a" * 40)) == 16
    assert len(fill(queue, "b" * 40)) == 8
    assert [queue.full(tenant) for tenant in "abc"] == [True, True, False]
    alone = TenantQueue[Asked](32)
    assert len(fill(alone, "a" * 40)) == 32


def test_a_request_that_is_aside_is_passed_over_and_one_that_is_not_ready_is_waited_for() -> None:
    queue = TenantQueue[Asked](16)
    kept, free = Asked("a", conversation="chat"), Asked("a")
    queue.enqueue(kept)
    queue.enqueue(free)
    assert queue.take(lambda request: bool(request.conversation), lambda request: True) is free
    queue.enqueue(free)
    assert queue.take(lambda request: False, lambda request: not request.conversation) is None
    assert drain(queue) == [kept, free]


def test_an_abandoned_request_leaves_its_place() -> None:
    queue = TenantQueue[Asked](2)
    first, second = fill(queue, "ab")
    assert queue.full("c")
    first.left = True
    queue.sweep(lambda request: request.left)
    assert not queue.full("c")
    assert drain(queue) == [second]


@given(st.text(alphabet="abcde", max_size=60), st.integers(1, 24))
def test_no_tenant_waits_while_another_is_served_twice(tenants: str, capacity: int) -> None:
    queue = TenantQueue[Asked](capacity, shared=True)
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


def test_a_refused_request_is_told_when_the_queue_will_be_served() -> None:
    queue = TenantQueue[Asked](4)
    fill(queue, "aaab")
    assert queue.retry_after("a") == 4, "one second for each before anything was served"
    for _ in range(50):
        queue.record_seconds(0.01)
    assert queue.retry_after("a") == 1
    for _ in range(50):
        queue.record_seconds(100.0)
    assert queue.retry_after("a") == 60


def test_the_requests_that_are_likely_to_come_next_are_told() -> None:
    queue = TenantQueue[Asked](16)
    first, a1, b1, a2, b2 = fill(queue, "aabab")
    assert queue.first(0) == []
    assert queue.first(3) == [first, b1, a1]
    assert queue.first(9) == [first, b1, a1, b2, a2]
    assert len(queue) == 5


def prefilling(*rows: int) -> list[Asked]:
    """Requests whose next passes have so many rows, each its own pass."""
    return [Asked(rows=count, pass_id=number) for number, count in enumerate(rows)]


def test_passes_share_a_forward_as_long_as_they_fit_in_the_order_in_which_they_began() -> None:
    one, two, *_ = started = prefilling(20, 20, 20, 5)
    assert next_group(started, rows=0, most=50) == [one, two], "the fourth would fit, and does not overtake the third"
    assert next_group(started, rows=10, most=50) == [one, two]
    assert next_group(started, rows=11, most=50) == [one]
    assert next_group([], rows=3, most=50) == []


def test_a_pass_of_more_rows_than_a_forward_may_have_runs_by_itself() -> None:
    large, small = prefilling(500, 1)
    assert next_group([large, small], rows=7, most=50) == [large]


def test_a_request_without_a_pass_is_passed_over() -> None:
    paused, ready = prefilling(0, 30)
    assert next_group([paused, ready], rows=0, most=50) == [ready]


def test_requests_that_wait_for_one_pass_go_on_together_and_its_rows_count_once() -> None:
    one, other, two, last = started = prefilling(30, 30, 30, 30)
    two.pass_id = last.pass_id = one.pass_id
    assert next_group(started, rows=0, most=50) == [one, two, last]
    assert next_group([one, two, other], rows=0, most=60) == [one, two, other]


def test_a_request_whose_forward_failed_runs_without_others() -> None:
    one, two, three = started = prefilling(1, 1, 1)
    two.alone = True
    assert next_group(started, rows=0, most=50) == [one]
    assert next_group([two, three], rows=0, most=50) == [two]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4), st.booleans()), max_size=12), st.integers(0, 40))
def test_a_group_is_bounded_in_order_and_never_empty_while_anything_is_ready(
    drawn: list[tuple[int, int, bool]], rows: int
) -> None:
    rows_of = {pass_id: count for count, pass_id, _ in drawn}  # a pass has its rows, whoever waits for it
    alone_of = {pass_id: alone for _, pass_id, alone in drawn}  # who waited for it when it failed runs it alone
    started = [Asked(rows=rows_of[pass_id], pass_id=pass_id, alone=alone_of[pass_id]) for _, pass_id, _ in drawn]
    group = next_group(started, rows, most=50)
    passes = {request.pass_id for request in group}
    assert bool(group) == any(request.rows for request in started)
    assert len(passes) <= 1 or rows + sum(rows_of[pass_id] for pass_id in passes) <= 50
    assert len(passes) <= 1 or not any(request.alone for request in group)
    assert {id(request) for request in group} == {
        id(request) for request in started if request.rows and request.pass_id in passes
    }
    if group:
        assert group[0] is next(request for request in started if request.rows)


def test_the_scheduler_imports_neither_torch_nor_a_web_framework() -> None:
    asked = "import sys, ragkv.engine.scheduler; print(sorted({'torch', 'fastapi', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
