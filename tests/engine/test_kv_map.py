"""The KV map shows what was done, and says the same as the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ragkv.engine.decoding import generate
from ragkv.engine.engine import Engine
from ragkv.engine.kv_map import KVMap, kv_map
from ragkv.engine.request import Request
from ragkv.ingest.pipeline import ingest
from ragkv.recompute.base import Plan, rows_alive
from ragkv.report import Answer
from ragkv.types import AskOptions, Chunk, Document, Hit
from tests.quick import quick_engine

QUESTION = "Who built the harbour of Tarn?"
METHODS = (
    *("full", "reuse", "reuse-encoded", "samkv-fusion", "samkv-overwrite", "samkv-fusion:repair=kept", "scout"),
    *("scout:repair=none", "random", "cacheblend", "cacheblend:ratio=0.3,layer=0", "epic", "epic:link=5"),
    *("multi-infllm", "multi-infllm:initial=2,local=2,share=0.3"),
)
EXACT = ("full", "reuse", "reuse-encoded", "scout", "random", "cacheblend", "epic", "multi-infllm")
"""Methods that compute a token again at a layer and at all before it, so that none only passes through."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Four documents of several chunks, the last one of each shorter than the others."""
    with quick_engine(tmp_path_factory.mktemp("map")) as made:
        for name in ("harbour", "bridge", "mill", "tower"):
            text = f"The {name} of Tarn was built in 1889 by Ada {name.title()}. " * 5
            ingest(made, Document(name, name.title(), text))
        yield made


def asked(engine: Engine, question: str = QUESTION, **requested: Any) -> tuple[Answer, KVMap, Request]:
    begun = engine.prefill(question, AskOptions(**requested))
    for _ in generate(engine.model, begun.sequence):
        pass
    answer = engine.finalize(begun)
    return answer, engine.map(begun), begun


def agrees(answer: Answer, read: KVMap) -> None:
    """Kept and pulled blocks are the report's; computed tokens are no more than it says."""
    report = answer.report
    assert [chunk.chunk_id for chunk in read.chunks] == [chunk.chunk_id for chunk in report.chunks]
    for chunk, told in zip(read.chunks, report.chunks, strict=True):
        assert (chunk.document_id, chunk.title, chunk.tokens) == (told.document_id, told.title, told.tokens)
        assert chunk.blocks == told.blocks
        assert len(chunk.states) == read.layers
        kept = [sum(layer[b] in "kr" for layer in chunk.states) / read.layers for b in range(chunk.blocks)]
        assert kept == pytest.approx(told.kept)
        assert again(chunk, read) <= told.recomputed_tokens + 1e-9
        for letters, shares in zip(chunk.states, chunk.shares, strict=True):
            assert all((letter == "r") == (share > 0) for letter, share in zip(letters, shares, strict=True))
            assert all(0 <= share <= 1 for share in shares)
    assert sum(layer.count("p") for chunk in read.chunks for layer in chunk.states) == report.decoding.pulled


def again(chunk: Any, read: KVMap) -> float:
    """Tokens of a chunk whose rows were computed again, mean over layers."""
    sizes = [min(read.block, chunk.tokens - start) for start in range(0, chunk.tokens, read.block)]
    return sum(share * size for layer in chunk.shares for share, size in zip(layer, sizes, strict=True)) / read.layers


@pytest.mark.parametrize("method", METHODS)
def test_the_map_agrees_with_the_report(engine: Engine, method: str) -> None:
    answer, read, begun = asked(engine, method=method, top_k=8)
    assert len(read.chunks) == 8
    agrees(answer, read)
    for chunk, told in zip(read.chunks, answer.report.chunks, strict=True):
        if method.partition(":")[0] in EXACT:
            assert again(chunk, read) == pytest.approx(told.recomputed_tokens)
    if plan := begun.context.plan:  # what the report has more are tokens that enter a layer and are not written there
        through = sum(len(t) for layer in rows_alive(plan.recompute) for t in layer)
        written = sum(len(t) for layer in plan.recompute for t in layer)
        more = answer.report.tokens.recomputed - sum(again(chunk, read) for chunk in read.chunks)
        assert more * read.layers == pytest.approx(through - written)


def test_what_full_prefilled_was_all_computed(engine: Engine) -> None:
    _, read, _ = asked(engine, method="full", top_k=3)
    assert {letter for chunk in read.chunks for layer in chunk.states for letter in layer} == {"r"}
    assert {share for chunk in read.chunks for layer in chunk.shares for share in layer} == {1.0}


def test_what_cacheblend_chose_on_the_way_is_what_is_shown(engine: Engine) -> None:
    answer, read, _ = asked(engine, method="cacheblend:ratio=0.1,layer=0", top_k=6)
    first, last = (sum("r" in chunk.states[layer] for chunk in read.chunks) for layer in (0, -1))
    counted = [sum(chunk.states[layer].count("r") for chunk in read.chunks) for layer in range(read.layers)]
    assert counted[-1] < counted[0], "the layer that checks computes all, those behind it some"
    assert first >= last
    assert answer.report.tokens.kept == answer.report.tokens.context


def test_what_multi_infllm_asked_for_on_the_way_is_what_is_shown(engine: Engine) -> None:
    _, few, _ = asked(engine, method="multi-infllm:initial=1,local=1,share=0", top_k=6)
    _, more, _ = asked(engine, method="multi-infllm:initial=1,local=1,share=0.3", top_k=6)
    kept = [sum(layer.count("k") for chunk in read.chunks for layer in chunk.states) for read in (few, more)]
    assert kept[0] == 2 * few.layers < kept[1]


@pytest.mark.parametrize("threshold", [0.5, 1])
def test_what_decoding_brought_back_is_shown(engine: Engine, threshold: float) -> None:
    decode = f"psa:reach=all,least=0,above=0,block=4,threshold={threshold}"
    answer, read, _ = asked(engine, method="samkv-fusion:middle=none", decode=decode, top_k=6)
    agrees(answer, read)
    assert (answer.report.decoding.pulled > 0) == any("p" in layer for chunk in read.chunks for layer in chunk.states)
    if threshold == 1:
        assert answer.report.decoding.pulled > 0
        assert not any("d" in layer for chunk in read.chunks for layer in chunk.states), "everything came"


@pytest.mark.parametrize("method", ["full", "scout", "samkv-fusion", "cacheblend"])
def test_a_turn_of_a_conversation_shows_what_stood_there_and_what_it_did_itself(engine: Engine, method: str) -> None:
    name = f"turns-{method}"
    first = asked(engine, conversation=name, method=method, top_k=2)
    second = asked(engine, "When was the tower built?", conversation=name, method=method, top_k=8)
    for answer, read, _ in (first, second):
        agrees(answer, read)
    assert len(second[1].chunks) > len(first[1].chunks)
    stood = second[1].chunks[: len(first[1].chunks)]
    assert [chunk.chunk_id for chunk in stood] == [chunk.chunk_id for chunk in first[1].chunks]
    if method == "full":
        assert {letter for chunk in stood for layer in chunk.states for letter in layer} == {"k"}


def many(block: int, chunks: int = 64, blocks: int = 32, layers: int = 32) -> KVMap:
    """The largest map: half of every block computed again, other blocks in each layer."""
    hits = [Hit(Chunk(f"d{i}#0", f"d{i}", 0, "T", "", (0,) * (block * blocks)), 0.0, i) for i in range(chunks)]
    kept = tuple(tuple(tuple(range(layer % 2, blocks, 2)) for _ in hits) for layer in range(layers))
    rows = tuple(
        tuple(tuple(t for b in each for t in range(b * block, b * block + block // 2)) for each in layer)
        for layer in kept
    )
    plan = Plan(kept, rows, ((),) * layers)
    context, session = SimpleNamespace(plan=plan, decoding=None), SimpleNamespace(hits=hits, left_out=[])
    return kv_map(context, session, block, layers)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [8, 16, 600])
def test_a_large_map_is_small_in_memory(block: int) -> None:
    read = many(block, blocks=32 if block < 256 else 2)
    held = sys.getsizeof(read.chunks) + sum(sys.getsizeof(each) + sys.getsizeof(each.cells) for each in read.chunks)
    assert held < 100_000
    assert read.chunks[0].states[1][:2] == "dr"
    assert read.chunks[0].shares[1][:2] == (0.0, 0.5)


def test_a_map_does_not_change_when_the_conversation_goes_on(engine: Engine) -> None:
    _, read, _ = asked(engine, conversation="still", method="scout", top_k=2)
    before = [replace(chunk, cells=list(chunk.cells)) for chunk in read.chunks]
    asked(engine, "And the bridge?", conversation="still", method="scout", top_k=8)
    assert [replace(chunk, cells=list(chunk.cells)) for chunk in read.chunks] == before
