"""`ragkv bench store`: every reader is measured on the same bytes, and all entries are removed."""

import json
from pathlib import Path

import pytest
import redis

from benchmarks.store import SOCKETS, WHOLE, StoreParams, StoreResult, store
from ragkv.cli import run
from tests.redis_cluster import redis_cluster
from tests.redis_server import redis_server

SMALL = StoreParams(layers=3, layer_bytes=2**20, ranges=(2**16, 2**18), repeat=2)
RIVALS = ("redis-py GET", "redis-py MGET", *(f"plain socket {count}" for count in SOCKETS))


def readers(result: StoreResult) -> set[tuple[str, int]]:
    return {(row.reader, row.range_bytes) for row in result.rows}


def test_all_readers_load_the_same_bytes_of_a_server_of_its_own():
    told = []
    result = store("disk", 0.25, SMALL, lambda *step: told.append(step))
    assert "started for this run" in result.server
    sparse = {(name, size) for name in ("disk", "host pool", "redis", *RIVALS) for size in SMALL.ranges}
    assert readers(result) == sparse | {(name, WHOLE) for name in ("disk", "redis", "redis-py GET")}
    for row in result.rows:
        blocks = {2**16: 7, 2**18: 2}.get(row.range_bytes)  # 15% of 48, of 12
        assert row.bytes == (blocks * row.range_bytes if blocks else result.entry_bytes)
        assert row.gb_per_s == pytest.approx(row.bytes / row.p50 / 1e6)
        assert row.p50 <= row.p99
        assert row.verified == (row.reader in ("disk", "redis"))
    speed = {(row.reader, row.range_bytes): row.gb_per_s for row in result.rows}
    for one in result.comparisons:
        ours, size = speed["redis", one.range_bytes], one.range_bytes
        assert one.to_get == pytest.approx(ours / speed["redis-py GET", size])
        assert one.to_socket == pytest.approx(ours / max(speed[f"plain socket {count}", size] for count in SOCKETS))
    assert told == [("load", 1, 2), ("load", 2, 2)]


def test_a_given_server_is_left_as_it_was():
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        client.set("mine", "stays")
        result = store(server.url, 0.25, SMALL, lambda *_: None)
        assert "as given" in result.server
        assert client.keys() == [b"mine"]


def test_a_cluster_is_measured_without_the_other_readers():
    with redis_cluster() as cluster:
        result = store(cluster.url, 0.25, SMALL, lambda *_: None)
        assert {name for name, _ in readers(result)} == {"disk", "host pool", "redis"}
        assert result.comparisons == ()
        assert all(redis.Redis(port=node.port).dbsize() == 0 for node in cluster.nodes)


def test_without_a_redis_server_the_disk_is_measured(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    result = store("disk", 0.25, SMALL, lambda *_: None)
    assert {name for name, _ in readers(result)} == {"disk", "host pool"}
    assert "no redis-server" in result.server


def test_the_command_shows_its_figures_and_writes_them(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["bench", "store", "--layer-mib", "4", "--repeat", "1", "--json", "store.json"]) == 0
    figures = json.loads(Path("store.json").read_text())
    assert {row["reader"] for row in figures["rows"]} == {"disk", "host pool", "redis", *RIVALS}
    assert figures["entry_bytes"] == 8 * 4 * 2**20
    shown = capsys.readouterr().out
    assert "plain socket 4" in shown
    assert "redis at 256 KiB" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["store.json"]
