"""Models with weights in FP8: what is rounded, and that every loop computes with the same rounded weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ragkv.config import Settings, bundled_models
from ragkv.engine.open_model import load_model
from ragkv.errors import ConfigError
from ragkv.kernels import rows as row_kernels
from ragkv.kernels.fp8_linear import FP8
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.fp8_weights import Fp8Linear, quantise_weights
from ragkv.model.execution.fused import Fused
from ragkv.model.execution.merged_weights import MergedFp8Linear, is_plain
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from tests import tiny

pytestmark = [pytest.mark.usefixtures("one_thread")]


def restored(weights):
    """Return a copy whose linear modules have the rounded weights in full width."""
    other = copy.deepcopy(weights)
    for parent in list(other.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Fp8Linear):
                linear = nn.Linear(*reversed(child.weight.shape), bias=child.bias is not None, dtype=torch.float64)
                linear.weight.data = child.weight.double() * child.scale.double()[:, None]
                if child.bias is not None:
                    linear.bias.data = child.bias.detach()
                setattr(parent, name, linear)
    return other


def logits(model: DecoderModel, rows: int = 5) -> torch.Tensor:
    """Return the logits of `rows` rows behind 20 others."""
    cache = ContextCache(model.shape, 20 + rows, model.dtype)
    model.forward([append(cache, tiny.tokens(20), 0, outputs=0)])
    return model.forward([append(cache, tiny.tokens(rows, 7), 20, outputs=rows)])[0]


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_every_loop_computes_with_the_rounded_weights(kind):
    weights = tiny.weights(kind, vocabulary=96)
    exact = logits(DecoderModel(copy.deepcopy(weights)))
    quantise_weights(weights)
    expected = logits(DecoderModel(restored(weights)))
    assert (expected - exact).abs().max() > 1e-3
    model = DecoderModel(weights)
    torch.testing.assert_close(logits(model), expected, rtol=1e-6, atol=1e-6)
    own = model.own_logits(tiny.tokens(20) + tiny.tokens(5, 7))[-5:]
    torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)
    model.fused = Fused(model.body, model.lm_head, model.shape, model.scale, model._cos_sin, row_kernels)
    assert all(isinstance(layer.qkv_proj, MergedFp8Linear) for layer in model.fused.layers)
    torch.testing.assert_close(logits(model), expected, rtol=1e-6, atol=1e-6)


def test_merging_moves_codes_and_scales_and_copies_none():
    weights = tiny.weights()
    quantise_weights(weights)
    assert is_plain(weights.model)
    model = DecoderModel(weights)
    layer = Fused(model.body, model.lm_head, model.shape, model.scale, model._cos_sin, row_kernels).layers[0]
    attention = weights.model.layers[0].self_attn
    rows = attention.q_proj.weight.shape[0]
    assert layer.qkv_proj.weight.data_ptr() == attention.q_proj.weight.data_ptr()
    assert layer.qkv_proj.weight[rows:].data_ptr() == attention.k_proj.weight.data_ptr()
    assert layer.qkv_proj.scale[rows:].data_ptr() == attention.k_proj.scale.data_ptr()


def test_layers_and_an_untied_head_are_rounded_and_nothing_else():
    weights = tiny.weights(vocabulary=96)
    count = DecoderModel(copy.deepcopy(weights)).pair_weight
    quantise_weights(weights)
    assert isinstance(weights.lm_head, Fp8Linear)
    assert not [each for each in weights.model.layers.modules() if type(each) is nn.Linear]
    assert {each.dtype for each in weights.model.embed_tokens.parameters()} == {torch.float64}
    assert DecoderModel(weights).pair_weight == count, "as many multiplications as before"
    assert DecoderModel(weights).dtype == torch.float64


def test_a_head_that_is_the_embedding_stays_as_it_is():
    weights = tiny.weights(vocabulary=96)
    weights.lm_head.weight = weights.model.embed_tokens.weight
    quantise_weights(weights)
    assert type(weights.lm_head) is nn.Linear


def test_a_weight_of_another_size_than_multiples_of_16_stays_as_it_is():
    weights = tiny.weights(vocabulary=97)
    quantise_weights(weights)
    assert type(weights.lm_head) is nn.Linear
    assert weights.model.layers[0].mlp.up_proj.weight.dtype == FP8


def test_without_such_a_gpu_the_setting_is_refused_and_the_message_says_what_to_set(tmp_path):
    settings = Settings(data=tmp_path, model=str(bundled_models() / "tiny"), device="cpu", weights="fp8")
    with pytest.raises(ConfigError, match="RAGKV_WEIGHTS=exact"):
        load_model(settings, lambda line: None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_stored_kv_of_exact_weights_is_not_used_with_rounded_ones():
    folder = str(bundled_models() / "tiny")
    exact, rounded = (DecoderModel.load(folder, "cuda", "bfloat16", weights=form) for form in ("exact", "fp8"))
    assert exact.weights_hash != rounded.weights_hash
    assert rounded.fused is not None
