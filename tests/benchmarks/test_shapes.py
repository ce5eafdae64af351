"""Models with random weights: their shapes, and attention that is sparse by construction."""

import dataclasses

import pytest
import torch

from benchmarks.shapes import SHAPES, find_shape, random_model, random_tokens
from ragkv.errors import InputError
from ragkv.model.execution.fp8_weights import Fp8Linear
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.model.supported import check_supported
from tools.key_share import key_share

pytestmark = pytest.mark.usefixtures("one_thread")


def narrow(name):
    """The shape with its heads and rope, but small matrices."""
    return dataclasses.replace(SHAPES[name], hidden=256, intermediate=64, vocabulary=4096)


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model_that_is_supported(name):
    model = random_model(narrow(name), layers=2)
    check_supported(model.config)
    shape = SHAPES[name]
    assert dataclasses.astuple(model.shape) == (2, shape.q_heads, shape.kv_heads, shape.head_dim)
    assert model.max_positions == shape.positions
    tokens = random_tokens(model, 40)
    cache = ContextCache(model.shape, 40, model.dtype)
    logits = model.forward([append(cache, tokens, 0)])[0][-1]
    assert torch.allclose(logits, model.own_logits(tokens)[-1], atol=1e-4)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mistral-7b", "qwen2.5-3b"])
def test_a_few_keys_hold_nearly_all_of_a_rows_attention(name):
    model = random_model(narrow(name), layers=2)
    tokens = random_tokens(model, 2048)
    sparse = key_share(model, tokens, rows=8)
    assert sparse.shape == (2, model.shape.q_heads)
    assert sparse.median() < 0.03
    assert sparse.quantile(0.9) < 0.2
    plain = key_share(random_model(narrow(name), layers=2, sparse=False), tokens, rows=8)
    assert plain.median() > 0.5


def test_heads_differ_and_a_seed_decides_how():
    tokens = random_tokens(random_model("tiny"), 1024)
    one, again, other = (key_share(random_model("tiny", seed=seed), tokens) for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.allclose(one, other, rtol=0.2)
    assert one.max() > 3 * one.min()


def test_structure_is_the_same_at_every_depth():
    model = random_model("tiny", layers=8)
    shares = key_share(model, random_tokens(model, 1024)).median(-1).values
    assert shares[-1] < 4 * shares[0] + 0.02


def test_inputs_start_with_the_same_token_and_it_stands_nowhere_else():
    model = random_model("tiny", layers=1)
    tokens = random_tokens(model, 5000, seed=3)
    assert len(tokens) == 5000
    assert [at for at, token in enumerate(tokens) if token == tokens[0]] == [0]
    assert max(tokens) < SHAPES["tiny"].vocabulary


def test_an_unknown_shape_is_told():
    with pytest.raises(InputError, match=r"choose one of llama-3\.1-8b"):
        find_shape("gpt-9")


def test_weights_of_a_shape_may_be_in_fp8():
    exact, rounded = (random_model("tiny", form=form).body.layers[0].mlp.up_proj for form in ("exact", "fp8"))
    assert isinstance(rounded, Fp8Linear)
    restored = rounded.weight.float() * rounded.scale[:, None]
    assert (restored - exact.weight).abs().max() < exact.weight.abs().max() / 15
    with pytest.raises(InputError, match="exact or fp8"):
        random_model("tiny", form="int4")
