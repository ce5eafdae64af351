"""The Redis Cluster store: each entry is stored as redis_entry.py describes, on the primary that owns its slot.

All values of an entry share one hash slot. So this module only finds the node, and a RedisStore for each node does the
rest, with its own connections and circuit breaker. A node that is down costs its slots; the other nodes keep working.

The slots are learned with CLUSTER SLOTS from the first node that answers. They are learned again, once, when a node
answers that a key has moved, or cannot be reached, because a replica may have taken over. If that does not help, the
error stands and the chunk is encoded again. Keys of a slot that is being migrated (ASK) also fail, until the slot has
arrived.

redis-py's slot map (`redis.cluster.NodesManager`) is not used. Its constructor needs a node that answers, a refresh has
no time limit over all nodes, and it replaces the server's reason ("cluster support disabled") by its own text. It also
keeps its own connection pool for every node, beside the links of the RedisStores with their deadlines and breakers.

A cluster refuses all keys while some slots have no node, unless `cluster-require-full-coverage` is `no`. A cluster that
is used as a cache should have this setting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from ragkv.errors import ConfigError, StoreUnavailable
from ragkv.store.base import Arrived, LeaseState, Range, StoreStats, Swept, ignore
from ragkv.store.cluster_slots import SlotMap, malformed, node_address, parse_url, slot_of
from ragkv.store.redis_entry import RedisMemory
from ragkv.store.redis_link import BREAK_SECONDS, Moved
from ragkv.store.redis_store import RedisStore
from ragkv.types import Key

SLOTS_BYTES = 2**20
"""The deadline for CLUSTER SLOTS allows for a reply of this size."""

Result = TypeVar("Result")
Args = ParamSpec("Args")


class ClusterStore:
    """KVStore over a Redis Cluster. Thread-safe. redis_link.py describes the time limits of each node.

    Attributes:
        where: The addresses that the URL names.
    """

    def __init__(self, url: str, timeout: float, ttl: float | None = None) -> None:
        """Prepare a store for the nodes that the URL names.

        Args:
            url: `redis+cluster://user:password@host:port,host:port?options`, naming some of the nodes. They need not
                answer yet. Credentials and options are used for every node.
            timeout: Seconds, as in redis_link.py.
            ttl: Seconds that an entry lives; None for no expiry.

        Raises:
            ConfigError: The URL is malformed.
        """
        seeds, url_of = parse_url(url)
        self.where = ",".join(seeds)
        self._timeout = timeout
        self._open: Callable[[str], RedisStore] = lambda address: RedisStore(url_of(address), timeout, ttl)
        try:
            nodes = {seed: self._open(seed) for seed in seeds}
        except ConfigError:
            raise malformed() from None
        self._seeds = tuple(nodes)
        self._map = SlotMap((), nodes, -BREAK_SECONDS)  # replaced as a whole, so it is read without the lock
        self._learning = threading.Lock()

    def __repr__(self) -> str:
        return f"ClusterStore({self.where!r})"

    def put(self, key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        """See KVStore.put."""
        self.call_owner(key, RedisStore.put, key, head, body)

    def head(self, key: Key) -> bytes:
        """See KVStore.head."""
        return self.call_owner(key, RedisStore.head, key)

    def read(self, key: Key, ranges: Sequence[Range], out: memoryview, arrived: Arrived = ignore) -> None:
        """See KVStore.read. An entry that moves away after a part of it has arrived is StoreUnavailable."""
        reported = False

        def report(number: int) -> None:
            nonlocal reported
            reported = True
            arrived(number)

        known = self._slot_map(key)
        node = self._owner(key, known)
        try:
            node.read(key, ranges, out, report)
        except StoreUnavailable as error:
            other = self._new_owner(key, known, error)
            if other is None or reported:
                raise
            other.read(key, ranges, out, report)

    def layers(self, key: Key) -> tuple[int, ...]:
        """See KVStore.layers."""
        return self.call_owner(key, RedisStore.layers, key)

    def delete(self, key: Key) -> bool:
        """See KVStore.delete."""
        return self.call_owner(key, RedisStore.delete, key)

    def give_way(self, path: Path, size: int, full: bool) -> bool:
        """See KVStore.give_way. The entries are in memory, and elsewhere."""
        return False

    def keys(self) -> Iterator[Key]:
        """See KVStore.keys. It asks every primary, and raises StoreUnavailable when one does not answer."""
        return iter(set(chain.from_iterable(self._call_all(RedisStore.keys))))

    def stats(self) -> StoreStats:
        """See KVStore.stats. It asks every primary, and raises StoreUnavailable when one does not answer."""
        parts = self._call_all(RedisStore.stats)
        return StoreStats(sum(part.entries for part in parts), sum(part.bytes for part in parts))

    def sweep(self, dry_run: bool) -> Swept:
        """See KVStore.sweep. There is nothing to do, as in RedisStore."""
        return Swept()

    def ping(self) -> None:
        """See KVStore.ping. Every primary must answer."""
        self._call_all(RedisStore.ping)

    def memory(self) -> tuple[RedisMemory, ...]:
        """Return what every primary reports about its memory. Raises StoreUnavailable when one does not."""
        return tuple(chain.from_iterable(self._call_all(RedisStore.memory)))

    def close(self) -> None:
        """See KVStore.close."""
        for node in self._map.nodes.values():
            node.close()

    @property
    def leases(self) -> ClusterLeases:
        """See KVStore.leases. A lease lies on the node of its entry."""
        return ClusterLeases(self)

    def call_owner(
        self, key: Key, method: Callable[Concatenate[RedisStore, Args], Result], *args: Args.args, **named: Args.kwargs
    ) -> Result:
        """Call a method of the node that owns a key. If that fails and another node owns the key by now, call that."""
        known = self._slot_map(key)
        node = self._owner(key, known)
        try:
            return method(node, *args, **named)
        except StoreUnavailable as error:
            other = self._new_owner(key, known, error)
            if other is None:
                raise
            return method(other, *args, **named)

    def _call_all(self, method: Callable[[RedisStore], Result]) -> list[Result]:
        """Call a method of every primary. If one does not answer and another node has taken over, call all again."""
        known = self._map if self._map.slots else self._learn(None, self._map)
        try:
            return [method(node) for node in known.primaries()]
        except StoreUnavailable:
            current = self._learn_again(None, known)
            if current.primaries() == known.primaries():
                raise
            return [method(node) for node in current.primaries()]

    def _slot_map(self, key: Key) -> SlotMap:
        """Return the known slots, learned again if the slot of the key has no node."""
        known = self._map
        known = known if known.slots else self._learn(None, known)
        return known if known.owner(slot_of(key)) else self._learn_again(None, known)

    def _owner(self, key: Key, known: SlotMap) -> RedisStore:
        node = known.owner(slot_of(key))
        if node is None:
            raise StoreUnavailable(f"slot {slot_of(key)} of the Redis Cluster at {self.where} has no node")
        return node

    def _new_owner(self, key: Key, known: SlotMap, error: StoreUnavailable) -> RedisStore | None:
        """Return the node that owns a key after a failure, or None when it is the same node or none."""
        node = known.owner(slot_of(key))
        owner = self._learn_again(node if isinstance(error, Moved) else None, known).owner(slot_of(key))
        return None if owner is node else owner

    def _learn_again(self, told_by: RedisStore | None, known: SlotMap) -> SlotMap:
        """Learn the slots after a failure, unless that was done within the last second.

        Args:
            told_by: The node that answers that a key has moved. It knows more than `known`.
            known: The slots that were used. They stay when no node answers.
        """
        if told_by is None and time.monotonic() - known.learned < BREAK_SECONDS:
            return self._map
        try:
            return self._learn(told_by, known)
        except StoreUnavailable:
            return self._map

    def _learn(self, first: RedisStore | None, known: SlotMap) -> SlotMap:
        """Learn the slots from a node, `first` before others, unless another thread has replaced `known` meanwhile."""
        with self._learning:
            if self._map is not known:
                return self._map
            until, fault = time.monotonic() + self._timeout, None
            for node in dict.fromkeys([first, *known.nodes.values()]):
                if node is None:
                    continue
                try:
                    self._map = self._ask_for_slots(node, known.nodes)
                    return self._map
                except StoreUnavailable as error:
                    fault = error
                if time.monotonic() > until:
                    break
            raise fault or StoreUnavailable("no node of the Redis Cluster is known")

    def _ask_for_slots(self, node: RedisStore, nodes: dict[str, RedisStore]) -> SlotMap:
        """Return the slots that a node reports, and close nodes that it no longer names."""
        reply = node.link.command("CLUSTER", "SLOTS", size=SLOTS_BYTES)
        try:
            slots = sorted((int(first), int(last), node_address(at[0], at[1], node)) for first, last, at, *_ in reply)
            addresses = dict.fromkeys([*self._seeds, *(address for *_, address in slots)])
            kept = {address: nodes.get(address) or self._open(address) for address in addresses}
        except (TypeError, ValueError, IndexError, ConfigError):
            raise StoreUnavailable(
                f"Redis at {node.link.address} gives no valid description of its cluster's slots"
            ) from None
        for address in nodes.keys() - kept.keys():
            nodes[address].close()
        return SlotMap(tuple(slots), kept, time.monotonic())


class ClusterLeases:
    """Leases over the nodes of a cluster. Thread-safe."""

    def __init__(self, store: ClusterStore) -> None:
        """Use the connections of a store."""
        self._store = store

    def take(self, key: Key, owner: str, seconds: float) -> LeaseState:
        """See Leases.take."""
        return self._store.call_owner(key, lambda node: node.leases.take(key, owner, seconds))

    def renew(self, key: Key, owner: str, seconds: float) -> bool:
        """See Leases.renew."""
        return self._store.call_owner(key, lambda node: node.leases.renew(key, owner, seconds))

    def release(self, key: Key, owner: str) -> None:
        """See Leases.release."""
        self._store.call_owner(key, lambda node: node.leases.release(key, owner))
