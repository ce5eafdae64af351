"""Token buckets: a minute's quota may be spent at once and comes back evenly; each tenant has its own."""

from __future__ import annotations

import pytest

from ragkv.api.runtime.rate_limits import LABELLED, OTHERS, Exhausted, RateLimiter, TenantLimits


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_quota_is_spent_and_comes_back_evenly(clock: Clock) -> None:
    limiter = RateLimiter(TenantLimits(requests=3), {}, clock)
    assert [limiter.admit("a", ()) for _ in range(3)] == [None] * 3
    assert limiter.admit("a", ()) == Exhausted("requests", 20)
    clock.now += 19
    assert limiter.admit("a", ()) == Exhausted("requests", 1)
    clock.now += 1
    assert limiter.admit("a", ()) is None
    clock.now += 3600
    assert [limiter.admit("a", ()) is None for _ in range(4)] == [True, True, True, False], "no more than a minute's"


def test_what_costs_more_than_is_left_is_paid_by_waiting(clock: Clock) -> None:
    limiter = RateLimiter(TenantLimits(tokens=60), {}, clock)
    assert limiter.admit("a", {"tokens"}) is None
    limiter.charge("a", "tokens", 150)
    assert limiter.admit("a", {"tokens"}) == Exhausted("tokens", 91)
    assert limiter.admit("a", ()) is None, "a request that uses no tokens does not wait for them"
    clock.now += 91
    assert limiter.admit("a", {"tokens"}) is None


def test_tenants_do_not_share_quotas_and_may_have_their_own(clock: Clock) -> None:
    limiter = RateLimiter(TenantLimits(requests=1, tokens=5), {"b": {"requests": 2}, "c": {"requests": 0}}, clock)
    assert limiter.limits("b") == TenantLimits(requests=2, tokens=5)
    admitted = {name: [limiter.admit(name, ()) is None for _ in range(3)] for name in ("a", "b", "c")}
    assert admitted == {"a": [True, False, False], "b": [True, True, False], "c": [True, True, True]}


def test_what_a_request_uses_may_be_checked_when_it_is_known(clock: Clock) -> None:
    limiter = RateLimiter(TenantLimits(requests=1, tokens=60), {}, clock)
    assert limiter.admit("a", ()) is None
    assert limiter.check("a", "tokens") is None, "the check is no request of its own"
    limiter.charge("a", "tokens", 90)
    assert limiter.check("a", "tokens") == Exhausted("tokens", 31)
    assert limiter.check("a", "bytes") is None, "without a limit"
    assert limiter.usage()["a"].used["requests"] == 1
    assert limiter.usage()["a"].refused["tokens"] == 1


def test_the_longest_wait_is_told(clock: Clock) -> None:
    limiter = RateLimiter(TenantLimits(requests=60, bytes=60), {}, clock)
    for _ in range(60):
        limiter.admit("a", {"bytes"})
    limiter.charge("a", "bytes", 90)
    assert limiter.admit("a", {"bytes"}) == Exhausted("bytes", 31)


def test_the_fields_tell_quota_rest_and_when_it_is_full(clock: Clock) -> None:
    limiter = RateLimiter(TenantLimits(requests=60, tokens=600), {}, clock)
    limiter.admit("a", {"tokens"})
    limiter.charge("a", "tokens", 700)
    assert limiter.headers("a") == {
        "RateLimit-Policy": '"requests";q=60;w=60, "tokens";q=600;w=60',
        "RateLimit": '"requests";r=59;t=1, "tokens";r=0;t=70',
    }
    assert RateLimiter(TenantLimits(), {}, clock).headers("a") == {}


def test_usage_is_counted_without_limits_and_by_a_bounded_number_of_tenants(clock: Clock) -> None:
    limiter = RateLimiter(TenantLimits(), {}, clock)
    for n in range(LABELLED + 5):
        limiter.admit(f"t{n}", ())
        limiter.charge(f"t{n}", "tokens", 2)
    usage = limiter.usage()
    assert len(usage) == LABELLED + 1
    assert usage["t0"].used == {"requests": 1, "tokens": 2}
    assert usage[OTHERS].used == {"requests": 5, "tokens": 10}
