"""The Redis store: the bytes it sends, the values it keeps, and that it never shows passwords."""

from __future__ import annotations

import socket
import threading
import traceback
import tracemalloc
from pathlib import Path

import pytest
import redis

from ragkv.errors import ConfigError, EntryCorrupt, EntryMissing, StoreUnavailable
from ragkv.store.base import Range, StoreStats
from ragkv.store.format.codec import pack
from ragkv.store.format.head import chunk_key, unpack_head
from ragkv.store.redis_store import RedisStore
from ragkv.types import Key, Shape
from tests.redis_server import RedisServer, redis_server
from tests.store.chunks import random_kv, read_blocks, read_ranges, wanted_bytes

KEY = Key("ab" * 32)
HEAD = b"h" * 500
BODY = [bytes([layer]) * 40_000 for layer in range(3)]
TIMEOUT = 5.0
SECRET = "open-sesame"


def reply_bytes(size: int) -> int:
    """Return the bytes of a bulk reply: $<size>CRLF, the data, CRLF."""
    return len(f"${size}\r\n") + size + 2


def test_only_the_wanted_bytes_leave_the_server(own: RedisServer) -> None:
    kv = random_kv(tokens=100, block=8, shape=Shape(12, 4, 2, 32))
    key = chunk_key("model", "", kv.tokens)
    record, body = pack(kv, 8, "model")
    store = RedisStore(own.url, TIMEOUT)
    store.put(key, record, body)
    head = unpack_head(record, key, "model", "")
    requested = [[layer % 3, 4, 5, 7 + layer % 5, 12] for layer in range(12)]
    with redis.Redis.from_url(own.url, protocol=2, driver_info=None) as admin:
        admin.config_resetstat()
        line = admin.connection_pool.get_connection()

        def info(section: str) -> bytes:
            line.send_command("INFO", section)
            return line.read_response()

        def output(text: bytes) -> int:
            return int(text.split(b"total_net_output_bytes:")[1].split()[0])

        before = info("stats")
        read_blocks(store, key, head, requested)
        after = info("stats")
        commands = info("commandstats")
        admin.connection_pool.release(line)
    full, last = head.layout.range(0, 0).size, head.layout.range(0, 12).size
    replies = 0
    for blocks in requested:
        starts = [block for block in blocks if block - 1 not in blocks]
        for start in starts:
            run = [block for block in range(start, 13) if set(range(start, block + 1)) <= set(blocks)]
            replies += reply_bytes(sum(last if block == 12 else full for block in run))
    assert output(after) - output(before) - reply_bytes(len(before)) == replies
    assert 0 < replies - wanted_bytes(head.layout, requested) < 12 * 5 * 12
    names = {line.split(b":")[0] for line in commands.splitlines() if line.startswith(b"cmdstat_")}
    assert names == {b"cmdstat_getrange", b"cmdstat_info", b"cmdstat_config|resetstat"}


def test_a_connection_sends_nothing_but_the_commands_of_the_store(own: RedisServer) -> None:
    with redis.Redis.from_url(own.url, protocol=2, driver_info=None) as admin:
        admin.config_resetstat()
        store = RedisStore(own.url, TIMEOUT)
        store.put(KEY, HEAD, BODY)
        store.head(KEY)
        read_ranges(store, KEY, Range(0, 0, 5))
        store.delete(KEY)
        calls = {name: entry["calls"] for name, entry in admin.info("commandstats").items()}
        clients = admin.info("stats")["total_connections_received"]
    assert calls == {
        "cmdstat_config|resetstat": 1,
        "cmdstat_exec": 1,
        "cmdstat_get": 1,
        "cmdstat_getrange": 3,
        "cmdstat_multi": 1,
        "cmdstat_set": 4,
        "cmdstat_unlink": 2,  # the lease, and the surplus or the deleted entry
    }
    assert clients == 1


def test_an_entry_that_lost_a_layer_is_missing_and_not_counted(own: RedisServer) -> None:
    store = RedisStore(own.url, TIMEOUT)
    store.put(KEY, HEAD, BODY)
    with redis.Redis.from_url(own.url) as admin:
        admin.delete(f"ragkv:{{{KEY}}}:body:1")
        with pytest.raises(EntryMissing, match="layer 1"):
            read_ranges(store, KEY, Range(0, 0, 5), Range(1, 0, 5))
        assert store.stats() == StoreStats(0, 0)
        store.put(KEY, HEAD, BODY)
        assert store.stats() == StoreStats(1, 500 + 120_000)
        admin.delete(f"ragkv:{{{KEY}}}:head")
        with pytest.raises(EntryMissing):
            store.head(KEY)
        assert list(store.keys()) == []


def test_values_of_another_type_are_corrupt_and_can_be_replaced(own: RedisServer) -> None:
    store = RedisStore(own.url, TIMEOUT)
    with redis.Redis.from_url(own.url) as admin:
        store.put(KEY, HEAD, BODY)
        admin.setrange(f"ragkv:{{{KEY}}}:head", 0, "x")
        with pytest.raises(EntryCorrupt, match="frame"):
            store.head(KEY)
        assert store.stats() == StoreStats(0, 0)
        assert store.delete(KEY)
        assert admin.dbsize() == 0
        admin.rpush(f"ragkv:{{{KEY}}}:body:0", "a list")
        with pytest.raises(EntryCorrupt, match="WRONGTYPE"):
            read_ranges(store, KEY, Range(0, 0, 1))
        store.put(KEY, HEAD, BODY)
        assert read_ranges(store, KEY, Range(0, 0, 1)) == b"\0"
        for repair in (lambda: store.delete(KEY), lambda: store.put(KEY, HEAD, BODY)):
            admin.delete(f"ragkv:{{{KEY}}}:head")
            admin.rpush(f"ragkv:{{{KEY}}}:head", "a list")
            repair()
        assert store.head(KEY) == HEAD
        admin.set("ragkv:{nothing of ours}:head", "x")
        assert list(store.keys()) == [KEY]


def test_all_values_of_an_entry_are_in_one_cluster_slot(own: RedisServer) -> None:
    RedisStore(own.url, TIMEOUT).put(KEY, HEAD, BODY)
    with redis.Redis.from_url(own.url) as admin:
        slots = {redis.crc.key_slot(name) for name in admin.scan_iter()}
    assert len(slots) == 1


def test_a_smaller_entry_removes_the_surplus_layers(own: RedisServer) -> None:
    store = RedisStore(own.url, TIMEOUT)
    store.put(KEY, HEAD, BODY)
    store.put(KEY, HEAD, BODY[:1])
    with redis.Redis.from_url(own.url) as admin:
        assert admin.dbsize() == 2
        store.delete(KEY)
        assert admin.dbsize() == 0


def test_writing_needs_room_for_the_entry_once_on_the_server_and_never_in_the_client(own: RedisServer) -> None:
    store = RedisStore(own.url, TIMEOUT)
    body = [bytes(6 * 2**20) for _ in range(8)]
    with redis.Redis.from_url(own.url) as admin:
        for times in (1, 2):  # the second time beside the entry that is replaced
            before = admin.info("memory")["used_memory"] - (48 * 2**20 if times == 2 else 0)
            admin.config_resetstat()
            tracemalloc.start()
            store.put(KEY, HEAD, body)
            _, client = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            server = admin.info("memory")["used_memory_peak"] - before
            assert 48 * 2**20 * times <= server < 48 * 2**20 * (times + 0.5)
            assert client < 2**20
    assert read_ranges(store, KEY, Range(7, 0, 6 * 2**20)) == body[7]


def test_a_writer_that_is_cut_off_changes_nothing(own: RedisServer) -> None:
    store = RedisStore(own.url, TIMEOUT)
    store.put(KEY, HEAD, BODY)
    with redis.Redis.from_url(own.url) as admin, socket.create_connection(("127.0.0.1", own.port)) as line:
        line.sendall(b"MULTI\r\nSET ragkv:{%b}:body:0 other\r\nSET ragkv:{%b}:head x\r\n" % ((KEY.encode(),) * 2))
        assert line.recv(23, socket.MSG_WAITALL) == b"+OK\r\n+QUEUED\r\n+QUEUED\r\n"
        line.close()
        assert admin.ping()
    assert store.head(KEY) == HEAD
    assert read_ranges(store, KEY, Range(0, 0, 40_000)) == BODY[0]


def full_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


def test_a_password_is_used_and_never_shown() -> None:
    with redis_server("--requirepass", SECRET) as locked:
        address = f"127.0.0.1:{locked.port}"
        store = RedisStore(f"redis://:{SECRET}@{address}/2", TIMEOUT)
        store.put(KEY, HEAD, BODY)
        assert store.head(KEY) == HEAD
        assert SECRET not in repr(store) + repr(vars(store))
        locked.process.kill()
        locked.process.wait()
        with pytest.raises(StoreUnavailable) as down:
            store.ping()
        assert SECRET not in full_text(down.value)
    with redis_server("--requirepass", "another") as locked:
        address = f"127.0.0.1:{locked.port}"
        for url in (f"redis://:{SECRET}@{address}", f"redis://{address}", f"redis://nobody:{SECRET}@{address}"):
            with pytest.raises(StoreUnavailable) as wrong:
                RedisStore(url, TIMEOUT).ping()
            assert SECRET not in full_text(wrong.value)


def test_a_password_quoted_by_the_server_is_redacted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            line, _ = other.accept()
            with line:
                line.recv(1000)
                line.sendall(b"-ERR unknown command `AUTH`, with args beginning with: `%s`\r\n" % SECRET.encode())

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StoreUnavailable, match=r"\*\*\*") as wrong:
            RedisStore(f"redis://:{SECRET}@127.0.0.1:{other.getsockname()[1]}", TIMEOUT).ping()
        thread.join()
        assert SECRET not in full_text(wrong.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@host:port",
        f"redis://:{SECRET}@host/0?health_check_interval=often",
        f"redis://:{SECRET}@host/0?no_such_option=1",
        f"redis://:{SECRET}@[::1/0",
    ],
)
def test_a_malformed_url_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(ConfigError, match="malformed") as wrong:
        RedisStore(url, TIMEOUT)
    assert SECRET not in str(wrong.value) + repr(wrong.value.__cause__)


def test_a_unix_socket_works_too(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with redis_server("--unixsocket", str(path)):
        store = RedisStore(f"unix://{path}?db=1", TIMEOUT)
        store.put(KEY, HEAD, BODY)
        assert read_ranges(store, KEY, Range(1, 0, 3)) == b"\1\1\1"
        assert str(path) in repr(store)
    with pytest.raises(StoreUnavailable, match=r"redis\.sock"):
        store.ping()
