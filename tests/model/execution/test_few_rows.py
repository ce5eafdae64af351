"""Decoding on a CPU in bfloat16: rounded weights for a few rows of an answer, and for nothing else."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragkv.config import bundled_models, load_settings
from ragkv.engine.engine import Engine
from ragkv.engine.generation import Sampling, Sequence
from ragkv.kernels import grid_products
from ragkv.kernels.packed_products import PackedLinear, pack_products
from ragkv.model import decoder
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution import few_rows
from ragkv.model.execution.few_rows import FEW, FewRowsLinear
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Pass, append
from tests import tiny

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not (torch.ops.mkldnn._is_mkldnn_bf16_supported() and grid_products.supports_grid()),
        reason="needs a CPU that multiplies in bfloat16",
    ),
]
BEFORE = 20


def packed_model(kind: str, vocabulary: int = 96) -> DecoderModel:
    weights = tiny.weights(kind, vocabulary=vocabulary).to(torch.bfloat16)
    pack_products(weights)
    return DecoderModel(weights)


def rounding(model: DecoderModel) -> DecoderModel:
    """Return the same model, whose decoding is rounded."""
    other = copy.copy(model)
    other.rounds_decoding = True
    return other


def passes(model: DecoderModel, rows: int, *, decodes: bool, seed: int = 7) -> Pass:
    """Return a pass of some rows behind 20 others."""
    cache = ContextCache(model.shape, BEFORE + rows, model.dtype)
    model.forward([append(cache, tiny.tokens(BEFORE), 0, outputs=0)])
    given = [token % 96 for token in tiny.tokens(rows, seed)]
    return replace(append(cache, given, BEFORE, outputs=rows), decodes=decodes)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_decoded_row_is_near_that_of_the_exact_weights(kind: str, rows: int) -> None:
    exact = packed_model(kind)
    rounded = rounding(exact)
    one, other = passes(exact, rows, decodes=True), passes(rounded, rows, decodes=True)
    (expected,), (found,) = exact.forward([one]), rounded.forward([other])
    assert not torch.equal(found, expected)
    assert found.dtype == expected.dtype
    assert float((found - expected).float().norm() / expected.float().norm()) < 0.05
    for layer in range(exact.shape.layers):
        for a, b in ((one.cache.k(layer), other.cache.k(layer)), (one.cache.v(layer), other.cache.v(layer))):
            assert torch.equal(a[:BEFORE], b[:BEFORE])
            assert float((a - b).float().norm() / a.float().norm()) < 0.05


def test_a_decoded_row_is_written_where_its_pass_says() -> None:
    model = rounding(packed_model("llama"))
    row = passes(model, 1, decodes=True)
    before = [row.cache.k(layer).clone() for layer in range(model.shape.layers)]
    model.forward([replace(row, steps=[replace(step, slots=torch.tensor([5])) for step in row.steps])])
    for layer, keys in enumerate(before):
        changed = row.cache.k(layer).nan_to_num() != keys.nan_to_num()  # rows that nobody wrote may hold NaN
        assert changed.any(-1).any(-1).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_a_prefill_has_the_exact_weights_also_beside_a_decoded_row(kind: str) -> None:
    exact = packed_model(kind)
    rounded = rounding(exact)
    (expected,) = exact.forward([passes(exact, 3, decodes=False)])
    (alone,) = rounded.forward([passes(rounded, 3, decodes=False)])
    decoded, beside = rounded.forward([passes(rounded, 1, decodes=True, seed=1), passes(rounded, 3, decodes=False)])
    (decoded_alone,) = rounded.forward([passes(rounded, 1, decodes=True, seed=1)])
    assert torch.equal(alone, expected)
    assert torch.equal(beside, expected)
    assert torch.equal(decoded, decoded_alone)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_several_answers_decode_as_alone(rows: int) -> None:
    model = rounding(packed_model("llama"))
    made = [passes(model, rows, decodes=True, seed=seed) for seed in (1, 2)]
    together = model.forward(made)
    for seed, found in zip((1, 2), together, strict=True):
        (alone,) = model.forward([passes(model, rows, decodes=True, seed=seed)])
        torch.testing.assert_close(found, alone, rtol=0.05, atol=0.05 * float(alone.abs().max()))


def test_a_decode_policy_gets_the_keys_and_the_new_row_among_them() -> None:
    model, seen = rounding(packed_model("llama")), list[tuple[int, int, int]]()

    def attend(layer, q, k, v, q_pos, k_pos, *, scale):
        seen.append((layer, k.shape[0], int(k_pos[-1])))
        assert k[-1].any()
        assert scale == model.scale
        return torch.zeros_like(q)

    one = replace(passes(model, 1, decodes=True), attention=attend)
    model.forward([one])
    assert seen == [(layer, BEFORE + 1, BEFORE) for layer in range(model.shape.layers)]


@pytest.mark.parametrize("bias", [False, True])
def test_several_modules_are_one_product_of_few_rows_and_exact_for_more(bias: bool) -> None:
    made = torch.Generator().manual_seed(0)
    modules = [PackedLinear(torch.nn.Linear(64, out, bias=bias, dtype=torch.bfloat16)) for out in (32, 16, 16)]
    product = FewRowsLinear(modules)
    for rows in (1, FEW[2], FEW[2] + 1, 9):
        x = torch.randn(rows, 64, generator=made).bfloat16()
        expected = torch.cat([module(x) for module in modules], -1)
        found = product(x)
        assert torch.equal(found, expected) is (rows > FEW[2])
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_weights_of_4_bits_are_read_so_by_more_rows_than_others() -> None:
    linear = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    linear.weight.data = torch.randint(0, 16, (32, 64)).bfloat16() - 7.5
    linear.weight.data[:, ::32], linear.weight.data[:, 1::32] = -7.5, 7.5
    linear.weight.data *= torch.tensor(1.0).bfloat16() / 3
    module, x = PackedLinear(linear), torch.randn(FEW[1] + 1, 64).bfloat16()
    product = FewRowsLinear([module])
    grid = grid_products.linear(x[: FEW[1]], grid_products.pack(linear.weight.detach()), None)
    assert torch.equal(product(x[: FEW[1]]), grid)
    assert torch.equal(product(x), module(x))


def test_a_size_that_the_grid_does_not_take_is_multiplied_exactly() -> None:
    module = PackedLinear(torch.nn.Linear(64, 40, dtype=torch.bfloat16))
    x = torch.randn(1, 64).bfloat16()
    assert torch.equal(FewRowsLinear([module])(x), module(x))


def test_a_token_of_an_answer_decodes_and_its_prefill_does_not() -> None:
    model = rounding(packed_model("llama"))
    cache = ContextCache(model.shape, 30, model.dtype)
    prefill = append(cache, tiny.tokens(BEFORE), 0)
    sequence = Sequence(cache, model.forward([prefill])[0][0], BEFORE, Sampling(4))
    sequence.sample(frozenset())
    assert not prefill.decodes
    assert sequence.next_pass().decodes


def test_weights_are_quantised_when_the_first_token_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    real = few_rows.grid_products.pack
    monkeypatch.setattr(few_rows.grid_products, "pack", lambda weight: made.append(1) or real(weight))
    model = rounding(packed_model("llama"))
    model.forward([passes(model, 3, decodes=False)])
    assert not made
    model.forward([passes(model, 1, decodes=True)])
    assert len(made) == 4 * model.shape.layers + 1
    model.forward([passes(model, 1, decodes=True)])
    assert len(made) == 4 * model.shape.layers + 1


@pytest.mark.parametrize(
    ("dtype", "weights", "rounds"),
    [("bfloat16", "auto", True), ("bfloat16", "exact", False), ("float32", "auto", False)],
)
def test_a_loaded_model_decodes_so_in_bfloat16_unless_the_weights_are_exact(
    dtype: str, weights: str, rounds: bool
) -> None:
    loaded = DecoderModel.load(str(bundled_models() / "tiny"), "cpu", dtype, weights=weights)
    exact = DecoderModel.load(str(bundled_models() / "tiny"), "cpu", dtype, weights="exact")
    assert (loaded.decoding is not None) is rounds
    assert loaded.weights_hash == exact.weights_hash, "stored KV is that of the exact weights"


@pytest.mark.parametrize("asks", [True, False])
def test_an_engine_makes_the_copy_before_it_is_asked_and_none_where_it_only_ingests(
    asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[object]()
    real = decoder.FewRows
    monkeypatch.setattr(decoder, "FewRows", lambda *given: made.append(given) or real(*given))
    folder = str(bundled_models() / "tiny")
    settings = load_settings(data=tmp_path, model=folder, dtype="bfloat16", device="cpu", threads=1)
    with Engine.open(settings, asks=asks) as engine:
        assert bool(made) is asks
        assert engine.model.rounds_decoding
