"""Chunks that are written in other threads: the next group is encoded meanwhile, and nothing of them is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ragkv.engine.chunk_writer import MOST_GROUPS
from ragkv.engine.engine import Engine
from ragkv.errors import EntryMissing
from ragkv.types import Chunk, Key
from tests.engine.test_chunk_encoder import chunk
from tests.quick import quick_engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with quick_engine(tmp_path) as opened:
        opened.chunks.writer.threads = 2
        yield opened


@pytest.fixture
def gate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold every write until the event is set."""
    opened, put = threading.Event(), engine.store.put

    def held(key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        assert opened.wait(20)
        put(key, head, body)

    monkeypatch.setattr(engine.store, "put", held)
    yield opened
    opened.set()


def encode(engine: Engine, *numbers: int) -> list[Key]:
    """Encode chunks of these numbers as one group."""
    chunks: list[tuple[Chunk, str]] = [(chunk(engine, number), "default") for number in numbers]
    engine.encode_and_store_all(chunks)
    return [engine.key(*each) for each in chunks]


def test_a_chunk_is_being_written_until_the_store_has_it(engine: Engine, gate: threading.Event) -> None:
    keys = encode(engine, 1, 2)
    assert engine.is_writing(keys)
    with pytest.raises(EntryMissing):
        engine.store.head(keys[0])
    gate.set()
    engine.finish_writes(keys)
    assert not engine.is_writing(keys)
    for key in keys:
        assert engine.store.head(key)


def test_a_group_is_encoded_while_another_is_written_and_no_more(engine: Engine, gate: threading.Event) -> None:
    for number in range(MOST_GROUPS + 1):
        encode(engine, 1 + number)
    assert engine.chunks.encoded == MOST_GROUPS + 1
    last = threading.Thread(target=encode, args=(engine, MOST_GROUPS + 2))
    last.start()
    last.join(0.2)
    assert engine.chunks.encoded == MOST_GROUPS + 1, "it waits, for each group holds its KV in memory"
    gate.set()
    last.join(20)
    assert engine.chunks.encoded == MOST_GROUPS + 2


def test_a_chunk_that_is_being_written_is_not_encoded_again(engine: Engine, gate: threading.Event) -> None:
    assert encode(engine, 1) == encode(engine, 1)
    assert engine.chunks.encoded == 1


def test_what_is_removed_while_it_is_written_does_not_come_back(engine: Engine, gate: threading.Event) -> None:
    (key,) = encode(engine, 1)
    threading.Timer(0.1, gate.set).start()
    engine.evict([key])
    engine.chunks.writer.close()
    assert list(engine.store.keys()) == []


def test_a_fault_that_is_not_the_stores_fails_the_document(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine.store, "put", failing)
    keys = encode(engine, 1, 2)
    for key in keys:
        with pytest.raises(RuntimeError, match="the device is lost"):
            engine.finish_writes([key])
    assert engine.chunks.flights._owners == {}, "its lease has ended"
    engine.finish_writes(keys)


def test_closing_waits_for_writes(tmp_path: Path) -> None:
    with quick_engine(tmp_path) as engine:
        engine.chunks.writer.threads = 2
        (key,) = encode(engine, 1)
    assert list(tmp_path.rglob(f"{key}.kv"))


def test_what_a_thread_writes_is_what_the_encoding_thread_writes(tmp_path: Path) -> None:
    entries = []
    for threads in (0, 2):
        folder = tmp_path / str(threads)
        folder.mkdir()
        with quick_engine(folder) as engine:
            engine.chunks.writer.threads = threads
            keys = encode(engine, 1, 2, 3)
        entries.append([next(folder.rglob(f"{key}.kv")).read_bytes() for key in keys])
    assert entries[0] == entries[1]
