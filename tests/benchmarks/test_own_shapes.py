"""Shapes of models whose layers run by their own forward are measured as all others, without a roofline."""

from __future__ import annotations

import pytest

from benchmarks import own_shapes
from benchmarks.shapes import random_model
from benchmarks.ttft_shape import ShapeParams, ttft_shape
from ragkv.errors import InputError

SMALL = {
    "qwen3.5-0.8b": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "vocab_size": 512,
    },
    "gemma-3-270m": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "head_dim": 32,
        "sliding_window": 16,
        "vocab_size": 512,
    },
}


@pytest.mark.parametrize("name", own_shapes.OWN_SHAPES)
def test_every_method_has_its_times_and_no_floor(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(own_shapes.OWN_SHAPES, name, own_shapes.OWN_SHAPES[name] | SMALL[name])
    model = random_model(name)
    params = ShapeParams(2, 64, methods=("scout:repair=none", "reuse"), repeat=1, warmup=1, split=1, question=8)
    rows = ttft_shape(model, params, lambda *_: None).rows
    assert [row.method for row in rows] == ["full", "scout:repair=none", "reuse"]
    assert all(row.ttft and row.floors is None for row in rows)
    states = model.states.bytes * 2 if name.startswith("qwen") else 0
    assert rows[2].loaded is not None
    assert rows[2].loaded > states / 2, "the state of one chunk is counted"


def test_they_run_on_one_device() -> None:
    with pytest.raises(InputError, match="one device"):
        random_model("gemma-3-270m", "spread")


def test_they_have_all_their_layers_and_exact_weights() -> None:
    for options in ({"layers": 2}, {"form": "fp8"}):
        with pytest.raises(InputError, match="all its layers"):
            random_model("gemma-3-270m", **options)  # type: ignore[arg-type]
