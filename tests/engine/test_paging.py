"""Answers that read stored blocks in place are those of answers with caches of their own."""

from __future__ import annotations

import random
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ragkv.engine import paging
from ragkv.engine.batch import Batch
from ragkv.errors import ConfigError
from ragkv.model.execution.block_tables import PagedChunk
from ragkv.model.execution.graph_decode import GraphDecoder
from ragkv.model.kv_cache import ContextCache
from ragkv.types import AskOptions, Shape
from tests.engine.test_session_manager import QUESTIONS, fill
from tests.quick import quick_engine

pytestmark = pytest.mark.usefixtures("one_thread")
IN_PLACE = ("reuse", "scout:repair=none", "epic", "cacheblend", "samkv-fusion")
"""Methods that leave some blocks as they are stored, with keys at the positions of their tokens."""
METHODS = ("reuse", "scout:repair=none", "epic", "cacheblend", "samkv-fusion", "multi-infllm")


def graph_decoder(model, memory=None):
    """Return a decoder that runs the steps of a GPU by the reference kernels."""
    return GraphDecoder(model, memory=memory)


def paging_engine(path, **settings):
    """Open an engine that reads blocks in place. On a CPU the host tier is the memory of the model's device."""
    with patch("ragkv.engine.assembly.make_graph_decoder", graph_decoder):
        return fill(quick_engine(path, **{"graphs": "paged", "host_bytes": 2**22, **settings}))


def pinned(engine):
    return engine.tiers.stats()["host"].pinned


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    path = tmp_path_factory.mktemp("paging")
    with fill(quick_engine(path / "own")) as own, paging_engine(path / "paged") as paged:
        yield own, paged


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_a_cache_of_their_own(engines, method):
    options = AskOptions(method=method, top_k=4, max_tokens=12)
    for question in QUESTIONS:
        alone, shared = (engine.answer(question, options) for engine in engines)
        assert shared.answer == alone.answer
        assert shared.report.tokens == alone.report.tokens
        assert shared.report.decoding.present == alone.report.decoding.present
        assert alone.report.decoding.in_place == 0
        assert (shared.report.decoding.in_place > 0) == (method in IN_PLACE)
    assert pinned(engines[1]) == 0


@pytest.mark.parametrize("body", ["int8", "fp8"])
def test_quantised_blocks_are_read_in_place_too(tmp_path, body):
    options = AskOptions(method="scout:repair=none", top_k=4, max_tokens=12)
    with (
        fill(quick_engine(tmp_path / "own", store_body=body)) as own,
        paging_engine(tmp_path / "paged", store_body=body) as paged,
    ):
        for question in QUESTIONS:
            alone, shared = (engine.answer(question, options) for engine in (own, paged))
            assert shared.answer == alone.answer
            assert shared.report.decoding.in_place > 0


def test_reused_rows_are_all_read_in_place_and_the_cache_keeps_the_others(engines):
    request = engines[1].prefill(QUESTIONS[0], AskOptions(method="reuse", top_k=4, max_tokens=6))
    before = engines[0].prefill(QUESTIONS[0], AskOptions(method="reuse", top_k=4, max_tokens=6))
    size = sum(len(hit.chunk.tokens) for hit in request.hits)
    assert request.sequence.paged.rows == [size] * 2
    assert request.sequence.cache.lengths == [length - size for length in before.sequence.cache.lengths]
    assert request.sequence.cache.bytes < before.sequence.cache.bytes
    assert pinned(engines[1]) > 0
    request.sequence.close()
    request.sequence.close()
    assert pinned(engines[1]) == 0


def test_blocks_with_a_recomputed_token_stay_in_the_cache(engines):
    request = engines[1].prefill(QUESTIONS[0], AskOptions(method="epic", top_k=3, max_tokens=6))
    plan, block = request.context.plan, request.session.sources[0].piece.block
    for i, chunk in enumerate(request.sequence.paged.chunks):
        for layer in range(2):
            touched = {token // block for token in plan.recompute[layer][i]}
            in_place = set(chunk.addresses[layer].nonzero()[0].tolist())
            assert in_place == set(plan.kept[layer][i]) - touched
    assert any(plan.recompute[0])
    request.sequence.close()


def test_requests_with_a_chunk_in_common_read_the_same_blocks(engines):
    options = AskOptions(method="reuse", top_k=4, max_tokens=6)
    first, second = (engines[1].prefill(question, options) for question in QUESTIONS[:2])
    found = [{c.key: set(c.addresses.ravel().tolist()) for c in r.sequence.paged.chunks} for r in (first, second)]
    common = set(found[0]) & set(found[1])
    assert common
    assert all(found[0][key] == found[1][key] for key in common)
    first.sequence.close()
    assert pinned(engines[1]) > 0
    second.sequence.close()
    assert pinned(engines[1]) == 0


def test_a_conversation_keeps_its_rows(engines):
    options = AskOptions(method="reuse", top_k=2, max_tokens=6, conversation="talk")
    for question in QUESTIONS[:2]:
        alone, shared = (engine.answer(question, options) for engine in engines)
        assert shared.answer == alone.answer
        assert shared.report.decoding.in_place == 0


def test_what_is_in_no_tier_is_read_from_the_cache(tmp_path):
    with paging_engine(tmp_path, host_bytes=0) as engine:
        answer = engine.answer(QUESTIONS[0], AskOptions(method="reuse", top_k=3, max_tokens=6))
        assert answer.report.decoding.in_place == 0
        assert answer.report.decoding.steps > 0


def test_requests_that_join_leave_and_are_cancelled_get_their_own_answers(engines):
    """Rows, tiles and pins of one never reach another."""
    rng, (own, paged) = random.Random(5), engines
    batch, running, done = Batch(paged.model, 5, graph_decoder=paged.graph_decoder), {}, 0
    for _ in range(60):
        options = AskOptions(method=rng.choice(METHODS[:4]), top_k=rng.randint(1, 4), max_tokens=rng.randint(1, 9))
        question = rng.choice(QUESTIONS)
        request = paged.prefill(question, options)
        running[batch.join(request.sequence)] = request, question, options
        if rng.random() < 0.2:
            id = rng.choice(list(running))
            assert batch.cancel(id)
            del running[id]
        for event in batch.step():
            if event.ended:
                assert event.fault is None
                request, question, options = running.pop(event.id)
                done += 1
                assert paged.finalize(request).answer == own.answer(question, options).answer
    batch.clear()
    assert done > 20
    assert pinned(paged) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [({}, "RAGKV_GRAPHS"), ({"gpu_bytes": 0}, "RAGKV_GPU_BYTES")],
)
def test_a_setting_that_cannot_be_met_is_refused(tmp_path, monkeypatch, settings, said):
    if settings:
        monkeypatch.setattr("ragkv.engine.assembly.make_graph_decoder", graph_decoder)
    with pytest.raises(ConfigError, match=said):
        quick_engine(tmp_path, graphs="paged", **settings)


def test_each_layer_keeps_the_rows_that_are_not_in_its_own_blocks():
    """All layers have rows at the same positions: S, a chunk of two blocks, and a token of the question."""
    shape = Shape(layers=3, q_heads=2, kv_heads=1, head_dim=2)
    cache, positions = ContextCache(shape, 11, torch.float32), torch.arange(11)
    rows = torch.randn(11, 1, 2)
    for layer in range(3):
        cache.put(layer, rows + layer, rows - layer, positions)
    addresses = np.array([[8, 0], [0, 8], [0, 0]])
    paging._drop_rows(cache, [PagedChunk("chunk", 8, 2, addresses)], 4, 1)
    expected = ([0, 1, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5, 10], list(range(11)))
    for layer, left in enumerate(expected):
        assert cache.positions(layer).tolist() == left
        assert torch.equal(cache.k(layer), rows[left] + layer)


def test_a_block_is_read_in_place_if_none_of_its_tokens_was_recomputed():
    assert paging._untouched((0, 1, 3), (5, 6), 4) == (0, 3)
    assert paging._untouched((0, 1, 3), (3, 4), 4) == (3,)
    assert paging._untouched((0, 1, 3), (), 4) == (0, 1, 3)
