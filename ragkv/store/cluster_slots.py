"""Slots of a Redis Cluster: which node owns a key, and which nodes an address names."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from redis.crc import key_slot

from ragkv.errors import ConfigError
from ragkv.store.redis_store import RedisStore
from ragkv.types import Key


@dataclass(frozen=True)
class SlotMap:
    """Which node owns which slots.

    Attributes:
        slots: (first slot, last slot, address of the primary), in order.
        nodes: Stores by address, those of the seeds included.
        learned: When the slots were learned, on the monotonic clock.
    """

    slots: tuple[tuple[int, int, str], ...]
    nodes: dict[str, RedisStore]
    learned: float

    def primaries(self) -> list[RedisStore]:
        """Return the nodes that own slots."""
        return [self.nodes[address] for address in dict.fromkeys(address for *_, address in self.slots)]

    def owner(self, slot: int) -> RedisStore | None:
        """Return the node that owns a slot; None where it is not known."""
        index = bisect_right(self.slots, slot, key=lambda part: part[0]) - 1
        return self.nodes[self.slots[index][2]] if index >= 0 and slot <= self.slots[index][1] else None


def slot_of(key: Key) -> int:
    """Return the slot of a key."""
    slot: int = key_slot(key.encode())
    return slot


def parse_url(url: str) -> tuple[list[str], Callable[[str], str]]:
    """Return the addresses of the seeds, and a function from an address to its URL.

    Raises:
        ConfigError: The URL is malformed. The message does not quote it, because it may contain a password.
    """
    scheme, _, rest = url.partition("+cluster://")
    place, mark, options = rest.partition("?")
    user, at, hosts = place.rpartition("@")
    hosts, _, database = hosts.partition("/")
    seeds = [host if host.rpartition(":")[2].isdigit() else f"{host}:6379" for host in hosts.split(",")]
    if any(seed.startswith(":") for seed in seeds) or database not in ("", "0") or "db" in parse_qs(options):
        raise malformed()

    def url_of(address: str) -> str:
        host, _, port = address.rpartition(":")
        return f"{scheme}://{user}{at}{f'[{host}]' if ':' in host else host}:{port}{mark}{options}"

    return [seed.replace("[", "").replace("]", "") for seed in seeds], url_of


def malformed() -> ConfigError:
    """Return the error for a URL that is none of a cluster."""
    return ConfigError(
        "store: this Redis Cluster URL is malformed; it should be like redis+cluster://host:6379,host:6379 (database 0)"
    )


def node_address(host: Any, port: Any, asked: RedisStore) -> str:
    """Return a node's address. A node that does not know its own host has the host where it was asked."""
    name = (host or b"").decode()
    return f"{asked.link.address.rpartition(':')[0] if name in ('', '?') else name}:{int(port)}"
