"""First tokens of random weights: every method from every tier, ratios, floors, and output."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.fitted import fitted, retrieval_heads
from benchmarks.roofline import PassWork, Speeds, WorkCounter, floors, speeds
from benchmarks.shapes import SHAPES, random_model, random_tokens
from benchmarks.tiered import MemoryStore, tiered_bench_store
from benchmarks.ttft_shape import GATED, TIMED, ShapeParams, ShapeResult, ttft_shape
from ragkv.cli import run
from ragkv.engine.crossover import AutoPrefill
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.passes import run_alone
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.registry import FULL, METHOD_NAMES, make_method
from ragkv.errors import EntryMissing, InputError
from ragkv.model.decoder import DecoderModel
from ragkv.store.base import Range
from ragkv.store.redis_store import RedisStore
from ragkv.types import Key, Shape
from tests.redis_server import RedisServer, redis_server
from tests.test_architecture import BLOCKED_IMPORT, SERVICE

PARAMS = ShapeParams(
    chunks=3,
    chunk_tokens=300,
    methods=(*METHOD_NAMES, GATED),
    repeat=2,
    warmup=1,
    split=1,
    question=8,
    prefix=4,
    block=64,
)
ROWS = {name: i for i, name in enumerate((*METHOD_NAMES, GATED))}
CONTEXT = 3 * 300


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return random_model("tiny", "cpu")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(scope="module", params=["host", "disk", "redis"])
def result(request: pytest.FixtureRequest, model: DecoderModel, server: RedisServer) -> ShapeResult:
    store = server.url if request.param == "redis" else ""
    return ttft_shape(model, replace(PARAMS, tier=request.param, store=store), lambda *_: None)


def test_every_method_has_its_times(result: ShapeResult) -> None:
    assert [row.method for row in result.rows] == list(ROWS)
    for row in result.rows:
        assert len(row.times) == 2
        assert row.ttft == statistics.median(row.times) > 0
        assert row.speedup == pytest.approx(result.rows[0].ttft / row.ttft)
        assert sum(row.steps.values()) > 0
    assert result.context == CONTEXT


def test_full_reads_everything_and_needs_no_ingest(result: ShapeResult) -> None:
    full = result.rows[ROWS[FULL]]
    assert (full.sequence, full.recompute, full.load, full.kv_share, full.speedup) == (1, 1, 0, 1, 1)
    assert full.with_ingest == full.ttft
    assert result.backend in result.backends
    assert all(spent > 0 for spent in result.backends.values())


def test_methods_keep_and_load_what_they_say(result: ShapeResult, model: DecoderModel) -> None:
    reuse, scout, blend = (result.rows[ROWS[name]] for name in ("reuse", "scout", "cacheblend"))
    assert (reuse.sequence, reuse.recompute) == (1, 0)
    assert reuse.loaded == CONTEXT * model.token_bytes
    assert reuse.load == (reuse.heads + reuse.loaded) / reuse.loaded
    # Of 15 blocks eight are kept, or nine where the last one brings the opening of its chunk; the last block of a chunk
    # has 44 tokens.
    assert 6 * 64 + 2 * 44 <= scout.sequence * CONTEXT <= 9 * 64
    # Loaded: what the second look reads for the one layer in which its pass attends, and what is kept of the first
    # chunk, which is exact and not computed again, for all layers.
    assert scout.loaded <= scout.sequence * CONTEXT * model.token_bytes
    assert 0 < scout.recompute <= scout.sequence
    assert scout.kv_live < scout.kv
    assert blend.recompute == pytest.approx((2 * 600 + 2 * 0.15 * CONTEXT) / 4 / CONTEXT)
    assert scout.with_ingest == pytest.approx(scout.ttft + result.encode + result.store)


def test_every_method_is_timed_under_every_prefill_policy_named(model: DecoderModel) -> None:
    asked = replace(PARAMS, methods=("cacheblend", GATED), prefills=("dense", "critiprefill:budget=64,block=32"))
    found = ttft_shape(model, asked, lambda *_: None)
    names = [f"{name}|{policy}" for name in ("full", "cacheblend", GATED) for policy in asked.prefills]
    assert [row.method for row in found.rows] == names
    assert all(len(row.times) == 2 for row in found.rows)
    assert [row.recompute for row in found.rows[:2]] == [1, 1]
    assert found.rows[1].with_ingest == found.rows[1].ttft, "a full prefill needs no stored chunks"
    assert found.rows[5].note == found.rows[4].note, "the gate chooses once"


def test_a_policy_acts_on_what_is_timed(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PrefillOptions] = []
    prefill = Prefiller.prefill_full

    def watch(self: Prefiller, chunks: Any, question: Any, timer: Any, options: PrefillOptions) -> Any:
        seen.append(options)
        return prefill(self, chunks, question, timer, options)

    monkeypatch.setattr(Prefiller, "prefill_full", watch)
    ttft_shape(model, replace(PARAMS, methods=(FULL,), prefills=("dense", "auto")), lambda *_: None)
    assert sum(isinstance(each.prefill_policy, AutoPrefill) for each in seen) == 4, "three turns and one for the steps"


def test_the_gate_chooses_one_of_both(result: ShapeResult) -> None:
    gated, full, scout = (result.rows[ROWS[name]] for name in (GATED, FULL, "scout"))
    chosen = {FULL: full, "scout": scout}[gated.note]
    assert (gated.load > 0) == (chosen.load > 0) == (gated.note == "scout")
    assert (gated.with_ingest == gated.ttft) == (gated.note == FULL)
    assert result.gate is not None


def test_floors_lie_below_what_was_measured(result: ShapeResult) -> None:
    for row in result.rows:
        each = row.floors
        assert each.weights > 0
        assert each.kv > 0
        assert each.flops > 0
        assert (each.link > 0) == (row.method not in (FULL, GATED) or row.note == "scout")
        assert each.bound >= max(each.link, each.weights)
        assert row.of_floor == pytest.approx(each.bound / row.ttft)
    assert result.rows[ROWS["scout"]].floors.flops < result.rows[ROWS[FULL]].floors.flops


def test_redis_is_left_as_it_was(model: DecoderModel, server: RedisServer) -> None:
    params = replace(PARAMS, methods=("reuse",), repeat=1, tier="redis", store=server.url)
    found = ttft_shape(model, params, lambda *_: None)
    assert found.params.store == "redis", "a URL may hold a password"
    store = RedisStore(server.url, 5.0)
    assert list(store.keys()) == []
    store.close()


def test_a_warm_tier_asks_nothing_of_what_is_below(model: DecoderModel) -> None:
    fit = fitted(model, 64)
    reader = Prefiller(fit, random_tokens(fit, 4))
    kv = reader.encode(random_tokens(fit, 200))
    everything = [tuple(range(4))] * 4
    for tier, expected in (("host", "host"), ("disk", "store")):
        with tiered_bench_store(fit, tier) as stored:
            stored.put(kv)
            stored.fill_tier()
            chunk = stored.open(kv.tokens, exact=False)
            rows = run_alone(fit, chunk.load(everything))
            assert chunk.tier == expected
            assert torch.equal(rows[2][1], kv.v[2])


def test_the_floor_of_a_full_prefill_is_its_arithmetic(model: DecoderModel) -> None:
    (full,) = WorkCounter(model).prefill_full(100)
    layer = sum(each.numel() for each in model.body.layers[0].parameters())
    head, kv = model.lm_head.weight.numel(), 2 * 64 * 64
    pairs = 4 * 8 * 32
    assert full.weights == 4 * (4 * layer + head)
    assert full.kv == 100 * model.token_bytes
    assert full.flops == 3 * (2 * layer * 100 + pairs * 5050) + 2 * kv * 100 + 2 * (layer + head) + pairs * 100


def test_reusing_everything_attends_as_a_prefill_of_the_question(model: DecoderModel) -> None:
    fit = fitted(model)
    reader = Prefiller(fit, random_tokens(fit, 4))
    kv = reader.encode(random_tokens(fit, 96))
    piece, reuse = InMemoryChunk(kv, 64).piece, make_method("reuse", fit)
    counter = WorkCounter(fit)
    (found,) = counter.prefill_sparse(reuse.plan([piece], []), [piece], 4, 10, (), 0)
    layer, head = sum(each.numel() for each in fit.body.layers[0].parameters()), fit.lm_head.weight.numel()
    pairs, seen = 4 * 8 * 32, 110 * 111 // 2 - 100 * 101 // 2
    assert found.kv == counter.prefill_full(110)[0].kv
    last = 2 * (2 * 64 * 64) * 10 + 2 * (layer + head) + pairs * 110
    assert found.flops == 3 * (2 * layer * 10 + pairs * seen) + last
    scout = make_method("scout", fit)
    asking, reading = counter.prefill_sparse(
        reuse.plan([piece], []), [piece], 4, 10, [scout.composite_blocks([piece])], 2
    )
    assert reading == found
    assert 0 < asking.flops < found.flops


def test_a_bound_is_the_sum_of_each_pass_s_larger_part() -> None:
    at = Speeds(copy=1000.0, link=100.0, products=10.0)
    first, second = PassWork(weights=3, kv=1, flops=0.01), PassWork(weights=1, kv=1, flops=0.5)
    found = floors([first, second], 2, at)
    assert (found.weights, found.kv, found.link, found.flops) == (4, 2, 20, pytest.approx(51))
    assert found.bound == pytest.approx(4 + 50)
    assert floors([first, second], 20, at).bound == 200


def test_a_device_tells_its_speeds() -> None:
    found = speeds(torch.device("cpu"), torch.float32)
    assert found.copy == found.link > 0
    assert found.products > 0


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mistral-7b", "qwen2.5-3b", "tiny"])
def test_retrieval_heads_lie_in_the_middle(name: str) -> None:
    given = SHAPES[name]
    heads = retrieval_heads(Shape(given.layers, given.q_heads, given.kv_heads, given.head_dim))
    assert len(heads) == len(set(heads)) == 8
    assert all(given.layers // 3 <= layer < max(0.6 * given.layers, given.layers // 3 + 1) for layer, _ in heads)
    assert len({head for _, head in heads}) == 8


def test_profiles_are_shown_and_blocks_can_be_chosen(model: DecoderModel) -> None:
    assert fitted(model).profile.block == 16, "as calibration leaves it"
    assert fitted(model, 32).profile.block == 32
    assert not model.profile.retrieval_heads, "the model that was given stays as it is"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"chunks": 500}, "reads 131072"),
        ({"chunks": 0}, "tokens of context"),
        ({"tier": "tape"}, "choose one of gpu, host, redis, disk"),
        ({"tier": "gpu"}, "the model is on cpu"),
        ({"tier": "redis"}, "which server"),
        ({"methods": ("guess",)}, "guess"),
    ],
)
def test_what_cannot_be_measured_is_refused(model: DecoderModel, given: dict[str, object], told: str) -> None:
    with pytest.raises(InputError, match=told):
        ttft_shape(model, replace(PARAMS, **given), lambda *_: None)  # type: ignore[arg-type]


def test_a_store_in_memory_gives_back_what_was_put() -> None:
    store, key = MemoryStore(), Key("a" * 64)
    store.put(key, b"head", [b"01234", b"56789"])
    out, arrived = bytearray(4), list[int]()
    store.read(key, [Range(0, 1, 2), Range(1, 3, 2)], memoryview(out), arrived.append)
    assert (bytes(out), arrived) == (b"1289", [0, 1])
    assert (store.head(key), store.layers(key), list(store.keys())) == (b"head", (5, 5), [key])
    assert (store.stats().entries, store.stats().bytes) == (1, 14)
    assert store.delete(key)
    assert not store.delete(key)
    with pytest.raises(EntryMissing):
        store.head(key)


def test_the_command_measures_a_shape_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["bench", "ttft", "--shape", "tiny", "--layers", "2", "--chunks", "1", "--chunks", "2", "--repeat", "1"]
    asked += ["--chunk-tokens", "128", "--block", "32", "--tier", "disk", "--device", "cpu"]
    asked += ["--method", "scout:cap=0.2", "--method", "epic", "--json", "rows.json", "--table", "table.md"]
    assert run(asked) == 0
    one, two = json.loads((tmp_path / "rows.json").read_text())
    assert [row["method"] for row in one["rows"]] == ["full", "scout:cap=0.2", "epic"]
    assert (one["context"], two["context"], two["layers"], two["block"]) == (128, 256, 2, 32)
    assert two["params"]["tier"] == "disk"
    written, shown = (tmp_path / "table.md").read_text(), capsys.readouterr().out
    assert "2 chunks of 128 tokens in tier disk" in shown
    assert "| scout:cap=0.2 |" in written
    assert "blocks of 32 tokens, 1 initial and 2 local" in written
    assert "loaded MiB" in written


@pytest.mark.parametrize(
    "options",
    [
        ["--tier", "host"],
        ["--table", "t.md"],
        ["--chunks", "1", "--chunks", "2"],
        ["--chunks", "65"],
        ["--shape", "tiny", "--model", "tiny"],
        ["--shape", "tiny", "--tier", "redis"],
        ["--shape", "tiny", "--store", "redis://127.0.0.1:1/0"],
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str]) -> None:
    assert run(["bench", "ttft", *options]) == 2


def test_a_shape_is_measured_without_the_service_libraries(root: Path) -> None:
    call = (
        "from benchmarks.shapes import random_model\nfrom benchmarks.ttft_shape import ShapeParams, ttft_shape\n"
        "from benchmarks.ttft_table import notes, steps, times, title\n"
        "params = ShapeParams(chunks=2, chunk_tokens=128, methods=('scout',), repeat=1, warmup=1, split=1)\n"
        "found = ttft_shape(random_model('tiny', 'cpu', layers=2), params, lambda *_: None)\n"
        "print(title(found), times(found), steps(found), notes(found))\n"
    )
    command = [
        sys.executable,
        "-c",
        BLOCKED_IMPORT + call,
        ",".join({*SERVICE, "typer", "rich", "sqlite3"}),
        "benchmarks.ttft_shape",
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "tier host" in done.stdout


def test_what_is_timed_by_default_is_every_method_with_a_cost_of_its_own() -> None:
    assert set(TIMED) == {*METHOD_NAMES, GATED} - {"reuse-encoded", "random"}
