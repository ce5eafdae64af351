"""Of several processes that miss a chunk one encodes it. The others wait, for a bounded time, and never without end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.engine import chunk_flights
from ragkv.engine.decoding import generate
from ragkv.engine.engine import Engine
from ragkv.engine.passes import Passes, Pause
from ragkv.engine.request import Request
from ragkv.errors import StoreUnavailable
from ragkv.ingest.pipeline import ingest
from ragkv.report import Answer
from ragkv.types import Document, Key
from tests.quick import quick_engine

QUESTION = "Who keeps the lamp of Tarn?"
OTHER = "another process"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that end soon."""
    monkeypatch.setattr(chunk_flights, "LEASE_SECONDS", 1.5)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine with two documents of one chunk each."""
    with quick_engine(tmp_path) as opened:
        for name in ("lamp", "boat"):
            ingest(opened, Document(name, name, f"The {name} of Tarn is kept by Ada Brook."))
        opened.chunks.flights.counts.clear()
        yield opened


def keys(engine: Engine) -> list[Key]:
    return sorted(engine.store.keys())


def lose(engine: Engine, key: Key) -> tuple[bytes, list[bytes]]:
    """Delete an entry; returns it, so that another process can put it."""
    head, sizes = engine.store.head(key), engine.store.layers(key)
    folder = engine.settings.data / "kv" / key[:2]
    data = (folder / f"{key}.kv").read_bytes()[-sum(sizes) :]
    engine.store.delete(key)
    starts = [sum(sizes[:layer]) for layer in range(len(sizes))]
    return head, [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def run_until_pause(engine: Engine, passes: Passes[Request], seconds: float) -> bool:
    """Run passes until a pause that is not over at once; False when they end before. Raises what they raise."""
    until = time.monotonic() + seconds
    step = next(passes)
    while time.monotonic() < until:
        if isinstance(step, Pause):
            if step.seconds:
                return True
            step = next(passes)
        else:
            step = passes.send(engine.model.forward([step])[0])
    raise TimeoutError


def run_to_end(engine: Engine, passes: Passes[Request]) -> Request:
    """Run passes to their end."""
    step = next(passes)
    try:
        while True:
            if isinstance(step, Pause):
                time.sleep(step.seconds)
                step = next(passes)
            else:
                step = passes.send(engine.model.forward([step])[0])
    except StopIteration as end:
        state: Request = end.value
        return state


def hits(answer: Answer) -> int:
    found = answer.report.cache.hits
    return found.gpu + found.host + found.store


def test_a_missing_chunk_is_encoded_under_a_lease(engine: Engine) -> None:
    for key in keys(engine):
        engine.store.delete(key)
    report = engine.answer(QUESTION).report
    assert report.cache.misses == 2
    assert +engine.chunks.flights.counts == {"led": 2}
    assert engine.health()["flights"] == {"led": 2, "joined": 0, "expired": 0, "alone": 0}
    assert len(keys(engine)) == 2
    assert not list((engine.settings.data / "kv").glob("??/.*")), "no lease is left"


def test_a_hit_asks_for_no_lease(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(key: Key) -> None:
        raise AssertionError("a lease was asked for")

    monkeypatch.setattr(engine.chunks.flights, "take", refuse)
    assert hits(engine.answer(QUESTION)) == 2


def test_a_chunk_that_another_process_encodes_is_waited_for_and_is_a_hit(engine: Engine) -> None:
    expected, (first, _) = engine.answer(QUESTION), keys(engine)
    head, body = lose(engine, first)
    assert engine.store.leases.take(first, OTHER, 60) == "taken"
    passes = engine.prefill_passes(Request(QUESTION))
    assert run_until_pause(engine, passes, 30)
    engine.store.put(first, head, body)
    state = run_to_end(engine, passes)
    for _ in generate(engine.model, state.sequence):
        pass
    answer = engine.finalize(state)
    assert (hits(answer), answer.report.cache.misses, answer.report.cache.fallbacks) == (2, 0, ())
    assert answer.answer == expected.answer
    assert +engine.chunks.flights.counts == {"joined": 1}
    assert engine.chunks.faults.counts == {}, "a chunk that was waited for is no fault of the store"


def test_chunks_that_nobody_encodes_are_encoded_before_the_wait(engine: Engine) -> None:
    for key in keys(engine):
        engine.store.delete(key)
    assert engine.store.leases.take(Key(min(engine.key(*each) for each in chunks_of(engine))), OTHER, 60) == "taken"
    passes = engine.prefill_passes(Request(QUESTION))
    assert run_until_pause(engine, passes, 30)
    assert +engine.chunks.flights.counts == {"led": 1}
    assert len(keys(engine)) == 1
    passes.close()


def chunks_of(engine: Engine) -> list[tuple]:
    return [(chunk, "default") for name in ("lamp", "boat") for chunk in engine.catalog.chunks_of("default", name)]


def test_a_chunk_whose_owner_died_is_encoded_when_the_lease_ends(engine: Engine) -> None:
    first = keys(engine)[0]
    engine.store.delete(first)
    assert engine.store.leases.take(first, OTHER, 0.3) == "taken"
    answer = engine.answer(QUESTION)
    assert (hits(answer), answer.report.cache.misses) == (1, 1)
    assert +engine.chunks.flights.counts == {"led": 1}
    assert first in keys(engine)


def test_a_wait_is_bounded_and_ends_with_an_encoding(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_flights, "LEAST_WAIT", 0.2)
    monkeypatch.setattr(chunk_flights, "WAIT_FACTOR", 1e-6)
    first = keys(engine)[0]
    engine.store.delete(first)
    assert engine.store.leases.take(first, OTHER, 60) == "taken"
    began = time.monotonic()
    answer = engine.answer(QUESTION)
    assert time.monotonic() - began > 0.2
    assert answer.report.cache.misses == 1
    assert +engine.chunks.flights.counts == {"expired": 1}
    assert engine.store.leases.take(first, OTHER, 60) == "stored"


def test_the_bound_is_a_multiple_of_what_encoding_takes_and_at_least_a_second(engine: Engine) -> None:
    flights = engine.chunks.flights
    assert (flights.patience(0.01), flights.patience(2)) == (1, 8)


def test_a_lease_is_renewed_while_its_chunk_is_encoded(
    short: None, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, captured = list[str](), engine.prefiller.captured

    def slow(tokens, done):
        time.sleep(1.8 * chunk_flights.LEASE_SECONDS)
        seen.append(engine.store.leases.take(first, OTHER, 60))
        return captured(tokens, done)

    first = keys(engine)[0]
    engine.store.delete(first)
    monkeypatch.setattr(engine.prefiller, "captured", slow)
    engine.answer(QUESTION)
    assert seen == ["held"]


def test_a_lease_is_released_when_its_chunk_cannot_be_encoded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tokens, done):
        raise RuntimeError("out of memory")

    first = keys(engine)[0]
    engine.store.delete(first)
    monkeypatch.setattr(engine.prefiller, "captured", broken)
    with pytest.raises(RuntimeError):
        engine.answer(QUESTION)
    assert engine.store.leases.take(first, OTHER, 60) == "taken"


def test_without_leases_everybody_encodes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(key: Key, owner: str, seconds: float) -> None:
        raise StoreUnavailable("no locks")

    first = keys(engine)[0]
    engine.store.delete(first)
    monkeypatch.setattr(engine.store.leases, "take", unavailable)
    assert engine.answer(QUESTION).report.cache.misses == 1
    assert +engine.chunks.flights.counts == {"alone": 1}


def test_questions_of_one_process_ask_the_store_as_often_as_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_flights, "POLL_SECONDS", 60.0)
    first, asked, take = keys(engine)[0], list[Key](), engine.store.leases.take

    def counted(key, owner, seconds):
        asked.append(key)
        return take(key, owner, seconds)

    engine.store.delete(first)
    assert engine.store.leases.take(first, OTHER, 60) == "taken"
    monkeypatch.setattr(engine.store.leases, "take", counted)
    waiting = [engine.prefill_passes(Request(QUESTION)) for _ in range(5)]
    assert all(run_until_pause(engine, passes, 30) for passes in waiting)
    assert asked == [first]
    for passes in waiting:
        passes.close()


def test_an_ingest_encodes_a_chunk_that_another_process_may_never_store(engine: Engine) -> None:
    (chunk, collection), *_ = chunks_of(engine)
    key = engine.key(chunk, collection)
    lose(engine, key)
    assert engine.store.leases.take(key, OTHER, 60) == "taken"
    engine.encode_and_store_all(chunks_of(engine))
    assert key in keys(engine)
    assert +engine.chunks.flights.counts == {"alone": 1}
    assert hits(engine.answer(QUESTION)) == 2
