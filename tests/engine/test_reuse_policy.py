"""Which way is sooner, as it is predicted: pure arithmetic, and one measurement."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fitted import fitted
from benchmarks.shapes import random_model, random_tokens
from ragkv.engine.chunk_store import ChunkStore
from ragkv.engine.cost_model import CostModel, LinearCost, QuadraticCost
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.registry import make_method
from ragkv.engine.reuse_policy import (
    MEASURED,
    ReusePolicy,
    ReuseWork,
    expected_work,
    fit_reuse,
    fit_short_reuse,
    measure_gate,
    measure_reuse,
    weighted_rows,
)
from ragkv.recompute.base import Method
from ragkv.recompute.reuse import Reuse
from ragkv.recompute.scout import Scout
from ragkv.store import open_store
from ragkv.store.format.layout import Layout
from ragkv.store.tiers import TierBudgets, Tiers
from ragkv.timing import StepTimer

SCOUT = Scout(layers=4, heads=((1, 0),), group=4, scale=1.0, cap=0.1)
GATE = ReusePolicy(full=QuadraticCost(10, 0.02, 0), sparse=LinearCost(40, 0.02))


def test_a_short_context_is_prefilled_and_a_long_one_is_opened() -> None:
    assert not GATE.prefers(1000, ReuseWork(rows=200, keys=300)), "30 ms against 44"
    assert GATE.prefers(4000, ReuseWork(rows=1000, keys=1200)), "90 ms against 60"
    assert not GATE.prefers(1500, ReuseWork(rows=0, keys=0)), "what is as quick is prefilled: it is exact"


def test_bytes_that_come_from_afar_count() -> None:
    gate = ReusePolicy(GATE.full, GATE.sparse, load=LinearCost(5, 1e-6))
    near, far = ReuseWork(1000, 1200), ReuseWork(1000, 1200, bytes=40 * 10**6)
    assert gate.sparse_ms(near) == pytest.approx(60)
    assert gate.sparse_ms(far) == pytest.approx(60 + 5 + 40)
    assert gate.prefers(4000, near)
    assert not gate.prefers(4000, far)


def test_what_rows_attend_to_weighs_as_it_does_in_a_full_prefill() -> None:
    curve = QuadraticCost(0, 0.01, 0.01 * 1e-4)
    gate = ReusePolicy(full=curve, sparse=LinearCost(0, 0.01))
    # n rows that see n / 2 keys each are a full prefill of n tokens.
    assert gate.sparse_ms(ReuseWork(4000, 2000)) == pytest.approx(curve.at(4000))
    assert weighted_rows(ReuseWork(10, 0), 1e-4) == 10


@pytest.mark.parametrize(
    ("sizes", "rows", "kept"),
    [
        ((1024,) * 16, 13 * 64 + 32, 13 * 64),
        ((64,) * 2, 128 + 32, 128),
        ((1024,), 32, 9 * 64),
    ],
)
def test_work_is_known_before_a_chunk_is_opened(sizes: tuple[int, ...], rows: int, kept: int) -> None:
    work = expected_work(SCOUT, sizes, 64, 32)
    # A single chunk is exact. Of several, all that is kept may lie in those that are not.
    assert work.rows == rows
    again = rows - 32
    assert work.keys == pytest.approx((again * kept / 2 + 32 * kept) / rows)


def test_repair_decides_how_many_rows_go_through() -> None:
    sizes = (1024,) * 4
    none, kept = (
        expected_work(Scout(4, ((1, 0),), 4, 1.0, repair=repair), sizes, 64, 32).rows for repair in ("none", "kept")
    )
    assert none == 32 < kept == 32 + int(0.17 * 64) * 64


def test_only_scout_is_given_up_for_a_full_prefill() -> None:
    assert not GATE.reuses(SCOUT, [512], 64, 32)
    assert GATE.reuses(SCOUT, [1024] * 8, 64, 32)
    assert GATE.reuses(Reuse(4), [512], 64, 32)
    assert GATE.reuses(None, [512], 64, 32)


def test_what_was_stored_to_measure_is_removed(tmp_path: Path) -> None:
    model = fitted(random_model("tiny", "cpu"), 16)
    reader = Prefiller(model, random_tokens(model, 8))
    block = Layout(model.shape, 16, 16, model.dtype)
    with closing(open_store("disk", tmp_path, 1.0)) as store:
        tiers = Tiers(store, block, TierBudgets(2**26), model.device)
        shelf = ChunkStore(tiers, model, "a fingerprint", MEASURED)
        gate = measure_reuse(reader, shelf, make_method("scout", model))
        assert gate is not None
        assert 0 < gate.full.at(544) < gate.full.at(8192)
        assert list(store.keys()) == []
        assert tiers.stats()["host"].used == 0
        assert measure_reuse(reader, shelf, Reuse(4)) is None


def test_a_cpu_measures_one_short_context_and_keeps_it(tmp_path: Path) -> None:
    model = fitted(random_model("tiny", "cpu"), 16)
    reader, scout = Prefiller(model, random_tokens(model, 8)), make_method("scout", model)
    # Rows are cheap, so that what is measured is not all taken for the cost of rows.
    costs = CostModel(LinearCost(1, 0.1), LinearCost(0, 0), QuadraticCost(2, 0.001, 1e-6))

    def gate(method: Method) -> ReusePolicy | None:
        with closing(open_store("disk", tmp_path / "kv", 1.0)) as store:
            tiers = Tiers(store, Layout(model.shape, 16, 16, model.dtype), TierBudgets(2**26), model.device)
            shelf = ChunkStore(tiers, model, "a fingerprint", MEASURED)
            found = measure_gate(reader, shelf, method, costs, tmp_path / "costs", "here")
            assert list(store.keys()) == []
            return found

    first = gate(scout)
    assert first is not None
    assert first.full == costs.prefill
    assert first.sparse.each == costs.prefill.each, "a row costs what it costs in a full prefill"
    assert gate(scout) == first, "kept, not measured again"
    assert gate(make_method("scout:look=0.1", model)) != first, "another method has other costs"
    assert gate(Reuse(4)) is None
    unmeasured = replace(costs, prefill=QuadraticCost(0, 0, 0))
    assert measure_gate(reader, None, scout, unmeasured, tmp_path, "here") is None  # type: ignore[arg-type]


def test_one_short_context_gives_what_scout_costs_beside_its_rows() -> None:
    model = fitted(random_model("tiny", "cpu"))
    reader, scout = Prefiller(model, random_tokens(model, 8)), make_method("scout", model)
    assert isinstance(scout, Scout)
    chunks = [InMemoryChunk(reader.encode(random_tokens(model, 96, seed)), 64, seed == 0) for seed in range(2)]
    full = QuadraticCost(1, 1e-3, 1e-8)
    gate = fit_short_reuse(reader, scout, lambda: chunks, full)
    timer = StepTimer(model.device)
    reader.prefill_sparse(chunks, (0,) * 32, scout, timer)
    work = expected_work(scout, [96, 96], 64, 32)
    assert timer.total() / 5 < gate.sparse_ms(work) < 5 * timer.total(), "it predicts what it measured"
    dear = fit_short_reuse(reader, scout, lambda: chunks, QuadraticCost(1, 10**4, 0))
    assert dear.sparse == LinearCost(0, 10**4), "what the rows cost is not counted twice"


def test_a_store_that_takes_nothing_leaves_the_gate_open() -> None:
    model = fitted(random_model("tiny", "cpu"), 16)
    with closing(open_store("redis://127.0.0.1:1/0", Path(), 0.2)) as store:
        tiers = Tiers(store, Layout(model.shape, 16, 16, model.dtype), TierBudgets(), model.device)
        shelf = ChunkStore(tiers, model, "a fingerprint", MEASURED)
        reader = Prefiller(model, random_tokens(model, 8))
        assert measure_reuse(reader, shelf, make_method("scout", model)) is None


def test_the_gate_of_a_model_is_measured() -> None:
    model = fitted(random_model("tiny", "cpu"))
    reader = Prefiller(model, random_tokens(model, 8))
    scout = make_method("scout", model)
    assert isinstance(scout, Scout)
    encoded = [reader.encode(random_tokens(model, 128, seed)) for seed in range(3)]
    few, many = ([InMemoryChunk(kv, 64, i == 0) for i, kv in enumerate(encoded[:count])] for count in (1, 3))
    # A prefill of few tokens that something else delayed looks as long as one of many: then nothing is learned of both.
    gates = (fit_reuse(reader, scout, lambda: few, lambda: many) for _ in range(5))
    gate = next((each for each in gates if each.full.each > 0), None)
    assert gate is not None, "five times a prefill of three chunks took no longer than that of one"
    assert 0 < gate.full.at(256) < gate.full.at(4096)
    assert gate.full.square == pytest.approx(gate.full.each * model.pair_weight)
    assert gate.sparse.at(100) > 0
    assert gate.load.at(10**9) == 0, "chunks were where they always are"
