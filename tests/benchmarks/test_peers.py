"""Other engines beside ragkv: the same load for both, and tables of what was measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fitted import fitted
from benchmarks.peers.load import in_time, poisson_load
from benchmarks.peers.own_engine import OwnServer, between_tokens
from benchmarks.peers.vllm import TENTH, tables
from benchmarks.shapes import random_model, random_tokens
from benchmarks.tiered import tiered_bench_store
from ragkv.engine.prefill import Prefiller
from ragkv.engine.registry import make_method
from ragkv.model.execution.graph_decode import GraphDecoder


def test_a_load_is_the_same_every_time_and_comes_at_its_rate() -> None:
    load = poisson_load(4.0, 400, 8, 3, range(10, 20))
    assert load == poisson_load(4.0, 400, 8, 3, range(10, 20))
    assert load[-1].at == pytest.approx(100, rel=0.2)
    assert all(len(set(question.documents)) == 3 for question in load)
    assert len({question.tokens for question in load}) > 300, "no two questions have the same tokens"
    assert {number for question in load for number in question.documents} == set(range(8))


def test_the_share_in_time_counts_first_tokens_below_the_limit() -> None:
    assert in_time([10, 999, 1000, 4000], 1000) == 0.5


@pytest.mark.parametrize("recorded", [False, True])
def test_tokens_of_requests_that_decode_together_are_timed(recorded: bool) -> None:
    model = random_model("tiny", "cpu")
    assert between_tokens(model, GraphDecoder(model) if recorded else None, 24, 3, steps=4) > 0


def test_every_question_of_a_load_is_answered_from_stored_documents() -> None:
    model = fitted(random_model("tiny", "cpu"))
    decoder = GraphDecoder(model)
    prefiller = Prefiller(model, random_tokens(model, 4, 0))
    documents = [tuple(random_tokens(model, 65, number)[1:]) for number in range(5)]
    load = poisson_load(200.0, 6, 5, 3, range(20, 28))
    with tiered_bench_store(model, "host") as stored, torch.inference_mode():
        for tokens in documents:
            stored.put(prefiller.encode(tokens))
        stored.fill_tier()
        server = OwnServer(prefiller, stored, documents, make_method(TENTH, model))
        times = server.serve(load, 5, decoder)
        answer = server.prefill(load[0], 5)
    assert len(times) == 6
    assert min(times) > 0
    assert max(answer.cache.lengths) < 3 * 64, "a part of the documents is kept"


def test_tables_divide_the_peers_time_by_ours() -> None:
    figures = {
        "vllm": {"exact": {"decode": {"1640 4": 9.0}, "prefill": {"1024": 30.0}, "loads": [[10.0, 2000.0]]}},
        "ragkv": {
            "exact": {"decode": {"1640 4": 6.0}, "first": {"1024": {"reuse": 10.0}}, "loads": [[5.0, 7.0], [8.0]]}
        },
    }
    text = tables(figures, [9, 12], [0.6])
    assert "| 4 behind 1640 | 9.00 | 6.00 | 1.50 |" in text.replace(" exact |", "")
    assert "| 1024 | reuse | 30.0 | 10.0 | 3.0 |" in text
    assert "| vllm | 0.6 | 50% |" in text
    assert "| ragkv | 12 | 100% |" in text
