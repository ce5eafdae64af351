"""Garbage collection removes garbage and nothing else: not entries of a running ingest, nor those of others."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from ragkv.admin.gc import CollectedGarbage, collect_garbage
from ragkv.catalog import Catalog
from ragkv.cli import run
from ragkv.engine.engine import Engine
from ragkv.errors import StoreUnavailable
from ragkv.ingest.pipeline import Paused, Stage, ingest
from ragkv.store import open_store
from ragkv.store.base import StoreStats
from ragkv.types import AskOptions, Key
from tests.ingest.reader import make_document
from tests.quick import quick_engine
from tests.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.usefixtures("one_thread")
NOTHING = StoreStats(0, 0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(params=["disk", "redis"])
def setting(request: pytest.FixtureRequest) -> str:
    """The setting of an empty store."""
    if request.param == "disk":
        return "disk"
    url: str = request.getfixturevalue("server").url
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url


@pytest.fixture
def engine(tmp_path: Path, setting: str) -> Iterator[Engine]:
    """An engine with two documents."""
    with quick_engine(tmp_path / "data", store=setting) as opened:
        for name in "ab":
            ingest(opened, make_document(name, words=60, seed=ord(name)))
        yield opened


def stored(engine: Engine) -> set[Key]:
    return set(engine.store.keys())


def leave_orphans(engine: Engine, document_id: str = "a") -> set[Key]:
    """Remove a document like a process that is killed before it has removed the KV."""
    return set(engine.catalog.remove("default", document_id))


def test_referenced_entries_are_kept(engine: Engine) -> None:
    before = stored(engine)
    found = collect_garbage(engine.store, engine.catalog, foreign=True, grace=0)
    assert found == CollectedGarbage(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, kept=len(before))
    assert stored(engine) == before == engine.catalog.keys()


def test_orphans_are_removed_and_counted(engine: Engine) -> None:
    size = engine.store.stats().bytes
    orphans = leave_orphans(engine)
    assert orphans
    counted = collect_garbage(engine.store, engine.catalog, dry_run=True)
    assert stored(engine) == engine.catalog.keys() | orphans, "a dry run only counts"
    found = collect_garbage(engine.store, engine.catalog)
    assert found == counted
    assert found.orphan.entries == len(orphans)
    assert stored(engine) == engine.catalog.keys()
    assert found.orphan.bytes == size - engine.store.stats().bytes
    assert found.kept == len(engine.catalog.keys())
    assert collect_garbage(engine.store, engine.catalog).orphan == NOTHING


def test_orphans_of_an_empty_catalogue_are_removed(engine: Engine) -> None:
    for name in "ab":
        leave_orphans(engine, name)
    collect_garbage(engine.store, engine.catalog)
    assert stored(engine) == set()


def test_entries_of_other_models_are_removed_only_on_request(engine: Engine, tmp_path: Path, setting: str) -> None:
    if setting == "disk":
        with quick_engine(engine.settings.data, model="another") as other:
            ingest(other, make_document("c", words=60, seed=3))
            theirs = leave_orphans(other, "c")
        ingest(engine, make_document("d", words=10, seed=4))  # our model ingested last
    else:
        with quick_engine(tmp_path / "elsewhere", model="another", store=setting) as other:
            ingest(other, make_document("c", words=60, seed=3))
            theirs = other.catalog.keys()
    assert theirs < stored(engine)
    found = collect_garbage(engine.store, engine.catalog)
    assert found.foreign.entries == len(theirs)
    assert found.orphan == NOTHING
    assert theirs < stored(engine)
    assert collect_garbage(engine.store, engine.catalog, foreign=True) == found
    assert stored(engine) == engine.catalog.keys()


def test_entries_stored_by_a_question_under_the_present_model_are_kept(engine: Engine, setting: str) -> None:
    """The catalogue holds the key under the model that ingested; the present model stored the chunk under another."""
    with quick_engine(engine.settings.data, model="another", store=setting) as other:
        ingest(other, make_document("c", words=60, seed=3))
        for _ in range(2):
            answer = other.answer("word1 word2 word3", AskOptions(top_k=20))
        assert answer.report.ratios.cache_hit == 1.0
        before = stored(other)
        assert before > other.catalog.keys()
        assert collect_garbage(other.store, other.catalog, foreign=True).kept == len(before)
        assert stored(other) == before


def test_entries_of_a_running_ingest_are_kept_and_those_of_a_dead_one_removed(engine: Engine) -> None:
    def stop(stage: Stage, done: int, total: int) -> None:
        if stage == "commit":
            raise Paused

    with pytest.raises(Paused):
        ingest(engine, make_document("c", words=60, seed=3), stop)
    held = stored(engine) - engine.catalog.keys()
    assert held
    assert collect_garbage(engine.store, engine.catalog).orphan == NOTHING
    assert held < stored(engine)
    time.sleep(0.02)
    assert collect_garbage(engine.store, engine.catalog, grace=0.01).orphan.entries == len(held)
    assert stored(engine) == engine.catalog.keys()
    with engine.catalog.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM claimed").fetchone() == (0,), (
            "expired claims are deleted"
        )


def test_deleting_a_document_keeps_entries_that_another_ingest_relies_on(engine: Engine) -> None:
    """The same text is being ingested under another id, and its chunks were found in the store."""
    again = make_document("a", words=60, seed=ord("a"))

    def meanwhile(stage: Stage, done: int, total: int) -> None:
        if stage == "commit":
            engine.evict(engine.catalog.remove("default", "a"))

    ingest(engine, type(again)("other", again.title, again.text), meanwhile)
    assert stored(engine) == engine.catalog.keys()


def test_damaged_entries_are_removed_unless_a_chunk_refers_to_them(tmp_path: Path) -> None:
    with quick_engine(tmp_path) as engine:
        for name in "ab":
            ingest(engine, make_document(name, words=60, seed=ord(name)))
        orphans = leave_orphans(engine)
        for path in (tmp_path / "kv").glob("??/*.kv"):
            data = bytearray(path.read_bytes())
            data[300] ^= 1  # in the head
            path.write_bytes(data)
        found = collect_garbage(engine.store, engine.catalog)
        assert (found.damaged.entries, found.orphan) == (len(orphans), NOTHING)
        assert stored(engine) == engine.catalog.keys()


def test_a_partly_evicted_orphan_is_removed(tmp_path: Path, server: RedisServer) -> None:
    with quick_engine(tmp_path, store=server.url) as engine, redis.Redis.from_url(server.url) as client:
        client.flushall()
        ingest(engine, make_document("a", words=60))
        orphans = leave_orphans(engine)
        for key in orphans:
            client.delete(f"ragkv:{{{key}}}:body:1")
        assert collect_garbage(engine.store, engine.catalog).orphan.entries == len(orphans)
        assert client.dbsize() == 0


def test_expired_entries_and_temporary_files_are_removed(tmp_path: Path) -> None:
    with quick_engine(tmp_path, store_ttl=1000) as engine:
        ingest(engine, make_document("a", words=60))
        first, *others = sorted((tmp_path / "kv").glob("??/*.kv"))
        os.utime(first, (0, 0))
        left = first.with_name(f".{first.stem}.0123456789abcdef.tmp")
        left.write_bytes(bytes(123))
        os.utime(left, (0, 0))
        expired = StoreStats(1, first.stat().st_size)
        for dry_run in (True, False):
            found = collect_garbage(engine.store, engine.catalog, dry_run=dry_run)
            assert (found.expired, found.temporary, found.kept) == (expired, StoreStats(1, 123), len(others))
            assert first.exists() == left.exists() == dry_run
        answer = engine.answer("word1 word2", AskOptions(top_k=20))
        assert [fallback.reason for fallback in answer.report.cache.fallbacks] == ["missing"]


def test_an_unavailable_store_is_reported(tmp_path: Path) -> None:
    with redis_server() as stopped:
        url = stopped.url
    with quick_engine(tmp_path, store=url) as engine:
        ingest(engine, make_document("a", words=60))
        with pytest.raises(StoreUnavailable):
            collect_garbage(engine.store, engine.catalog)


def test_referenced_entries_are_kept_while_documents_change(engine: Engine, setting: str) -> None:
    """There are always orphans, and every ingest finds in the store what the collectors are about to remove."""
    stop, errors, removed = threading.Event(), list[Exception](), [0]

    def clean() -> None:
        catalog = Catalog.open(engine.settings.data / "catalog.sqlite")
        store = open_store(setting, engine.settings.data, 0.25)
        try:
            while not stop.is_set():
                removed[0] += collect_garbage(store, catalog, foreign=True).orphan.entries
                time.sleep(0.02)  # Give other writers a chance; SQLite is not fair.
        except Exception as error:
            errors.append(error)
        finally:
            store.close()
            catalog.close()

    collectors = [threading.Thread(target=clean) for _ in range(2)]
    for collector in collectors:
        collector.start()
    try:
        until, latest = time.monotonic() + 3, time.monotonic() + 60  # a busy machine needs longer
        while not errors and time.monotonic() < (until if removed[0] > 10 else latest):
            for seed in range(3):
                ingest(engine, make_document("c", words=60, seed=seed))
                assert engine.catalog.keys() <= stored(engine), "a chunk lost its KV"
                leave_orphans(engine, "c")
    finally:
        stop.set()
        for collector in collectors:
            collector.join()
    assert not errors
    assert removed[0] > 10, "the test had nothing to remove"
    collect_garbage(engine.store, engine.catalog)
    assert stored(engine) == engine.catalog.keys()


# Command


def test_the_command_prints_json_and_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with quick_engine(tmp_path) as engine:
        for name in "ab":
            ingest(engine, make_document(name, words=60, seed=ord(name)))
        orphans = leave_orphans(engine)
        kept = len(engine.catalog.keys())
    command = ["gc", "--data", str(tmp_path)]
    assert run([*command, "--json", "--dry-run"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["dry_run"], printed["orphan"]["entries"], printed["kept"]) == (True, len(orphans), kept)
    assert run(command) == 0
    assert capsys.readouterr().out.split()[:2] == ["removed", str(len(orphans))]
    assert run(command) == 0
    assert capsys.readouterr().out.split() == ["kept", str(kept)]
    assert len(list((tmp_path / "kv").glob("??/*.kv"))) == kept


def test_the_command_refuses_a_folder_without_a_catalogue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gc", "--data", str(tmp_path / "typo"), "--fingerprints"]) == 2
    assert "no catalogue" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
