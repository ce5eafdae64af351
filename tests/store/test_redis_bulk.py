"""Large loads over several connections: every byte in its place, every range told once, no fault left behind."""

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

from ragkv.errors import StoreUnavailable
from ragkv.store.base import Range, ignore
from ragkv.store.redis_bulk import PARALLEL_BYTES, PIECE, UNDER_WAY, BulkReader, OddReply
from ragkv.store.redis_link import ServerLink
from tests.redis_server import RedisServer

VALUE = hashlib.shake_128(b"value").digest(9 * 2**20)
NAME = "value"


@pytest.fixture
def link(own: RedisServer) -> ServerLink:
    with redis.Redis.from_url(own.url) as admin:
        admin.set(NAME, VALUE)
        admin.config_resetstat()
    return ServerLink(own.url, 0.25)


def read(bulk: BulkReader, ranges: Sequence[Range], arrived=ignore) -> bytearray:
    out = bytearray(sum(part.size for part in ranges))
    bulk.read([NAME] * len(ranges), ranges, memoryview(out), arrived)
    return out


def truth(ranges: Sequence[Range]) -> bytes:
    return b"".join(VALUE[part.offset : part.offset + part.size] for part in ranges)


def blocks(size: int, count: int) -> list[Range]:
    return [Range(0, number * size, size) for number in range(count)]


def connections(own: RedisServer) -> int:
    """Opened since the statistics were reset, that of this question not counted."""
    with redis.Redis.from_url(own.url) as admin:
        return int(admin.info("stats")["total_connections_received"]) - 1


LISTS = st.lists(st.tuples(st.integers(0, 9 * 2**20), st.integers(0, 3 * PIECE)), max_size=30)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=LISTS)
def test_any_ranges_over_any_number_of_connections_come_whole(link: ServerLink, places: list[tuple[int, int]]) -> None:
    ranges = [Range(0, start, min(size, len(VALUE) - start)) for start, size in places]
    for readers in (1, 2, 4):
        told: list[int] = []
        bulk = BulkReader(link, readers)
        assert read(bulk, ranges, told.append) == truth(ranges)
        assert sorted(told) == list(range(len(ranges)))
        bulk.close()


def test_a_large_load_uses_several_connections_and_threads_each_in_order(link: ServerLink, own: RedisServer) -> None:
    ranges = blocks(2**18, 36)
    told: list[tuple[int, int]] = []
    together = threading.Barrier(3)

    def arrived(number: int) -> None:
        told.append((threading.get_ident(), number))
        if len(told) <= 3:
            together.wait(timeout=5)  # all three are at work at once

    assert read(BulkReader(link, 3), ranges, arrived) == VALUE
    assert connections(own) == 3
    threads = {thread for thread, _ in told}
    assert len(threads) == 3
    assert threading.get_ident() in threads
    for thread in threads:
        assert all(a < b for a, b in pairwise(number for who, number in told if who == thread))


def test_earlier_ranges_arrive_first_but_for_what_is_under_way(link: ServerLink) -> None:
    told: list[int] = []
    read(BulkReader(link, 1), blocks(2**15, 288), told.append)
    assert told == list(range(288))
    told.clear()
    read(BulkReader(link, 3), blocks(2**15, 288), told.append)
    assert all(number < place + 3 * UNDER_WAY for place, number in enumerate(told))


def test_a_small_load_stays_in_its_thread_on_one_connection(link: ServerLink, own: RedisServer) -> None:
    ranges = blocks(2**16, PARALLEL_BYTES // 2**16 - 1)
    threads: set[int] = set()
    assert read(BulkReader(link, 4), ranges, lambda _: threads.add(threading.get_ident())) == truth(ranges)
    assert threads == {threading.get_ident()}
    assert connections(own) == 1


def test_many_loads_at_once_share_the_threads(link: ServerLink) -> None:
    bulk, found = BulkReader(link, 3), []
    ranges = blocks(2**20, 9)
    readers = [threading.Thread(target=lambda: found.append(read(bulk, ranges) == VALUE)) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert found == [True] * 8
    bulk.close()
    assert read(bulk, ranges) == VALUE


@pytest.mark.parametrize("at", [0, 20, 35])
def test_what_the_listener_raises_in_any_thread_ends_the_load(link: ServerLink, at: int) -> None:
    def arrived(number: int) -> None:
        if number == at:
            raise OSError("the listener's own")

    bulk, out = BulkReader(link, 3), bytearray(len(VALUE))
    with pytest.raises(OSError, match="the listener's own"):
        bulk.read([NAME] * 36, blocks(2**18, 36), memoryview(out), arrived)
    left = bytes(out)
    time.sleep(0.05)
    assert out == left
    assert read(bulk, blocks(2**18, 36)) == VALUE
    link.ask("PING")


def test_a_short_value_and_an_error_are_told_with_their_place(link: ServerLink) -> None:
    with pytest.raises(OddReply) as short:
        read(BulkReader(link, 3), [*blocks(2**20, 8), Range(0, 8 * 2**20, 2**20 + 5)])
    assert short.value.piece[2:4] == (9 * 2**20, 5)
    assert short.value.reply == 0
    link.ask("DEL", NAME)
    link.ask("LPUSH", NAME, "a list")
    with pytest.raises(OddReply) as wrong:
        read(BulkReader(link, 3), blocks(2**20, 9))
    assert "WRONGTYPE" in str(wrong.value.reply)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_stops_in_the_middle_ends_the_load_in_time(link: ServerLink, own: RedisServer, blow: int) -> None:
    struck: list[float] = []

    def arrived(number: int) -> None:
        if not struck:
            struck.append(time.monotonic())
            own.process.send_signal(blow)

    with pytest.raises(StoreUnavailable):
        read(BulkReader(link, 3), blocks(2**18, 36) * 6, arrived)
    assert time.monotonic() - struck[0] < 0.8
