"""`ragkv bench decode` on a synthetic layer: every row is complete and has the share of keys that was read."""

from __future__ import annotations

import json

import pytest

from benchmarks.decode import DecodeParams, measure
from ragkv.cli import run
from ragkv.sparse.lfps import Lfps
from ragkv.sparse.psa import Psa
from ragkv.sparse.topk import TopBlocks

SMALL = DecodeParams(keys=2048, steps=3, warmup=1, layers=2, q_heads=4, kv_heads=2, head_dim=32, anchors=8)


@pytest.fixture(scope="module")
def rows():
    told = []
    policies = [
        ("everything", Psa(threshold=1.0)),
        ("psa", Psa()),
        ("blocks", TopBlocks(count=8)),
        ("best blocks", TopBlocks(count=8, digest="exact")),
        ("lfps", Lfps(bypass=1)),
    ]
    found = measure(SMALL, policies, lambda *done: told.append(done))
    assert told[-1] == ("decode", 4, 4)
    return {row.policy: row for row in found}


def test_dense_attention_is_what_all_are_compared_with(rows):
    dense = rows["dense"]
    assert (dense.to_dense, dense.read, dense.error, dense.covered) == (1.0, 1.0, 0.0, None)
    assert dense.fastest <= dense.ms
    assert rows["top keys"].to_topk == 1.0


def test_a_policy_that_reads_everything_says_so(rows):
    assert rows["everything"].read == 1.0
    assert rows["everything"].covered == pytest.approx(1.0)
    assert rows["everything"].error < 1e-5


@pytest.mark.parametrize("name", ["top keys", "psa", "blocks", "lfps"])
def test_sparse_policies_read_less_and_miss_something(rows, name):
    assert 0 < rows[name].read < 0.7
    assert 1e-6 < rows[name].error < 1


def test_coverage_is_measured_where_blocks_are_read(rows):
    assert rows["lfps"].covered is None
    for name in ("psa", "blocks"):
        assert 0 < rows[name].worst <= rows[name].covered <= 1
        assert 0 < rows[name].agree <= 1
    assert rows["everything"].agree == 1.0
    assert rows["best blocks"].agree > max(rows["psa"].agree, rows["blocks"].agree)


def test_the_synthetic_attention_is_sparse(rows):
    assert rows["top keys"].error < 0.2


def test_the_command_prints_and_writes_a_row_for_every_policy(tmp_path, capsys):
    file, table = tmp_path / "rows.json", tmp_path / "rows.md"
    asked = ["--keys", "512", "--steps", "1", "--shape", "tiny", "--policy", "psa", "--policy", "lfps:bypass=1"]
    assert run(["bench", "decode", *asked, "--json", str(file), "--table", str(table)]) == 0
    assert [row["policy"] for row in json.loads(file.read_text())["layer"]] == [
        "dense",
        "top keys",
        "psa",
        "lfps:bypass=1",
    ]
    assert "lfps:bypass=1" in capsys.readouterr().out
    assert table.read_text().count("| psa") == 1
    assert run(["bench", "decode", "--dtype", "int4"]) == 2


def test_a_whole_model_is_timed_by_length_and_batch(tmp_path, capsys):
    file = tmp_path / "rows.json"
    asked = [
        "--shape",
        "tiny",
        "--length",
        "256",
        "--batch",
        "1",
        "--batch",
        "2",
        "--steps",
        "2",
        "--policy",
        "topk:above=0",
    ]
    assert run(["bench", "decode", *asked, "--device", "cpu", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["speed"]
    assert [(row["batch"], row["policy"]) for row in rows] == [
        (1, "dense"),
        (1, "topk:above=0"),
        (2, "dense"),
        (2, "topk:above=0"),
    ]
    assert "TBT p50" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [["--early"], ["--batch", "2"], ["--layers", "2"], ["--quality", "--shape", "tiny"]]
)
def test_options_that_say_nothing_together_are_refused(options, capsys):
    assert run(["bench", "decode", *options]) == 2
