"""The store over a real Redis Cluster: where entries are, and what a dead node or a moved slot costs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis
from redis.crc import key_slot

from ragkv.errors import ConfigError, StoreUnavailable
from ragkv.store.base import Range, StoreStats
from ragkv.store.redis_cluster import ClusterStore
from ragkv.store.redis_link import BREAK_SECONDS
from ragkv.types import Key
from tests.redis_cluster import RedisCluster, begin_move, end_move, move, name_of, redis_cluster
from tests.redis_server import RedisServer, free_port, redis_server
from tests.store.chunks import read_ranges

KEYS = [Key(hashlib.sha256(bytes([number])).hexdigest()) for number in range(30)]
HEAD = b"h" * 500
BODY = [bytes([layer]) * 40_000 for layer in range(3)]
TIMEOUT = 0.25
SECRET = "open-sesame"


@pytest.fixture
def empty(cluster: RedisCluster) -> RedisCluster:
    for node in cluster.nodes:
        admin(node).flushall()
    return cluster


def admin(node: RedisServer) -> redis.Redis:
    return redis.Redis(port=node.port)


def put_all(url: str) -> ClusterStore:
    store = ClusterStore(url, TIMEOUT)
    for key in KEYS:
        store.put(key, HEAD, BODY)
    return store


def unavailable_after(use: Callable[[], object]) -> float:
    """Return the seconds until the call raised StoreUnavailable."""
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        use()
    return time.monotonic() - began


def test_each_entry_is_whole_on_the_node_of_its_slot(empty: RedisCluster) -> None:
    store = put_all(empty.url)
    for node in empty.nodes:
        names = {name.decode() for name in admin(node).scan_iter()}
        mine = [key for key in KEYS if empty.of(key) is node]
        assert names == {f"ragkv:{{{key}}}:{part}" for key in mine for part in ("head", "body:0", "body:1", "body:2")}
        assert mine
    assert set(store.keys()) == set(KEYS)
    assert store.stats() == StoreStats(30, 30 * (500 + 120_000))
    store.ping()


def test_every_primary_reports_its_memory(empty: RedisCluster) -> None:
    found = ClusterStore(empty.url, TIMEOUT).memory()
    assert {each.where for each in found} == {f"127.0.0.1:{node.port}" for node in empty.nodes}
    assert {(each.limit, each.policy) for each in found} == {(0, "noeviction")}


def test_one_seed_that_answers_is_enough_to_find_the_other_nodes(empty: RedisCluster) -> None:
    put_all(empty.url)
    for node in empty.nodes:
        store = ClusterStore(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{node.port}", TIMEOUT)
        assert [store.head(key) for key in KEYS] == [HEAD] * 30


Moving = tuple[ClusterStore, Key, RedisServer, RedisServer, int]


@pytest.fixture
def moving(empty: RedisCluster) -> Iterator[Moving]:
    """A store that knows the slots, one of its keys, the key's node, another node, and the slot. It is moved back."""
    store, key = put_all(empty.url), KEYS[0]
    source = empty.of(key)
    target = next(node for node in empty.nodes if node is not source)
    slot = key_slot(key.encode())
    yield store, key, source, target, slot
    for node in (source, *empty.nodes):
        admin(node).flushall()
        admin(node).execute_command("CLUSTER", "SETSLOT", slot, "NODE", name_of(source))


def test_an_entry_of_a_moved_slot_is_found_at_once(moving: Moving) -> None:
    store, key, source, target, slot = moving
    begin_move(source, target, slot)
    assert store.head(key) == HEAD  # not moved yet
    move(source, target, slot)
    end_move(source, target, slot)
    assert read_ranges(store, key, Range(1, 0, 9), Range(2, 5, 40_000 - 5)) == b"\1" * 9 + b"\2" * (40_000 - 5)
    store.put(key, b"new", BODY)
    assert store.head(key) == b"new"
    assert store.delete(key)
    assert admin(target).dbsize() + admin(source).dbsize() > 0


def test_an_entry_that_is_being_migrated_is_unavailable_until_it_has_arrived(moving: Moving) -> None:
    store, key, source, target, slot = moving
    begin_move(source, target, slot)
    move(source, target, slot)
    for use in (lambda: store.head(key), lambda: read_ranges(store, key, Range(0, 0, 5)), lambda: store.delete(key)):
        with pytest.raises(StoreUnavailable, match="ASK"):
            use()
    others = [other for other in KEYS if key_slot(other.encode()) != slot]
    assert [store.head(other) for other in others] == [HEAD] * len(others)
    end_move(source, target, slot)
    assert store.head(key) == HEAD


def test_a_read_is_not_retried_after_a_range_was_reported(moving: Moving) -> None:
    store, key, source, target, slot = moving
    reported: list[int] = []

    def arrived(number: int) -> None:
        reported.append(number)
        if number == 0:
            begin_move(source, target, slot)
            move(source, target, slot)
            end_move(source, target, slot)

    ranges = [Range(layer, at, 100) for layer in range(3) for at in range(0, 40_000, 400)]
    with pytest.raises(StoreUnavailable, match="MOVED"):
        store.read(key, ranges, memoryview(bytearray(100 * len(ranges))), arrived)
    assert len(reported) == len(set(reported))
    store.read(key, ranges, memoryview(bytearray(100 * len(ranges))))


def test_a_node_that_is_down_costs_its_slots_until_a_replica_takes_over() -> None:
    with ExitStack() as stack:
        running = stack.enter_context(redis_cluster())
        store = put_all(running.url)
        lost = running.of(KEYS[0])
        gone = [key for key in KEYS if running.of(key) is lost]
        there = [key for key in KEYS if running.of(key) is not lost]
        replica = stack.enter_context(running.another())
        admin(replica).execute_command("CLUSTER", "REPLICATE", name_of(lost))
        until = time.monotonic() + 15
        while admin(replica).dbsize() < admin(lost).dbsize() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(BREAK_SECONDS)  # so that the slots may be learned again
        lost.process.kill()
        lost.process.wait()
        for key in gone:
            assert unavailable_after(lambda key=key: store.head(key)) < 0.2
            assert unavailable_after(lambda key=key: store.put(key, HEAD, BODY)) < 0.2
        for use in (store.ping, store.stats, lambda: list(store.keys())):
            assert unavailable_after(use) < 0.5
        assert [store.head(key) for key in there] == [HEAD] * len(there)
        store.put(there[0], b"new", BODY)
        admin(replica).execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        time.sleep(BREAK_SECONDS + 0.3)
        assert [store.head(key) for key in gone] == [HEAD] * len(gone)
        assert set(store.keys()) == set(KEYS)


def test_a_server_without_cluster_support_is_unavailable_and_says_so(server: RedisServer) -> None:
    store = ClusterStore(server.url.replace("redis://", "redis+cluster://"), TIMEOUT)
    with pytest.raises(StoreUnavailable, match="cluster support disabled"):
        store.ping()


def test_a_cluster_that_is_down_costs_about_one_timeout() -> None:
    store = ClusterStore("redis+cluster://" + ",".join(f"127.0.0.1:{free_port()}" for _ in range(5)), TIMEOUT)
    for use in (store.ping, lambda: store.head(KEYS[0]), lambda: list(store.keys())):
        assert unavailable_after(use) < 0.5
    assert "127.0.0.1" in repr(store)


def test_a_password_is_used_on_every_node_and_never_shown() -> None:
    with redis_server("--requirepass", SECRET, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        with redis.Redis(port=node.port, password=SECRET) as own:
            own.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        store = ClusterStore(f"redis+cluster://:{SECRET}@127.0.0.1:{node.port}", TIMEOUT)
        store.ping()
        assert SECRET not in repr(store) + repr(vars(store))
        with pytest.raises(StoreUnavailable) as wrong:
            ClusterStore(f"redis+cluster://:{SECRET}x@127.0.0.1:{node.port}", TIMEOUT).ping()
        assert SECRET not in str(wrong.value)


@pytest.mark.parametrize(
    "rest",
    ["", "host:port", "host:1/2", "host:1?db=2", "host:1,", "[::1,host:1", "host:1?no_such_option=1", "a/b/c:1"],
)
def test_a_malformed_url_is_refused_and_not_quoted(rest: str) -> None:
    with pytest.raises(ConfigError, match=r"malformed.*redis\+cluster://host:6379,host:6379") as wrong:
        ClusterStore(f"redis+cluster://:{SECRET}@{rest}", TIMEOUT)
    assert SECRET not in str(wrong.value) + repr(wrong.value.__cause__)


def test_addresses_may_omit_the_port_and_may_be_ipv6() -> None:
    assert ClusterStore("rediss+cluster://one,two:7000,[::1],[fe80::2]:7001/0", TIMEOUT).where == (
        "one:6379,two:7000,::1:6379,fe80::2:7001"
    )
