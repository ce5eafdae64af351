"""A decode policy that reads every key answers like dense decoding; one that reads few keys does not."""

from __future__ import annotations

import pytest

from benchmarks.answers import whole_sets
from benchmarks.decode_answers import compare, grid
from benchmarks.grid import aligned
from ragkv.config import bundled_models
from ragkv.evaluation.sets import needle_sets
from ragkv.model.decoder import DecoderModel
from ragkv.sparse.psa import Psa
from ragkv.sparse.topk import TopBlocks

POLICIES = [("everything", Psa(threshold=1.0)), ("nothing", TopBlocks(count=0, sinks=0, block=4))]


@pytest.fixture(scope="module")
def model():
    return DecoderModel.load(str(bundled_models() / "tiny"), "cpu", "float32")


@pytest.fixture(scope="module")
def sets(model):
    return {"small": needle_sets(1, 2, 120, 5, 101, lambda text: len(model.prompt.plain(text)))}


@pytest.fixture(scope="module")
def early(model, sets):
    return {row.policy: row for row in compare(model, sets, POLICIES, lambda *_: None, early=True)["small"]}


def test_a_policy_that_reads_everything_answers_as_dense_decoding(early):
    dense, everything = early["dense"], early["everything"]
    assert dense.f1 > 0.5
    assert (dense.delta, dense.same, dense.read) == (0.0, 1.0, 1.0)
    assert (everything.f1, everything.same, everything.read) == (dense.f1, 1.0, 1.0)


def test_a_policy_that_sees_next_to_nothing_loses_the_answer_when_it_reads_the_first_token_too(early, model, sets):
    assert early["nothing"].f1 < early["dense"].f1 - 0.3
    late = {row.policy: row for row in compare(model, sets, POLICIES, lambda *_: None)["small"]}
    assert late["nothing"].f1 > early["nothing"].f1, "the first token comes from the question's own pass"
    assert late["nothing"].steps < early["nothing"].steps or late["dense"].steps < early["dense"].steps


def test_keys_read_are_counted_per_token_and_layer(early):
    assert early["nothing"].read < 0.05
    assert early["nothing"].keys <= 5
    assert early["everything"].keys > 200
    lines = aligned(grid({"small": list(early.values())}))
    assert len(lines) == 4


def test_whole_sets_are_the_held_out_ones(model):
    assert set(whole_sets(model)) >= {"needles, 8 chunks", "natural, 8 chunks"}
