"""Large reads over several connections: every byte is in its place, every range is reported once, no fault stays."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragkv.errors import EntryCorrupt, StoreUnavailable
from ragkv.store.base import Arrived, Range, ignore
from ragkv.store.redis_entry import body_name
from ragkv.store.redis_pieces import PIECE
from ragkv.store.redis_store import IN_FLIGHT, PARALLEL_BYTES, RedisStore
from ragkv.types import Key
from tests.redis_server import RedisServer
from tests.store.conftest import PATIENCE

VALUE = hashlib.shake_128(b"value").digest(9 * 2**20)
KEY = Key("0e" * 32)
NAME = body_name(KEY, 0)
TIMEOUT = 0.25


@pytest.fixture
def filled(own: RedisServer) -> RedisServer:
    """A server with one entry, whose statistics begin after the entry was put."""
    RedisStore(own.url, PATIENCE).put(KEY, b"head", [VALUE])
    with redis.Redis.from_url(own.url) as admin:
        admin.config_resetstat()
    return own


def store_of(server: RedisServer, connections: int, timeout: float = PATIENCE) -> RedisStore:
    """Return a store that uses at most so many connections for a read."""
    return RedisStore(server.url, timeout, connections=connections)


def read(store: RedisStore, ranges: Sequence[Range], arrived: Arrived = ignore) -> bytearray:
    out = bytearray(sum(part.size for part in ranges))
    store.read(KEY, ranges, memoryview(out), arrived)
    return out


def expected(ranges: Sequence[Range]) -> bytes:
    return b"".join(VALUE[part.offset : part.offset + part.size] for part in ranges)


def blocks(size: int, count: int) -> list[Range]:
    return [Range(0, number * size, size) for number in range(count)]


def connections(server: RedisServer) -> int:
    """Connections opened since the statistics were reset, without the one of this call."""
    with redis.Redis.from_url(server.url) as admin:
        return int(admin.info("stats")["total_connections_received"]) - 1


SPANS = st.lists(st.tuples(st.integers(0, 9 * 2**20), st.integers(0, 3 * PIECE)), max_size=30)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spans=SPANS)
def test_any_ranges_arrive_whole_over_any_number_of_connections(
    filled: RedisServer, spans: list[tuple[int, int]]
) -> None:
    ranges = [Range(0, start, min(size, len(VALUE) - start)) for start, size in spans]
    for count in (1, 2, 4):
        reported: list[int] = []
        store = store_of(filled, count)
        assert read(store, ranges, reported.append) == expected(ranges)
        assert sorted(reported) == list(range(len(ranges)))
        store.close()


def test_a_large_read_uses_several_connections_and_threads_each_in_order(filled: RedisServer) -> None:
    ranges = blocks(2**18, 36)
    reported: list[tuple[int, int]] = []
    together = threading.Barrier(3)

    def arrived(number: int) -> None:
        reported.append((threading.get_ident(), number))
        if len(reported) <= 3:
            together.wait(timeout=5)  # all three threads are working at the same time

    assert read(store_of(filled, 3), ranges, arrived) == VALUE
    assert connections(filled) == 3
    threads = {thread for thread, _ in reported}
    assert len(threads) == 3
    assert threading.get_ident() in threads
    for thread in threads:
        assert all(a < b for a, b in pairwise(number for each, number in reported if each == thread))


def test_earlier_ranges_arrive_first_except_for_those_in_flight(filled: RedisServer) -> None:
    reported: list[int] = []
    read(store_of(filled, 1), blocks(2**15, 288), reported.append)
    assert reported == list(range(288))
    reported.clear()
    read(store_of(filled, 3), blocks(2**15, 288), reported.append)
    assert all(number < place + 3 * IN_FLIGHT for place, number in enumerate(reported))


def test_a_small_read_stays_in_its_thread_on_one_connection(filled: RedisServer) -> None:
    ranges = blocks(2**16, PARALLEL_BYTES // 2**16 - 1)
    threads: set[int] = set()
    assert read(store_of(filled, 4), ranges, lambda _: threads.add(threading.get_ident())) == expected(ranges)
    assert threads == {threading.get_ident()}
    assert connections(filled) == 1


def test_many_reads_at_once_share_the_threads(filled: RedisServer) -> None:
    store, results = store_of(filled, 3), []
    ranges = blocks(2**20, 9)
    readers = [threading.Thread(target=lambda: results.append(read(store, ranges) == VALUE)) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert results == [True] * 8
    store.close()
    assert read(store, ranges) == VALUE


@pytest.mark.parametrize("at", [0, 20, 35])
def test_an_error_of_the_callback_in_any_thread_ends_the_read(filled: RedisServer, at: int) -> None:
    def arrived(number: int) -> None:
        if number == at:
            raise OSError("the callback's own")

    store, out = store_of(filled, 3), bytearray(len(VALUE))
    with pytest.raises(OSError, match="the callback's own"):
        store.read(KEY, blocks(2**18, 36), memoryview(out), arrived)
    before = bytes(out)
    time.sleep(0.05)
    assert out == before
    assert read(store, blocks(2**18, 36)) == VALUE
    store.ping()


def test_a_short_value_and_an_error_reply_are_explained(filled: RedisServer) -> None:
    store = store_of(filled, 3)
    with pytest.raises(EntryCorrupt, match=f"layer 0 of .* has {9 * 2**20} bytes, byte {9 * 2**20 + 5} was to be read"):
        read(store, [*blocks(2**20, 8), Range(0, 8 * 2**20, 2**20 + 5)])
    store.link.command("DEL", NAME)
    store.link.command("LPUSH", NAME, "a list")
    with pytest.raises(EntryCorrupt, match="WRONGTYPE"):
        read(store, blocks(2**20, 9))


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_stops_in_the_middle_ends_the_read_in_time(filled: RedisServer, stop: int) -> None:
    stopped: list[float] = []

    def arrived(number: int) -> None:
        if not stopped:
            stopped.append(time.monotonic())
            filled.process.send_signal(stop)

    with pytest.raises(StoreUnavailable):
        read(store_of(filled, 3, TIMEOUT), blocks(2**18, 36) * 6, arrived)
    assert time.monotonic() - stopped[0] < 0.8
