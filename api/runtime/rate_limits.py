"""Limits of each tenant: requests, tokens and document bytes a minute. One token bucket for each of them.

A bucket holds a minute's quota and is refilled evenly, so a tenant may spend a minute's quota at once. A request is
admitted while all buckets that concern it hold something. What it costs beyond that is charged when it is known: tokens
when a question is prefilled and answered, bytes as they arrive. A bucket may therefore fall below zero, and then the
tenant waits until it is filled up again.

The header fields are those of draft-ietf-httpapi-ratelimit-headers (-08 to -11):

    RateLimit-Policy: "requests";q=60;w=60, "tokens";q=100000;w=60
    RateLimit: "requests";r=58;t=2, "tokens";r=97312;t=2       r: what is left; t: seconds until the bucket is full
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Literal

WINDOW = 60
"""Seconds of the window in which quotas are counted."""
LABELLED = 200
"""Most tenants that have metrics of their own. Further ones share a label."""
OTHERS = "…others"
"""The label that they share; no tenant can have this name."""
_ROUNDING = 1e-6
"""What is lost by adding up parts of a quota. A tenant that waits as long as it is told is then admitted."""

Resource = Literal["requests", "tokens", "bytes"]


@dataclass(frozen=True)
class TenantLimits:
    """Limits of one tenant; 0 is no limit.

    Attributes:
        requests: Requests a minute.
        tokens: Tokens a minute, of prompts and answers.
        bytes: Bytes of documents a minute.
        stored: Bytes of KV and kept files of all its documents.
    """

    requests: int = 0
    tokens: int = 0
    bytes: int = 0
    stored: int = 0

    def over(self, given: Mapping[str, int]) -> TenantLimits:
        """Return these limits with those of `given` in their place."""
        return TenantLimits(**{each.name: given.get(each.name, getattr(self, each.name)) for each in fields(self)})


@dataclass
class Bucket:
    """A token bucket.

    Attributes:
        quota: What it holds when it is full, and by how much it is refilled in a WINDOW.
        left: What it held at `when`; below zero where more was spent than was there.
        when: On the monotonic clock.
    """

    quota: int
    left: float
    when: float

    def level(self, now: float) -> float:
        """Return what it holds now."""
        return min(float(self.quota), self.left + (now - self.when) * self.quota / WINDOW)

    def spend(self, amount: float, now: float) -> None:
        """Take something out of it."""
        self.left, self.when = self.level(now) - amount, now

    def wait(self, now: float, until: float) -> float:
        """Return the seconds until it holds `until`."""
        return max(0.0, (until - self.level(now)) * WINDOW / self.quota)


@dataclass
class TenantUsage:
    """What a tenant used since the start.

    Attributes:
        used: Requests, tokens and bytes.
        refused: Requests that a limit refused, by the resource that was used up.
    """

    used: Counter[Resource] = field(default_factory=Counter)
    refused: Counter[Resource] = field(default_factory=Counter)


@dataclass(frozen=True)
class Exhausted:
    """A quota that is used up. resource: which one; retry_after: seconds until a request is admitted."""

    resource: Resource
    retry_after: int


class RateLimiter:
    """The quotas of all tenants. Thread-safe. Tenants come from the keys, so their number is bounded."""

    def __init__(
        self,
        default: TenantLimits,
        own: Mapping[str, Mapping[str, int]],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Fill all buckets.

        Args:
            default: Limits of tenants that have none of their own.
            own: Limits by tenant, by the names of `TenantLimits`.
            clock: Seconds on a clock that never goes back.
        """
        self._default, self._own, self._clock = default, own, clock
        self._buckets: dict[str, dict[Resource, Bucket]] = {}
        self._usage: dict[str, TenantUsage] = {}
        self._others: dict[str, dict[str, Counter[Resource]]] = {}
        self._lock = threading.Lock()

    def limits(self, tenant: str) -> TenantLimits:
        """Return the limits of a tenant."""
        return self._default.over(self._own.get(tenant, {}))

    def admit(self, tenant: str, resources: Iterable[Resource]) -> Exhausted | None:
        """Count a request, or refuse it.

        Args:
            tenant: Whose request it is.
            resources: What the request may use, besides being a request.

        Returns:
            None if it is admitted, else the quota that makes the tenant wait longest.
        """
        with self._lock:
            worst = self._exhausted(tenant, {"requests", *resources})
            if worst is not None:
                return worst
            self._usage[tenant].used["requests"] += 1
            if (bucket := self._of(tenant).get("requests")) is not None:
                bucket.spend(1, self._clock())
            return None

    def check(self, tenant: str, resource: Resource) -> Exhausted | None:
        """Return the quota if it is used up, for a request that was admitted before it was known what it uses."""
        with self._lock:
            return self._exhausted(tenant, {resource})

    def charge(self, tenant: str, resource: Resource, amount: int) -> None:
        """Count what an admitted request used."""
        with self._lock:
            self._usage.setdefault(tenant, TenantUsage()).used[resource] += amount
            bucket = self._of(tenant).get(resource)
            if bucket is not None:
                bucket.spend(amount, self._clock())

    @property
    def limited(self) -> bool:
        """Whether any tenant has a limit of what it may use in a minute."""
        return any(each.requests or each.tokens or each.bytes for each in (self._default, *map(self.limits, self._own)))

    def totals(self) -> dict[str, Counter[Resource]]:
        """Return what each tenant used here since the start, for the other replicas."""
        with self._lock:
            return {name: Counter(usage.used) for name, usage in self._usage.items()}

    def count_elsewhere(self, replica: str, totals: Mapping[str, Counter[Resource]]) -> None:
        """Take from the buckets what tenants used at another replica since the last call.

        Args:
            replica: Its name. Its first call tells where to count from.
            totals: Its `totals`.
        """
        with self._lock:
            before, self._others[replica] = self._others.get(replica), {**totals}
            if before is None:
                return
            now = self._clock()
            for tenant, used in totals.items():
                more = used - before.get(tenant, Counter())
                for name, bucket in self._of(tenant).items():
                    if more[name]:
                        bucket.spend(more[name], now)

    def headers(self, tenant: str) -> dict[str, str]:
        """Return the header fields that tell a tenant its quotas; none where it has no limits."""
        with self._lock:
            now, buckets = self._clock(), self._of(tenant)
            if not buckets:
                return {}
            policies = [f'"{name}";q={bucket.quota};w={WINDOW}' for name, bucket in buckets.items()]
            states = [f'"{name}";{_state(bucket, now)}' for name, bucket in buckets.items()]
        return {"RateLimit-Policy": ", ".join(policies), "RateLimit": ", ".join(states)}

    def usage(self) -> dict[str, TenantUsage]:
        """Return a copy of what each tenant used. At most LABELLED tenants stand for themselves."""
        with self._lock:
            copies = {name: TenantUsage(Counter(u.used), Counter(u.refused)) for name, u in self._usage.items()}
        if len(copies) <= LABELLED:
            return copies
        names = list(copies)
        shared = TenantUsage()
        for name in names[LABELLED:]:
            other = copies.pop(name)
            shared.used.update(other.used)
            shared.refused.update(other.refused)
        return {**copies, OTHERS: shared}

    def _exhausted(self, tenant: str, resources: Set[Resource]) -> Exhausted | None:
        """Return the quota of these that makes the tenant wait longest, and count the refusal; None without any."""
        now, usage = self._clock(), self._usage.setdefault(tenant, TenantUsage())
        short = [
            Exhausted(name, max(1, math.ceil(bucket.wait(now, 1.0) - _ROUNDING)))
            for name, bucket in self._of(tenant).items()
            if name in resources and bucket.level(now) < 1 - _ROUNDING
        ]
        if not short:
            return None
        worst = max(short, key=lambda each: each.retry_after)
        usage.refused[worst.resource] += 1
        return worst

    def _of(self, tenant: str) -> dict[Resource, Bucket]:
        buckets = self._buckets.get(tenant)
        if buckets is None:
            limits, now = self.limits(tenant), self._clock()
            quotas: dict[Resource, int] = {
                "requests": limits.requests,
                "tokens": limits.tokens,
                "bytes": limits.bytes,
            }
            buckets = {name: Bucket(quota, quota, now) for name, quota in quotas.items() if quota}
            self._buckets[tenant] = buckets
        return buckets


def _state(bucket: Bucket, now: float) -> str:
    """Return the parameters r and t of a bucket in the field `RateLimit`."""
    left, wait = bucket.level(now) + _ROUNDING, bucket.wait(now, bucket.quota) - _ROUNDING
    return f"r={max(0, math.floor(left))};t={max(0, math.ceil(wait))}"
