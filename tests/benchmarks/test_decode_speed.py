"""A whole model while it decodes: rates and times fit together, and what is read is counted."""

from __future__ import annotations

import pytest

from benchmarks.decode_speed import SpeedParams, measure
from benchmarks.shapes import random_model, random_tokens
from ragkv.engine.crossover import AutoDecode
from ragkv.errors import InputError
from ragkv.sparse.lfps import Lfps
from ragkv.sparse.psa import Psa
from ragkv.sparse.topk import TopBlocks

PARAMS = SpeedParams((64, 256), (1, 3), steps=4, warmup=1, question=8)
POLICIES = [("everything", Psa(threshold=1.0, block=8)), ("blocks", TopBlocks(count=2, block=8, above=100))]


@pytest.fixture(scope="module")
def model():
    return random_model("tiny", "cpu")


@pytest.fixture(scope="module")
def rows(model):
    told = []
    found = measure(model, PARAMS, POLICIES, lambda *done: told.append(done), random_tokens)
    assert told[-1] == ("decode", 24, 24)
    return {(row.length, row.batch, row.policy): row for row in found}


def test_every_length_batch_and_policy_has_a_row(rows):
    assert len(rows) == 2 * 2 * 3
    assert all(0 < row.p50 <= row.p99 and row.rate > 0 for row in rows.values())


def test_dense_decoding_reads_all_and_is_what_others_are_compared_with(rows, model):
    dense = rows[256, 1, "dense"]
    shape = model.shape
    row = 2 * shape.layers * shape.kv_heads * shape.head_dim * model.dtype.itemsize
    assert (dense.read, dense.ratio) == (1.0, 1.0)
    assert dense.kv == pytest.approx((256 + 1 + 2.5) * row)


def test_a_policy_reads_less_where_it_applies(rows):
    assert rows[256, 3, "everything"].read == 1.0
    assert rows[256, 3, "blocks"].read < 0.25
    assert rows[64, 3, "blocks"].read == 1.0, "no more keys than `above`"
    assert rows[256, 3, "blocks"].ratio == pytest.approx(rows[256, 3, "blocks"].rate / rows[256, 3, "dense"].rate)


def test_keys_in_host_memory_are_timed_beside_the_others_with_what_crosses_the_bus(model):
    params = SpeedParams((256,), (2,), steps=2, warmup=2, question=8, pool=0.5)
    policies = [("lfps", Lfps(least=8)), ("split", Lfps(least=8, split=16)), ("psa", Psa(block=8, least=4, part=0.1))]
    rows = {row.policy: row for row in measure(model, params, policies, lambda *_: None, random_tokens)}
    shape, size = model.shape, model.dtype.itemsize
    sent, back = shape.q_heads + 2 * shape.kv_heads, shape.q_heads
    token = shape.layers * size * (sent * shape.head_dim + back * (shape.head_dim + 1))
    assert rows["split"].crossed == 2 * token, "queries, new rows and results of both requests"
    assert rows["dense"].crossed == rows["lfps"].crossed == 0
    block = 2 * 8 * shape.head_dim * size
    assert rows["psa"].crossed > 0
    assert rows["psa"].crossed * 6 % block == 0, "whole blocks, of two times three steps"
    assert all(0 < rows[name].read < 1 for name in ("lfps", "split", "psa"))
    assert rows["split"].read > rows["lfps"].read


def test_auto_decodes_as_a_request_would(model):
    auto = AutoDecode(TopBlocks(count=2, block=8, above=100), "blocks", "cpu", 200)
    rows = measure(model, PARAMS, [("auto", auto)], lambda *_: None, random_tokens)
    shares = {(row.length, row.batch): row.read for row in rows if row.policy == "auto"}
    assert shares[64, 1] == 1.0, "below the crossover"
    assert shares[256, 1] < 0.25


@pytest.mark.parametrize("length", [8, 200_000])
def test_lengths_a_model_cannot_read_are_refused(model, length):
    with pytest.raises(InputError, match="tokens of context and answer"):
        measure(model, SpeedParams((length,)), (), lambda *_: None, random_tokens)
