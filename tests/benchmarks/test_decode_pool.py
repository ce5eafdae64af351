"""Decoding with KV in host memory: each decoder has a row, with what was read and from where."""

from __future__ import annotations

import json

import pytest

from benchmarks.decode_pool import PSA, STAGED, PoolParams, measure
from benchmarks.shapes import random_model, random_tokens
from ragkv.cli import run
from ragkv.errors import InputError
from ragkv.sparse.psa import Psa

PARAMS = PoolParams(420, 2, 0.25, Psa(block=8, least=4), steps=3, warmup=2, dense_steps=2, covered=2)


@pytest.fixture(scope="module")
def model():
    return random_model("tiny", "cpu", layers=2)


@pytest.fixture(scope="module")
def rows(model):
    told = []
    found = measure(model, PARAMS, lambda *done: told.append(done), random_tokens)
    assert told[-1] == ("decode", 2, 2)
    return {row.way: row for row in found}


def test_both_decoders_have_a_row_with_rates_and_times(rows):
    assert list(rows) == [STAGED, PSA]
    assert all(0 < row.p50 <= row.p99 and row.rate > 0 for row in rows.values())
    assert rows[PSA].ratio == pytest.approx(rows[PSA].rate / rows[STAGED].rate)


def test_dense_decoding_copies_all_that_does_not_stay_on_the_device(rows, model):
    row = rows[STAGED]
    assert row.read == 1.0
    assert row.host == 2 * 315 * model.token_bytes
    assert row.hits == pytest.approx(0.25)
    assert row.covered is None


def test_psa_reads_less_and_says_how_much_that_covers(rows):
    row = rows[PSA]
    assert 0 < row.read < 1
    assert row.host < rows[STAGED].host
    assert row.hits > rows[STAGED].hits
    assert 0 < row.worst <= row.covered <= 1


def test_a_threshold_of_one_is_dense_decoding(model):
    params = PoolParams(100, 1, 0.5, Psa(block=8, threshold=1.0), steps=1, warmup=1, dense_steps=1)
    row = measure(model, params, lambda *_: None, random_tokens)[-1]
    assert row.read == 1.0
    assert row.covered == row.worst == pytest.approx(1.0)
    assert row.error < 1e-5


@pytest.mark.parametrize("params", [PoolParams(200_000), PoolParams(5), PoolParams(100, share=1.0)])
def test_what_cannot_be_measured_is_refused(model, params):
    with pytest.raises(InputError):
        measure(model, params, lambda *_: None, random_tokens)


def test_the_command_writes_table_and_figures(tmp_path):
    table, file = tmp_path / "table.md", tmp_path / "figures.json"
    command = "bench decode --shape tiny --layers 1 --length 1300 --batch 2 --pool 0.25 --steps 2 --device cpu"
    assert run([*command.split(), "--table", str(table), "--json", str(file)]) == 0
    assert [row["way"] for row in json.loads(file.read_text())["pool"]] == [STAGED, PSA]
    assert "25% in the pool" in table.read_text()
    assert run([*command.split(), "--policy", "psa", "--policy", "lfps:split=9", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["speed"]
    assert [row["policy"] for row in rows] == ["dense", "psa", "lfps:split=9"]
    assert all(row["crossed"] > 0 for row in rows[1:])
    assert run(["bench", "decode", "--pool", "0.25"]) != 0
