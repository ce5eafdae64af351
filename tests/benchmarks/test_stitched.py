"""Prefill policies on stitched contexts: what is timed, and what is said of policies that do not act."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from benchmarks.commands.prefill import prefill
from benchmarks.shapes import random_model
from benchmarks.stitched import StitchedParams, grid, measure
from ragkv.errors import InputError
from ragkv.model.decoder import DecoderModel

FEW = StitchedParams(4, 64, policies=("critiprefill:segment=16,block=16,budget=32", "auto"), repeat=1, warmup=0)


@pytest.fixture(scope="module")
def random() -> DecoderModel:
    return random_model("tiny", "cpu")


def test_every_policy_repairs_and_asks_and_those_that_do_not_act_say_why(random: DecoderModel) -> None:
    dense, sparse, auto = measure(random, FEW, lambda *progress: None)
    assert (dense.policy, dense.pairs, dense.ratio) == ("dense", 1.0, 1.0)
    assert all(row.ttft > 0 and row.repair > 0 and row.prefill > 0 for row in (dense, sparse, auto))
    assert sparse.why_dense == ""
    assert 0 < sparse.pairs < 1
    assert sparse.ratio == pytest.approx((dense.repair + dense.prefill) / (sparse.repair + sparse.prefill))
    assert auto.why_dense.startswith("auto: no policy")
    assert [line[0] for line in grid([dense, sparse]).rows] == ["dense", sparse.policy]


def test_a_context_that_the_model_cannot_read_is_refused(random: DecoderModel) -> None:
    with pytest.raises(InputError, match="tokens of context, question and answer"):
        measure(random, StitchedParams(1024, 1024), lambda *progress: None)


def test_the_command_stitches_each_length(capsys: Any) -> None:
    options = {"shape": "tiny", "length": [128], "policy": ["critiprefill"], "stitched": "cacheblend", "repeat": 1}
    assert prefill(**options) == 0
    assert "cacheblend over 1 chunks of 128 tokens" in capsys.readouterr().out


def test_options_of_whole_prefills_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="whole prefills"):
        prefill(shape="tiny", stitched="cacheblend", backend="flash")
