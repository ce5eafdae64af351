"""The Redis store with real servers that are killed, frozen, full or replaced by something else."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest
import redis

from ragkv.errors import EntryMissing, StoreError, StoreFull, StoreUnavailable
from ragkv.store.base import Range
from ragkv.store.redis_link import BREAK_SECONDS
from ragkv.store.redis_store import RedisStore
from ragkv.types import Key
from tests.redis_server import RedisServer, redis_server
from tests.store.chunks import read_ranges

KEY = Key("ab" * 32)
HEAD = b"h" * 500
BODY = [bytes([layer]) * 40_000 for layer in range(3)]
TIMEOUT = 0.25


def uses(store: RedisStore) -> list[Callable[[], object]]:
    return [
        lambda: store.head(KEY),
        lambda: read_ranges(store, KEY, Range(0, 0, 40_000), Range(2, 0, 40_000)),
        lambda: store.put(KEY, HEAD, BODY),
        lambda: store.delete(KEY),
        lambda: list(store.keys()),
        store.stats,
        store.ping,
    ]


def unavailable_after(use: Callable[[], object]) -> float:
    """Return the seconds until the call raised StoreUnavailable."""
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        use()
    return time.monotonic() - began


def wait_for_the_breaker() -> None:
    time.sleep(BREAK_SECONDS + 0.05)


def test_a_killed_server_is_unavailable_at_once_and_back_after_the_break(own: RedisServer) -> None:
    store = RedisStore(own.url, TIMEOUT)
    store.put(KEY, HEAD, BODY)
    own.process.send_signal(signal.SIGKILL)
    own.process.wait()
    assert unavailable_after(lambda: store.head(KEY)) < 0.2
    for use in uses(store):
        assert unavailable_after(use) < 0.2
    with redis_server(port=own.port):
        wait_for_the_breaker()
        with pytest.raises(EntryMissing):
            store.head(KEY)
        store.put(KEY, HEAD, BODY)
        assert store.head(KEY) == HEAD


def test_a_server_killed_during_reads_is_unavailable_and_nothing_else(own: RedisServer) -> None:
    store = RedisStore(own.url, TIMEOUT)
    store.put(KEY, HEAD, [bytes(4 * 2**20)] * 3)
    ranges = [Range(layer, 0, 4 * 2**20) for layer in range(3)]
    outcomes: list[Exception | None] = []

    def reads() -> None:
        mine = RedisStore(own.url, TIMEOUT)
        out = memoryview(bytearray(12 * 2**20))
        try:
            while True:
                mine.read(KEY, ranges, out)
        except Exception as error:
            outcomes.append(error)

    readers = [threading.Thread(target=reads) for _ in range(3)]
    for reader in readers:
        reader.start()
    time.sleep(0.3)
    own.process.kill()
    killed = time.monotonic()
    for reader in readers:
        reader.join(timeout=10)
    assert time.monotonic() - killed < 2
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 3


def test_a_frozen_server_costs_about_one_timeout_and_answers_are_not_mixed_up_later(own: RedisServer) -> None:
    for number in range(len(uses(RedisStore(own.url, TIMEOUT)))):
        store = RedisStore(own.url, TIMEOUT)
        store.put(KEY, HEAD, BODY)
        own.process.send_signal(signal.SIGSTOP)
        try:
            assert unavailable_after(uses(store)[number]) < 0.5
            for use in uses(store):
                assert unavailable_after(use) < 0.2
        finally:
            own.process.send_signal(signal.SIGCONT)
        if number < 3:
            wait_for_the_breaker()
            store.ping()
            # The frozen server may have executed the put later. The bytes are the same.
            assert store.head(KEY) == HEAD
            assert read_ranges(store, KEY, Range(1, 7, 100), Range(2, 0, 9)) == b"\1" * 100 + b"\2" * 9


def test_a_new_connection_to_a_frozen_server_costs_about_one_timeout(own: RedisServer) -> None:
    own.process.send_signal(signal.SIGSTOP)
    assert unavailable_after(RedisStore(own.url, TIMEOUT).ping) < 0.5
    assert unavailable_after(RedisStore(f"{own.url}/3", TIMEOUT).ping) < 0.5


def put_until_full(store: RedisStore) -> list[Key]:
    """Put large entries until the store is full, and return their keys."""
    stored = []
    for number in range(100):
        key = Key(f"{number:064x}")
        try:
            store.put(key, HEAD, [bytes(300_000)] * 3)
        except StoreFull:
            return stored
        stored.append(key)
    raise AssertionError("never full")


def test_a_full_server_is_full_and_goes_on_answering() -> None:
    with redis_server("--maxmemory", "6mb", "--maxmemory-policy", "noeviction") as small:
        store = RedisStore(small.url, TIMEOUT)
        store.put(KEY, HEAD, BODY)
        stored = put_until_full(store)
        assert stored
        assert set(store.keys()) == {KEY, *stored}
        with redis.Redis.from_url(small.url) as admin:
            admin.config_set("maxmemory", "1")
            with pytest.raises(StoreFull):
                store.put(KEY, b"new", [b"replaced"] * 9)
            assert store.head(KEY) == HEAD
            assert read_ranges(store, KEY, Range(0, 0, 1), Range(2, 39_999, 1)) == b"\0\2"
            assert store.delete(stored[-1])
            admin.config_set("maxmemory", "6mb")
        store.put(KEY, b"new", [b"replaced"])
        assert store.head(KEY) == b"new"


def test_a_server_that_starts_later_is_used() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = RedisStore(f"redis://127.0.0.1:{port}", TIMEOUT)
    assert unavailable_after(store.ping) < 0.2
    with redis_server(port=port):
        wait_for_the_breaker()
        store.ping()


def test_a_listener_that_never_answers_costs_about_one_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert unavailable_after(RedisStore(f"redis://127.0.0.1:{mute.getsockname()[1]}", TIMEOUT).ping) < 0.5


def test_a_server_of_another_protocol_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            line, _ = other.accept()
            with line:
                line.recv(1000)
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert unavailable_after(RedisStore(f"redis://127.0.0.1:{other.getsockname()[1]}", TIMEOUT).ping) < 0.5
        thread.join()


def test_a_url_cannot_change_the_time_limits(own: RedisServer) -> None:
    store = RedisStore(f"{own.url}/0?socket_timeout=30&retry_on_timeout=yes&decode_responses=yes&protocol=3", TIMEOUT)
    store.put(KEY, HEAD, BODY)
    assert store.head(KEY) == HEAD
    own.process.send_signal(signal.SIGSTOP)
    assert unavailable_after(store.ping) < 0.5


def test_a_read_only_server_still_serves_reads(own: RedisServer) -> None:
    store = RedisStore(own.url, TIMEOUT)
    store.put(KEY, HEAD, BODY)
    with redis.Redis.from_url(own.url) as admin:
        admin.replicaof("127.0.0.1", "1")
        with pytest.raises(StoreError, match="READONLY"):
            store.put(KEY, b"new", BODY)
        assert store.head(KEY) == HEAD


def test_a_server_that_cannot_save_is_store_full(own: RedisServer) -> None:
    store = RedisStore(own.url, TIMEOUT)
    store.put(KEY, HEAD, BODY)
    with redis.Redis.from_url(own.url) as admin:
        # Its folder is removed, so the snapshot fails, and Redis refuses writes until a snapshot succeeds.
        admin.config_set("save", "3600 1")
        (own.folder / "log").unlink()
        own.folder.rmdir()
        admin.bgsave()
        until = time.monotonic() + 10
        while admin.info("persistence")["rdb_last_bgsave_status"] == "ok" and time.monotonic() < until:
            time.sleep(0.01)
        own.folder.mkdir()
        with pytest.raises(StoreFull, match="MISCONF"):
            store.put(KEY, b"new", BODY)
        assert store.head(KEY) == HEAD
