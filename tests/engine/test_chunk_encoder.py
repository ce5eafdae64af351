"""Chunks are encoded and stored together: what is there stays, and what a store refuses costs nothing but time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from ragkv.engine.chunk_encoder import GROUP_TOKENS, GROUP_TOKENS_ON_GPU, group_tokens
from ragkv.engine.engine import Engine
from ragkv.errors import EntryMissing, StoreFull, StoreUnavailable
from ragkv.ingest.pipeline import ingest
from ragkv.types import AskOptions, Chunk, Document, Key
from tests.quick import quick_engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with quick_engine(tmp_path) as opened:
        yield opened


def chunk(engine: Engine, number: int) -> Chunk:
    tokens = engine.model.prompt.chunk("Ferry", f"The ferry number {number} leaves at noon. " * number)
    return Chunk(f"d#{number}", "d", number, "Ferry", "text", tokens)


def passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many passes each forward has."""
    seen, forward = list[int](), engine.model.forward

    def counted(given):
        seen.append(len(given))
        return forward(given)

    monkeypatch.setattr(engine.model, "forward", counted)
    return seen


def test_missing_chunks_are_encoded_in_one_forward_and_the_others_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [(chunk(engine, number), "default") for number in (1, 2, 3)]
    engine.encode_and_store_all(chunks[:1])
    seen = passes(engine, monkeypatch)
    engine.encode_and_store_all([*chunks, chunks[2]])
    assert seen == [2]
    for each, collection in chunks:
        engine.chunks.store(collection).verify_stored(each.tokens)


def test_a_chunk_is_stored_in_its_own_collection(engine: Engine) -> None:
    one = chunk(engine, 1)
    engine.encode_and_store_all([(one, "a"), (one, "b")])
    for collection in "ab":
        engine.chunks.store(collection).verify_stored(one.tokens)


def test_what_is_stored_together_is_what_is_stored_alone(engine: Engine) -> None:
    chunks = [chunk(engine, number) for number in (1, 2, 4)]
    engine.encode_and_store_all((each, "together") for each in chunks)
    for each in chunks:
        engine.encode_and_store_all([(each, "alone")])
        together, alone = (
            engine.chunks.store(name).head(engine.chunks.store(name).key(each.tokens), len(each.tokens))[0]
            for name in ("together", "alone")
        )
        assert torch.equal(together.digest.landmarks, alone.digest.landmarks)
        torch.testing.assert_close(together.digest.mean_keys, alone.digest.mean_keys, rtol=1e-3, atol=1e-4)


def test_chunks_of_a_group_are_written_at_the_same_time_where_there_are_several_writers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, put, together = [(chunk(engine, n), "default") for n in (1, 2, 3)], engine.store.put, threading.Barrier(3)

    def waiting(key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        together.wait(20)
        if body[0].nbytes == sizes[1]:
            raise StoreFull("no room for the second one")
        put(key, head, body)

    sizes = [engine.chunks.store("default").as_loaded(engine.prefiller.encode(each.tokens)) for each, _ in chunks]
    sizes = [2 * each.k[0].nbytes for each in sizes]
    monkeypatch.setattr(engine.store, "put", waiting)
    engine.chunks.writer.threads = 3
    engine.encode_and_store_all(chunks)
    engine.finish_writes(engine.key(*each) for each in chunks)
    assert (engine.chunks.encoded, engine.chunks.faults.refused) == (3, 1)
    store = engine.chunks.store("default")
    for number in (0, 2):
        store.verify_stored(chunks[number][0].tokens)
    with pytest.raises(EntryMissing):
        store.verify_stored(chunks[1][0].tokens)


def test_nothing_is_encoded_while_the_store_is_down(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(key):
        raise StoreUnavailable("down")

    monkeypatch.setattr(engine.store, "head", down)
    seen = passes(engine, monkeypatch)
    engine.encode_and_store_all([(chunk(engine, 1), "default")])
    assert sum(seen) == 0
    assert engine.chunks.faults.refused == 1


def test_a_gpu_encodes_more_together_than_a_cpu_unless_a_setting_says_how_much(tmp_path: Path) -> None:
    assert group_tokens(torch.device("cpu")) == GROUP_TOKENS < GROUP_TOKENS_ON_GPU == group_tokens(torch.device("cuda"))
    with quick_engine(tmp_path / "own", group_tokens=77) as own:
        assert own.group_tokens == 77


@pytest.mark.parametrize(("prefix", "exact"), [("shared", [True, False]), ("isolated", [False, False])])
def test_a_chunk_that_was_encoded_alone_is_never_exact(tmp_path: Path, prefix: str, exact: list[bool]) -> None:
    with quick_engine(tmp_path, prefix=prefix) as engine:
        for _ in ("encoded", "loaded"):
            opened = [engine.chunks.open(chunk(engine, number), "default", number == 1) for number in (1, 2)]
            assert [source.piece.exact for source in opened] == exact


@pytest.mark.parametrize(("method", "fetched"), [("scout:chunks=3", 3), ("reuse", 8)])
def test_no_more_chunks_are_fetched_ahead_than_may_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, fetched: int
) -> None:
    with quick_engine(tmp_path, host_bytes=2**24) as engine:
        for number in range(9):
            ingest(engine, Document(f"{number}", f"Crane {number}", f"Crane {number} was built in {1900 + number}."))
        ahead = list[int]()
        monkeypatch.setattr(engine.chunks, "fetch_ahead", lambda collection, chosen, chunks: ahead.append(len(chunks)))
        report = engine.answer("When was crane 4 built?", AskOptions(method=method, top_k=8, max_tokens=1)).report
        assert (ahead, report.cache.chunks) == ([fetched], fetched)
