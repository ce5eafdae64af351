"""The store in a Redis Cluster: each entry as redis.py stores it, on the primary that owns its slot.

All values of an entry share one hash slot, so everything but finding the node is RedisStore's: one for each node, with
connections and a breaker of its own. A node that is down costs its slots, and the others go on.

The slots are learned from the first node that tells (CLUSTER SLOTS), and learned anew, once, when a node answers that a
key has moved or cannot be reached, since a replica may have taken over. If that does not help the error stands: the
chunk is encoded again. So do keys of a slot that is just migrating (ASK), until it has arrived.

A cluster refuses all keys while some slots have no node, unless `cluster-require-full-coverage` is `no`: for a cache
it should be.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import parse_qs

from redis.crc import key_slot

from ragkv.errors import ConfigError, StoreUnavailable
from ragkv.store.base import Arrived, Range, StoreStats, Swept, ignore
from ragkv.store.redis_link import BREAK_SECONDS, Moved
from ragkv.store.redis_store import RedisMemory, RedisStore
from ragkv.types import Key

SLOTS_BYTES = 2**20
"""Time is allowed for a description of the slots of this size."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class _Map:
    """slots: (first, last, address of the primary), in order · nodes: by address, seeds included · learned: when."""

    slots: tuple[tuple[int, int, str], ...]
    nodes: dict[str, RedisStore]
    learned: float

    def primaries(self) -> list[RedisStore]:
        return [self.nodes[address] for address in dict.fromkeys(address for *_, address in self.slots)]

    def owner(self, slot: int) -> RedisStore | None:
        place = bisect_right(self.slots, slot, key=lambda part: part[0]) - 1
        return self.nodes[self.slots[place][2]] if place >= 0 and slot <= self.slots[place][1] else None


class ClusterStore:
    """KVStore over a Redis Cluster. Thread-safe. Each node is bounded as link.py says."""

    def __init__(self, url: str, timeout: float, ttl: float | None = None) -> None:
        """`redis+cluster://user:password@host:port,host:port?options`: some of its nodes, which need not answer yet.

        Credentials and options are those of every node. `timeout`, `ttl` in seconds. Raises ConfigError for a malformed
        URL.
        """
        seeds, url_of = _taken_apart(url)
        self.where = ",".join(seeds)
        self._timeout = timeout
        self._open: Callable[[str], RedisStore] = lambda address: RedisStore(url_of(address), timeout, ttl)
        try:
            nodes = {seed: self._open(seed) for seed in seeds}
        except ConfigError:
            raise _malformed() from None
        self._seeds = tuple(nodes)
        self._map = _Map((), nodes, -BREAK_SECONDS)  # replaced whole, so it is read without the lock
        self._learning = threading.Lock()

    def __repr__(self) -> str:
        return f"ClusterStore({self.where!r})"

    def put(self, key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        """See KVStore.put."""
        self._at(key, lambda node: node.put(key, head, body))

    def head(self, key: Key) -> bytes:
        """See KVStore.head."""
        return self._at(key, lambda node: node.head(key))

    def read(self, key: Key, ranges: Sequence[Range], out: memoryview, arrived: Arrived = ignore) -> None:
        """See KVStore.read. An entry that moves away when a part of it has arrived is StoreUnavailable."""
        some = False

        def told(number: int) -> None:
            nonlocal some
            some = True
            arrived(number)

        self._at(key, lambda node: node.read(key, ranges, out, told), again=lambda: not some)

    def layers(self, key: Key) -> tuple[int, ...]:
        """See KVStore.layers."""
        return self._at(key, lambda node: node.layers(key))

    def delete(self, key: Key) -> bool:
        """See KVStore.delete."""
        return self._at(key, lambda node: node.delete(key))

    def keys(self) -> Iterator[Key]:
        """See KVStore.keys. Asks every primary; raises StoreUnavailable when one does not answer."""
        return iter(set(chain.from_iterable(self._everywhere(RedisStore.keys))))

    def stats(self) -> StoreStats:
        """See KVStore.stats. Asks every primary; raises StoreUnavailable when one does not answer."""
        parts = self._everywhere(RedisStore.stats)
        return StoreStats(sum(part.entries for part in parts), sum(part.bytes for part in parts))

    def sweep(self, dry_run: bool) -> Swept:
        """See KVStore.sweep. Nothing, as in RedisStore."""
        return Swept()

    def ping(self) -> None:
        """See KVStore.ping. Every primary must answer."""
        self._everywhere(RedisStore.ping)

    def memory(self) -> tuple[RedisMemory, ...]:
        """Of every primary. Raises StoreUnavailable when one does not answer, or does not tell."""
        return tuple(chain.from_iterable(self._everywhere(RedisStore.memory)))

    def close(self) -> None:
        """See KVStore.close."""
        for node in self._map.nodes.values():
            node.close()

    def _at(self, key: Key, use: Callable[[RedisStore], Found], again: Callable[[], bool] = lambda: True) -> Found:
        """Use the node of a key; where that fails and another node has the key by now, use that one, if `again`."""
        slot, known = key_slot(key.encode()), self._known()
        node = known.owner(slot)
        if node is None:
            known = self._learned_after(None, known)
            node = known.owner(slot)
        if node is None:
            raise StoreUnavailable(f"slot {slot} of the Redis Cluster at {self.where} has no node")
        try:
            return use(node)
        except StoreUnavailable as error:
            now = self._learned_after(node if isinstance(error, Moved) else None, known).owner(slot)
            if now is None or now is node or not again():
                raise
            return use(now)

    def _everywhere(self, use: Callable[[RedisStore], Found]) -> list[Found]:
        """What each primary gives; all once more where another has taken over from one that does not answer."""
        known = self._known()
        try:
            return [use(node) for node in known.primaries()]
        except StoreUnavailable:
            now = self._learned_after(None, known)
            if now.primaries() == known.primaries():
                raise
            return [use(node) for node in now.primaries()]

    def _known(self) -> _Map:
        known = self._map
        return known if known.slots else self._learn(None, known)

    def _learned_after(self, told_by: RedisStore | None, known: _Map) -> _Map:
        """The slots after a failure, learned anew unless that was done in the last second. told_by: the node that says
        a key has moved, and so knows more than `known` tells. Where nobody answers, what is known stays."""
        if told_by is None and time.monotonic() - known.learned < BREAK_SECONDS:
            return self._map
        try:
            return self._learn(told_by, known)
        except StoreUnavailable:
            return self._map

    def _learn(self, first: RedisStore | None, known: _Map) -> _Map:
        """Ask for the slots, `first` before others; nothing to do where another thread has done so since `known`."""
        with self._learning:
            if self._map is not known:
                return self._map
            until, fault = time.monotonic() + self._timeout, None
            for node in dict.fromkeys([first, *known.nodes.values()]):
                if node is None:
                    continue
                try:
                    self._map = self._mapped(node, known.nodes)
                    return self._map
                except StoreUnavailable as error:
                    fault = error
                if time.monotonic() > until:
                    break
            raise fault or StoreUnavailable("no node of the Redis Cluster is known")

    def _mapped(self, node: RedisStore, nodes: dict[str, RedisStore]) -> _Map:
        """The slots as a node tells them; nodes that are no longer named are closed."""
        told = node.link.ask("CLUSTER", "SLOTS", size=SLOTS_BYTES)
        try:
            slots = sorted((int(first), int(last), _address(at[0], at[1], node)) for first, last, at, *_ in told)
            named = dict.fromkeys([*self._seeds, *(address for *_, address in slots)])
            kept = {address: nodes.get(address) or self._open(address) for address in named}
        except (TypeError, ValueError, IndexError, ConfigError):
            raise StoreUnavailable(
                f"Redis at {node.link.where} tells nonsense about the slots of its cluster"
            ) from None
        for address in nodes.keys() - kept.keys():
            nodes[address].close()
        return _Map(tuple(slots), kept, time.monotonic())


def _taken_apart(url: str) -> tuple[list[str], Callable[[str], str]]:
    """(addresses, URL of an address). Raises ConfigError without the URL, which may hold a password."""
    scheme, _, rest = url.partition("+cluster://")
    place, mark, options = rest.partition("?")
    who, at, hosts = place.rpartition("@")
    hosts, _, database = hosts.partition("/")
    seeds = [host if host.rpartition(":")[2].isdigit() else f"{host}:6379" for host in hosts.split(",")]
    if any(seed.startswith(":") for seed in seeds) or database not in ("", "0") or "db" in parse_qs(options):
        raise _malformed()

    def url_of(address: str) -> str:
        host, _, port = address.rpartition(":")
        return f"{scheme}://{who}{at}{f'[{host}]' if ':' in host else host}:{port}{mark}{options}"

    return [seed.replace("[", "").replace("]", "") for seed in seeds], url_of


def _malformed() -> ConfigError:
    return ConfigError(
        "store: this Redis Cluster URL is malformed; it should be like redis+cluster://host:6379,host:6379 (database 0)"
    )


def _address(host: Any, port: Any, asked: RedisStore) -> str:
    """A node that does not know its own name is where it was asked."""
    name = (host or b"").decode()
    return f"{asked.link.where.rpartition(':')[0] if name in ('', '?') else name}:{int(port)}"
