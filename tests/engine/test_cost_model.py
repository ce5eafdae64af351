"""What encoding and loading cost: measured once, remembered, and obeyed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import pytest

from ragkv.engine.cost_model import FREE, LONG, LONGEST, CostModel, LinearCost, QuadraticCost, measure_costs
from ragkv.engine.engine import Engine
from ragkv.engine.prefill import Prefiller
from ragkv.model.decoder import DecoderModel
from ragkv.retrieval import Embedder
from ragkv.store.disk_store import DiskStore
from ragkv.store.redis_store import RedisStore
from ragkv.types import AskOptions
from tests.libraries import QUESTION, open_copy, open_library
from tests.quick import quick_model
from tests.redis_server import redis_server

DEAR = CostModel(encode=LinearCost(5, 0.1), load=LinearCost(2, 0.01))
"""A store of 100 kB/s."""
OLD = '{"encode": {"fixed": 1, "each": 1}, "load": {"fixed": 1, "each": 1}}'
"""What was written before full prefills were measured."""


@pytest.fixture
def engine(two_documents: Path, tmp_path: Path, model: DecoderModel, embedder: Embedder) -> Iterator[Engine]:
    with open_copy(two_documents, tmp_path / "data", model, embedder, host_bytes=2**26) as opened:
        yield opened


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, model: DecoderModel, one_thread: None) -> CostModel:
    """The costs of the bundled model here."""
    folder = tmp_path_factory.mktemp("costs")
    return measure_costs(Prefiller(model, model.prompt.prefix), DiskStore(folder / "kv"), folder, "here")


def test_the_cheaper_way_is_taken() -> None:
    assert DEAR.why_not_load(4000, 400) == ""  # 42 ms against 45
    assert DEAR.why_not_load(5000, 400) == "encoding is quicker: 45 ms predicted, 52 ms to load 5000 bytes"
    assert FREE.why_not_load(10**12, 1) == ""
    assert FREE.full(10**6) == 0, "nothing was measured"


def test_costs_are_measured_once_and_leave_nothing_behind(tmp_path: Path, model: DecoderModel) -> None:
    reader, store = Prefiller(model, model.prompt.prefix), DiskStore(tmp_path / "kv")
    found = measure_costs(reader, store, tmp_path / "costs", "here")
    assert 0 < found.load.at(2**20) < found.encode.at(500)
    assert list(store.keys()) == []
    assert measure_costs(reader, DiskStore(Path("/nowhere")), tmp_path / "costs", "here") == found
    assert measure_costs(reader, DiskStore(Path("/dev/null/kv")), tmp_path / "costs", "elsewhere") == FREE


@pytest.fixture(scope="module")
def quick() -> Prefiller:
    """A model that is measured in no time, for tests about the record."""
    model = quick_model()
    return Prefiller(model, model.prompt.prefix)


def test_a_store_that_is_down_is_measured_when_it_is_up(tmp_path: Path, quick: Prefiller) -> None:
    reader = quick
    with redis_server() as server:
        url, port = server.url, server.port
    assert measure_costs(reader, RedisStore(url, 5.0), tmp_path, "redis") == FREE
    with redis_server(port=port):
        assert measure_costs(reader, RedisStore(url, 5.0), tmp_path, "redis") != FREE


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", OLD, '{"encode": 1, "load": 2}', '{"encode": {"a": 1}, "load": {}}']
)
def test_a_damaged_record_is_measured_anew(measured: CostModel, tmp_path: Path, quick: Prefiller, content: str) -> None:
    reader, store = quick, DiskStore(tmp_path / "kv")
    name = f"{sha256(b'here').hexdigest()[:32]}.json"
    (tmp_path / name).write_text(json.dumps(asdict(measured)))
    assert measure_costs(reader, store, tmp_path, "here") == measured, "the record is found under this name"
    (tmp_path / name).write_text(content)
    found = measure_costs(reader, store, tmp_path, "here")
    for costs in (found.encode.at, found.full):
        assert costs(500) >= costs(100) > 0  # so small a model may take as long for both
    assert measure_costs(reader, store, tmp_path, "here") == found


def test_what_full_recompute_would_take_is_about_what_full_takes(measured: CostModel, library: Engine) -> None:
    """On a machine that does other things too, so the best of some tries, and a factor of 10."""
    near = []
    for top_k in (3, 6, 6):
        report = library.answer(QUESTION, AskOptions(method="full", top_k=top_k, max_tokens=1)).report
        near.append(measured.full(report.tokens.context + report.tokens.question) / report.timings_ms.prefill)
    assert any(0.1 < share < 10 for share in near), near


def test_a_longer_prefill_takes_longer_and_its_square_counts(measured: CostModel, model: DecoderModel) -> None:
    found = [measured.full(tokens) for tokens in (1, 10, LONG, LONGEST, 2000, 10_000)]
    assert found == sorted(found)
    assert found[0] < found[-1]
    assert measured.full(20_000) - measured.full(10_000) > 1.5 * (measured.full(10_000) - measured.full(1))
    assert measured.prefill.square == pytest.approx(measured.prefill.each * model.pair_weight)
    assert CostModel(LinearCost(0, 1), LinearCost(0, 0), QuadraticCost(5, 0.5, 0.001)).full(100) == pytest.approx(65)


def test_what_is_dear_to_load_is_encoded_and_the_report_says_so(engine: Engine) -> None:
    engine.chunks.costs = DEAR
    files = {path: path.stat().st_mtime_ns for path in (engine.settings.data / "kv").glob("??/*.kv")}
    answer = engine.answer(QUESTION, AskOptions(method="scout:update=fusion"))  # reads all that it keeps
    cache = answer.report.cache
    kept = sum(max(chunk.kept) > 0 for chunk in answer.report.chunks)
    assert cache.misses == len(cache.fallbacks) == kept > 0
    assert all(fallback.reason == "encoding_is_quicker" for fallback in cache.fallbacks)
    assert {path: path.stat().st_mtime_ns for path in files} == files, "what is stored already is not written again"


def test_what_is_in_memory_is_not_dear(engine: Engine) -> None:
    first = engine.answer(QUESTION)
    engine.chunks.costs = DEAR
    second = engine.answer(QUESTION)
    assert second.answer == first.answer
    assert second.report.cache.hits.host == second.report.cache.chunks


def test_an_encoded_chunk_is_rounded_as_a_stored_one_is(
    tmp_path: Path, model: DecoderModel, embedder: Embedder
) -> None:
    with open_library(tmp_path, model, embedder, ("01", "02"), store_body="int8") as engine:
        asked = AskOptions(method="scout:update=fusion")  # reads all that it keeps
        loaded = engine.answer(QUESTION, asked)
        engine.chunks.costs = DEAR
        encoded = engine.answer(QUESTION, asked)
        kept = sum(max(chunk.kept) > 0 for chunk in encoded.report.chunks)
        assert encoded.report.cache.misses == kept > 0, "of the others nothing is loaded"
        assert (encoded.answer, encoded.report.chunks) == (loaded.answer, loaded.report.chunks)
