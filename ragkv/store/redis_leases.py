"""Leases in Redis: a string value beside the entry, in the same slot of a cluster, with an expiry.

    ragkv:{<key>}:lease           the owner's name

Taking a lease is one round trip that also tells whether the entry is there: another process may have put it since the
caller missed it. Renewing and releasing compare the owner on the server, in a script, because the lease may have
expired and belong to another owner by then. A failover may lose a lease, as it may lose any latest write.
"""

from __future__ import annotations

from ragkv.store.base import LeaseState
from ragkv.store.redis_entry import head_name
from ragkv.store.redis_link import ServerLink
from ragkv.types import Key

_IF_MINE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call({}) end return 0"
RENEW = _IF_MINE.format("'PEXPIRE', KEYS[1], ARGV[2]")
RELEASE = _IF_MINE.format("'DEL', KEYS[1]")


class RedisLeases:
    """Leases over one Redis server. Thread-safe."""

    def __init__(self, link: ServerLink) -> None:
        """Use a link. Nothing is sent yet."""
        self._link = link

    def take(self, key: Key, owner: str, seconds: float) -> LeaseState:
        """See Leases.take."""
        take = ("SET", lease_name(key), owner, "NX", "PX", _milliseconds(seconds))
        taken, there = self._link.pipeline([take, ("EXISTS", head_name(key))], self._link.deadline(0))
        if self._link.checked(there):
            if taken == b"OK":
                self.release(key, owner)
            return "stored"
        return "taken" if self._link.checked(taken) else "held"

    def renew(self, key: Key, owner: str, seconds: float) -> bool:
        """See Leases.renew."""
        return bool(self._link.command("EVAL", RENEW, 1, lease_name(key), owner, _milliseconds(seconds)))

    def release(self, key: Key, owner: str) -> None:
        """See Leases.release."""
        self._link.command("EVAL", RELEASE, 1, lease_name(key), owner)


def lease_name(key: Key) -> str:
    """Return the name of the value that holds the lease of an entry."""
    return f"{head_name(key)[: -len('head')]}lease"


def _milliseconds(seconds: float) -> int:
    """Return an expiry, at least one: Redis refuses an expiry of 0."""
    return max(1, round(1000 * seconds))
