"""Faults of the store in the middle of a question, made to happen: they cost time, and nothing else.

Every test asks a question of a healthy engine first. After the fault the answer, the blocks that were chosen and what
was recomputed must be the same; the report says what had to be encoded again, and the next question finds it stored.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from ragkv.engine.engine import Engine
from ragkv.errors import NotFound
from ragkv.ingest.pipeline import ingest, remove
from ragkv.model.decoder import DecoderModel
from ragkv.report import Answer
from ragkv.retrieval import Embedder
from ragkv.store.base import Range
from ragkv.store.disk_store import DiskStore
from ragkv.store.format.layout import Layout
from ragkv.store.redis_link import BREAK_SECONDS
from ragkv.types import Chunk, Key
from tests.interrupted import Interrupted
from tests.libraries import ANSWER, QUESTION, documents, open_engine, open_library
from tests.redis_server import RedisServer, redis_server

SMALL = {"chunk_tokens": 256, "top_k": 4, "max_tokens": 8, "method": "scout:repair=none,cap=0.5"}
TIMEOUT = 0.25


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, model: DecoderModel, embedder: Embedder) -> Path:
    """A data folder with two documents in short chunks, on disk. Tests work on copies."""
    folder = tmp_path_factory.mktemp("filled")
    open_library(folder, model, embedder, ("01", "02"), **SMALL).close()
    return folder


Open = Callable[..., Engine]


@pytest.fixture
def opened(filled: Path, tmp_path: Path, model: DecoderModel, embedder: Embedder) -> Iterator[Open]:
    """Engines on a copy of the data folder; on Redis, with the KV of all chunks put there first."""
    shutil.copytree(filled, tmp_path / "data")
    engines: list[Engine] = []

    def open_one(**settings: object) -> Engine:
        engine = open_engine(tmp_path / "data", model, embedder, **{**SMALL, **settings})
        engines.append(engine)
        if "store" in settings:
            copy_entries(engine, DiskStore(tmp_path / "data" / "kv"))
        return engine

    yield open_one
    for engine in engines:
        engine.close()


def chunks_of(engine: Engine) -> list[Chunk]:
    return [chunk for d in engine.catalog.documents() for chunk in engine.catalog.chunks_of("default", d.id)]


def copy_entries(engine: Engine, disk: DiskStore) -> None:
    """Put what is on disk into the engine's store: quicker than encoding it again."""
    for chunk in chunks_of(engine):
        key = engine.chunks.store("default").key(chunk.tokens)
        size = Layout(engine.model.shape, len(chunk.tokens), engine.model.profile.block, engine.model.dtype).layer_bytes
        layers = range(engine.model.shape.layers)
        body = memoryview(bytearray(size * len(layers)))
        disk.read(key, [Range(layer, 0, size) for layer in layers], body)
        engine.store.put(key, disk.head(key), [body[layer * size : (layer + 1) * size] for layer in layers])


@contextmanager
def client_of(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as client:
        yield client


def same(answer: Answer, healthy: Answer) -> bool:
    """Same words, read from the same blocks, repaired in the same places."""
    return (answer.answer, answer.citations, answer.report.chunks) == (
        healthy.answer,
        healthy.citations,
        healthy.report.chunks,
    )


def fallen_back(answer: Answer) -> list[str]:
    """Chunks that were encoded again; what the report says of them agrees with itself."""
    cache = answer.report.cache
    assert cache.hits.store + cache.misses == cache.chunks
    assert len(cache.fallbacks) == cache.misses
    return [fallback.chunk_id for fallback in cache.fallbacks]


def reasons(answer: Answer) -> set[str]:
    """Every reason given."""
    return {fallback.reason for fallback in answer.report.cache.fallbacks}


def asked(engine: Engine) -> Answer:
    """A healthy answer: everything is found, and it takes both documents."""
    answer = engine.answer(QUESTION)
    assert answer.answer == ANSWER
    assert answer.report.ratios.cache_hit == 1.0
    assert answer.report.cache.chunks == 4
    return answer


def key_of(engine: Engine, chunk_id: str) -> Key:
    (tokens,) = (chunk.tokens for chunk in chunks_of(engine) if chunk.id == chunk_id)
    return engine.chunks.store("default").key(tokens)


# Redis goes away


@pytest.mark.parametrize("read", [1, 3, 5])
def test_a_redis_killed_in_the_middle_of_a_question_costs_time_only(opened: Open, read: int) -> None:
    def kill() -> None:
        server.process.kill()
        server.process.wait()

    with redis_server() as server:
        engine = opened(store=server.url)
        healthy = asked(engine)
        store = Interrupted(engine, read, kill)
        answer = engine.answer(QUESTION)
        assert store.happened
        assert same(answer, healthy)
        assert fallen_back(answer)
        assert reasons(answer) == {"unavailable"}
        assert store.waited < 1.0, "a server that is gone refuses at once"
        assert engine.health()["status"] == "degraded"
        assert same(engine.answer(QUESTION), healthy)


@pytest.mark.parametrize("read", [1, 5])
def test_a_redis_frozen_in_the_middle_of_a_question_costs_a_bounded_time(opened: Open, read: int) -> None:
    with redis_server() as server:
        engine = opened(store=server.url, store_timeout=TIMEOUT)
        healthy = asked(engine)
        store = Interrupted(engine, read, lambda: server.process.send_signal(signal.SIGSTOP))
        began = time.monotonic()
        answer = engine.answer(QUESTION)
        took = time.monotonic() - began
        assert store.happened
        assert same(answer, healthy)
        assert fallen_back(answer)
        assert reasons(answer) == {"unavailable"}
        # A timeout, with what the bytes of one chunk may take, for every second the breaker lets pass.
        assert store.waited < (TIMEOUT + 0.15) * (1 + took / BREAK_SECONDS)
        assert engine.health()["status"] == "degraded"
        server.process.send_signal(signal.SIGCONT)
        time.sleep(BREAK_SECONDS + 0.05)
        assert same(asked(engine), healthy), "replies of before are not taken for those of now"
        assert engine.health()["status"] == "ok"


def test_a_full_redis_takes_documents_and_answers_from_what_it_has(opened: Open) -> None:
    with redis_server("--maxmemory-policy", "noeviction") as server, client_of(server) as client:
        engine = opened(store=server.url)
        healthy = asked(engine)
        victim = healthy.report.chunks[0]
        (document,) = (d for d in documents(("01", "02")) if d.id == victim.document_id)
        remove(engine, "default", document.id)
        client.config_set("maxmemory", 1)
        assert ingest(engine, document).status == "added"
        faults = engine.health()["store_faults"]
        assert faults == len(engine.catalog.chunks_of("default", document.id))
        answer = engine.answer(QUESTION)
        assert same(answer, healthy)
        ours = [chunk.chunk_id for chunk in healthy.report.chunks if chunk.document_id == document.id]
        assert fallen_back(answer) == ours
        assert answer.report.cache.hits.store == 4 - len(ours) > 0, "what is there is still read"
        assert engine.health()["store_faults"] == faults + len(ours)
        assert engine.health()["status"] == "degraded"
        client.config_set("maxmemory", 0)
        engine.answer(QUESTION)
        assert engine.health()["status"] == "ok"
        assert same(asked(engine), healthy)


# Parts of an entry go away


@pytest.mark.parametrize("value", ["head", "body:0", "body:9"])
def test_a_value_that_was_evicted_costs_its_whole_chunk_and_no_other(opened: Open, value: str) -> None:
    with redis_server() as server, client_of(server) as client:
        engine = opened(store=server.url)
        healthy = asked(engine)
        victim = healthy.report.chunks[1].chunk_id
        client.delete(f"ragkv:{{{key_of(engine, victim)}}}:{value}")
        answer = engine.answer(QUESTION)
        assert same(answer, healthy)
        assert fallen_back(answer) == [victim]
        assert reasons(answer) == {"missing"}
        assert same(asked(engine), healthy)


def test_a_layer_that_was_evicted_and_is_computed_again_anyhow_costs_nothing(opened: Open) -> None:
    with redis_server() as server, client_of(server) as client:
        engine = opened(store=server.url, method="scout:cap=0.5")
        healthy = asked(engine)
        victim = healthy.report.chunks[1].chunk_id
        client.delete(f"ragkv:{{{key_of(engine, victim)}}}:body:11")
        assert same(asked(engine), healthy)


@pytest.mark.parametrize("read", [1, 2])
def test_a_layer_evicted_between_head_and_body_costs_its_chunk_and_no_other(opened: Open, read: int) -> None:
    with redis_server() as server, client_of(server) as client:
        engine = opened(store=server.url)
        healthy = asked(engine)
        victim = healthy.report.chunks[1].chunk_id
        name = f"ragkv:{{{key_of(engine, victim)}}}:body:5"
        store = Interrupted(engine, read, lambda: client.delete(name))
        answer = engine.answer(QUESTION)
        assert store.happened
        assert same(answer, healthy)
        assert fallen_back(answer) == [victim]
        assert reasons(answer) == {"missing"}
        assert store.calls.count("put") == 1
        assert same(asked(engine), healthy)


# Damage


def damage_a_file(path: Path, other: Path, rng: random.Random) -> None:
    """Something that disks, copies and people do to a file."""
    data = bytearray(path.read_bytes())
    at, kind = rng.randrange(len(data)), rng.randrange(8)
    if kind < 4:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 4:
        del data[at:]
    elif kind == 5:
        start = at // 4096 * 4096
        data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    elif kind == 6:
        data += b"tail"
    else:
        data = bytearray(other.read_bytes())
    path.write_bytes(data)


def damage_a_value(client: redis.Redis, key: Key, other: Key, rng: random.Random) -> None:
    """The same for one value of an entry in Redis."""
    body = [f"ragkv:{{{key}}}:body:{layer}" for layer in range(12)]
    name, kind = rng.choice([f"ragkv:{{{key}}}:head"] * 4 + body), rng.randrange(8)
    if client.type(name) != b"string":
        return  # damaged before, where no question reads
    data = client.get(name)
    at = rng.randrange(len(data))
    if kind < 4:
        client.setrange(name, at, bytes([data[at] ^ 1 << rng.randrange(8)]))
    elif kind == 4:
        client.set(name, data[:at])
    elif kind == 5:
        client.delete(name)
    elif kind == 6:
        client.delete(body[at % 12])
        client.rpush(body[at % 12], "a value of another type")
    else:
        client.set(name, client.get(name.replace(key, other)) or b"")


@pytest.mark.parametrize("store", ["disk", "redis"])
def test_no_damage_at_36_random_places_changes_an_answer(opened: Open, tmp_path: Path, store: str) -> None:
    """Every round damages the entries of all four chunks, each somewhere else. What no question reads stays damaged."""
    rng, found = random.Random(5), 0
    with redis_server() as server, client_of(server) as client:
        engine = opened(store=server.url) if store == "redis" else opened()
        healthy = asked(engine)
        keys = [key_of(engine, chunk.chunk_id) for chunk in healthy.report.chunks]
        for turn in range(9):
            for i, key in enumerate(keys):
                other = keys[i - 1]
                if store == "redis":
                    damage_a_value(client, key, other, rng)
                else:
                    root = tmp_path / "data" / "kv"
                    damage_a_file(root / key[:2] / f"{key}.kv", root / other[:2] / f"{other}.kv", rng)
            answer = engine.answer(QUESTION)
            assert same(answer, healthy), turn
            found += len(fallen_back(answer))
            if turn % 4 == 3:
                assert same(asked(engine), healthy), "what was encoded again took the place of what was damaged"
        assert 12 <= found <= 36
        assert 0 < engine.health()["quarantined"] <= found


@contextmanager
def one_damaged(engine: Engine, client: redis.Redis) -> Iterator[tuple[Answer, str]]:
    """(healthy answer, chunk whose stored head is damaged)."""
    healthy = asked(engine)
    victim = healthy.report.chunks[1].chunk_id
    name = f"ragkv:{{{key_of(engine, victim)}}}:head"
    (byte,) = client.getrange(name, 200, 200)
    client.setrange(name, 200, bytes([byte ^ 1]))
    yield healthy, victim


def test_a_damaged_entry_that_cannot_be_replaced_is_removed(opened: Open) -> None:
    with redis_server() as server, client_of(server) as client:
        engine = opened(store=server.url)
        with one_damaged(engine, client) as (healthy, victim):
            client.config_set("maxmemory", 1)
            first, second = engine.answer(QUESTION), engine.answer(QUESTION)
            assert same(first, healthy)
            assert same(second, healthy)
            assert fallen_back(first) == fallen_back(second) == [victim]
            assert (reasons(first), reasons(second)) == ({"corrupt"}, {"missing"})
            assert engine.health()["quarantined"] == 1
            client.config_set("maxmemory", 0)
            engine.answer(QUESTION)
            assert same(asked(engine), healthy)


def test_a_damaged_entry_that_cannot_be_removed_is_not_read_again(opened: Open) -> None:
    with redis_server() as server, client_of(server) as client:
        engine = opened(store=server.url)
        with one_damaged(engine, client) as (healthy, victim):
            client.replicaof("127.0.0.1", 1)  # a replica of nobody: reads are served, writes are not
            assert fallen_back(engine.answer(QUESTION)) == [victim]
            before = client.info("commandstats")["cmdstat_get"]["calls"]
            answer = engine.answer(QUESTION)
            assert client.info("commandstats")["cmdstat_get"]["calls"] - before == 3, "heads of the other chunks"
            assert same(answer, healthy)
            assert fallen_back(answer) == [victim]
            assert answer.report.cache.fallbacks[0].reason == "corrupt"
            assert engine.health()["quarantined"] == 1
            client.replicaof("NO", "ONE")
            engine.answer(QUESTION)
            assert same(asked(engine), healthy)


# A document goes away


def test_a_document_deleted_during_a_question_is_not_in_its_answer_and_never_cited_again(
    opened: Open, model: DecoderModel, embedder: Embedder
) -> None:
    engine = opened()
    with open_engine(engine.settings.data, model, embedder, **SMALL) as other:  # as `ragkv rm` in another process
        healthy = asked(engine)
        gone = healthy.citations[0].document_id
        store = Interrupted(engine, 2, lambda: remove(other, "default", gone))
        during = engine.answer(QUESTION)
        assert store.happened
        assert gone not in {citation.document_id for citation in during.citations}
        assert gone not in {chunk.document_id for chunk in during.report.chunks}
        assert set(engine.store.keys()) == engine.catalog.keys(), "nothing of it was stored again"
        after = engine.answer(QUESTION)
        assert after.citations
        assert gone not in {citation.document_id for citation in after.citations}
        for document in {citation.document_id for citation in after.citations}:
            remove(other, "default", document)
        with pytest.raises(NotFound):
            engine.answer(QUESTION)
