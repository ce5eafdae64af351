"""`full:prefix=true` answers as `full` does and prefills only what follows a known beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from ragkv.engine.engine import AskOptions, Engine
from ragkv.engine.prefix_cache import PrefixCache
from ragkv.engine.request import Request
from ragkv.errors import InputError
from ragkv.ingest.pipeline import ingest, remove
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Pass
from ragkv.types import Chunk, Document, Shape
from tests.quick import quick_engine

SHAPE = Shape(2, 2, 1, 4)
PREFIXED = "full:prefix=true"
FERRIES = {"calm": "Edda Calloway", "swift": "Jon Weyl", "bold": "Ines Halloran"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with quick_engine(tmp_path, dtype="float32") as opened:
        for name, who in FERRIES.items():
            ingest(opened, Document(name, f"The {name} ferry", f"The {name} ferry was built by {who}. " * 8))
        yield opened


def ask(engine: Engine, question: str, method: str, **options: object) -> tuple[str, float, float]:
    """Return the answer, the tokens prefilled, and those whose KV was there."""
    answer = engine.answer(question, AskOptions(method=method, **options))
    report = answer.report
    return answer.answer, report.tokens.prefilled, report.tokens.history


def test_a_question_over_the_same_chunks_prefills_only_itself(engine: Engine) -> None:
    question = "Who built the swift ferry?"
    plain = ask(engine, question, "full")
    first, again = ask(engine, question, PREFIXED), ask(engine, question, PREFIXED)
    assert plain[0] == first[0] == again[0]
    assert plain[1:] == first[1:]
    assert again[1] < 40 < plain[1]
    assert again[1] + again[2] == plain[1]
    other = ask(engine, "Who built the bold ferry?", PREFIXED)
    assert other[0] == ask(engine, "Who built the bold ferry?", "full")[0]


def test_the_first_token_is_as_likely_as_without(engine: Engine) -> None:
    question = "Who built the swift ferry?"
    ask(engine, question, PREFIXED)
    full, again = (engine.prefill(question, AskOptions(method=method)).context for method in ("full", PREFIXED))
    assert again.cached_chunks > 0
    torch.testing.assert_close(again.logits, full.logits, rtol=1e-4, atol=1e-4)


def test_full_alone_keeps_and_uses_nothing(engine: Engine) -> None:
    question = "Who built the swift ferry?"
    ask(engine, question, "full")
    assert ask(engine, question, PREFIXED)[2] == 0
    assert ask(engine, question, "full")[2] == 0


def test_a_removed_document_is_forgotten(engine: Engine) -> None:
    question = "Who built the swift ferry?"
    ask(engine, question, PREFIXED)
    for name in FERRIES:
        remove(engine, "default", name)
    for name, who in FERRIES.items():
        ingest(engine, Document(name, f"The {name} ferry", f"The {name} ferry was built by {who}. " * 8))
    assert ask(engine, question, PREFIXED)[2] == 0


def test_a_document_that_is_removed_while_a_question_runs_is_not_kept(engine: Engine) -> None:
    question = "Who built the swift ferry?"
    passes = engine.prefill_passes(Request(question, AskOptions(method=PREFIXED)))
    step = next(passes)
    assert isinstance(step, Pass)
    remove(engine, "default", "swift")
    with pytest.raises(StopIteration):
        passes.send(engine.model.forward([step])[0])
    ingest(engine, Document("swift", "The swift ferry", f"The swift ferry was built by {FERRIES['swift']}. " * 8))
    assert ask(engine, question, PREFIXED)[2] == 0


def test_a_conversation_begins_behind_what_is_known(engine: Engine) -> None:
    question = "Who built the swift ferry?"
    ask(engine, question, PREFIXED)
    turns = ("Who built the swift ferry?", "Who built the bold ferry?")
    found = [[ask(engine, each, method, conversation=method) for each in turns] for method in ("full", PREFIXED)]
    assert [turn[0] for turn in found[0]] == [turn[0] for turn in found[1]]
    assert found[1][0][2] > 0


def test_the_field_of_full_is_checked(engine: Engine) -> None:
    with pytest.raises(InputError, match="prefix"):
        ask(engine, "Who?", "full:prefix=maybe")
    with pytest.raises(InputError, match="no field"):
        ask(engine, "Who?", "full:suffix=true")


class State:
    """Stands for a session that has not started."""

    def __init__(self) -> None:
        self.rows: list[ContextCache] = []

    def begin_with(self, prefix: ContextCache, chunks: Sequence[ContextCache]) -> None:
        self.rows = list(chunks)


def cache_of(*values: float) -> ContextCache:
    """Return a cache with one row for each value."""
    cache = ContextCache(SHAPE, len(values), torch.float32)
    rows = torch.tensor(values)[:, None, None].expand(-1, 1, 4)
    for layer in range(SHAPE.layers):
        cache.put(layer, rows, rows + layer, torch.arange(len(values)))
    return cache


def chunk(*tokens: int) -> Chunk:
    return Chunk(f"d#{tokens[0]}", "d", tokens[0], "Title", "text", tokens)


def restored(prefixes: PrefixCache, *chunks: Chunk, collection: str = "default") -> list[float]:
    """Return the values of the rows that are known."""
    state = State()
    count = prefixes.restore(state, chunks, collection)  # type: ignore[arg-type]
    assert count == len(state.rows)
    return [value for rows in state.rows for value in rows.k(0)[:, 0, 0].tolist()]


def test_the_longest_known_beginning_is_restored() -> None:
    prefixes, a, b, c = PrefixCache(cache_of(9.0), 10**6), chunk(1, 2), chunk(3), chunk(4)
    prefixes.keep(cache_of(9, 10, 11, 20, 90), [a, b], "default")
    assert restored(prefixes, a, b) == [10, 11, 20]
    assert restored(prefixes, a, c) == [10, 11]
    assert restored(prefixes, b, a) == [], "the same chunks in another order are other rows"
    assert restored(prefixes, b) == []
    assert restored(prefixes, a, b, collection="other") == []
    assert restored(prefixes, chunk(1), chunk(2, 3)) == [], "the same tokens cut elsewhere are other chunks"


def test_the_least_recently_used_goes_first() -> None:
    one = cache_of(1.0).bytes
    prefixes, a, b, c = PrefixCache(cache_of(9.0), 2 * one), chunk(1), chunk(2), chunk(3)
    prefixes.keep(cache_of(9, 10), [a], "default")
    prefixes.keep(cache_of(9, 20), [b], "default")
    assert restored(prefixes, a) == [10]
    prefixes.keep(cache_of(9, 30), [c], "default")
    assert (restored(prefixes, a), restored(prefixes, b), restored(prefixes, c)) == ([10], [], [30])
    PrefixCache(cache_of(9.0), 0).keep(cache_of(9, 10), [a], "default")
