"""Packed products equal those of the linear modules."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from ragkv.config import bundled_models
from ragkv.kernels.packed_products import PackedLinear, pack_products, supports_packing
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from tests import tiny

packs = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU that multiplies in bfloat16"
)
pytestmark = [pytest.mark.usefixtures("one_thread")]


def logits(model: DecoderModel, rows: int) -> torch.Tensor:
    """Return the logits of `rows` rows behind 20 others."""
    cache = ContextCache(model.shape, 20 + rows, model.dtype)
    model.forward([append(cache, tiny.tokens(20), 0, outputs=0)])
    return model.forward([append(cache, tiny.tokens(rows, 7), 20, outputs=rows)])[0]


@packs
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1])
def test_a_product_is_that_of_the_linear_module(bias, rows):
    linear = nn.Linear(48, 80, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(rows, 48, dtype=torch.bfloat16)
    packed = PackedLinear(linear)
    with torch.inference_mode():
        assert torch.equal(packed(x), linear(x))
        assert torch.equal(packed(x[None]), linear(x[None]))
    assert torch.equal(packed.weight.to_dense(), linear.weight)
    assert packed.weight.numel() == linear.weight.numel()


@packs
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [5, 300])
def test_a_product_of_several_rows_is_that_of_the_linear_module_but_for_its_rounding(bias, rows):
    """A CPU with tiles (AMX) adds up in another order."""
    linear = nn.Linear(48, 80, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(rows, 48, dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(x), linear(x), rtol=2**-7, atol=2**-7)


@packs
@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("rows", [1, 9])
def test_a_packed_model_computes_the_same(kind, rows):
    weights = tiny.weights(kind).to(torch.bfloat16)
    plain = DecoderModel(copy.deepcopy(weights))
    pack_products(weights)
    packed = DecoderModel(weights)
    assert isinstance(packed.lm_head, PackedLinear)
    assert not [each for each in packed.body.modules() if type(each) is nn.Linear]
    assert torch.equal(logits(packed, rows), logits(plain, rows))
    assert torch.equal(packed.own_logits(tiny.tokens(rows)), plain.own_logits(tiny.tokens(rows)))
    assert packed.pair_weight == plain.pair_weight


@packs
def test_a_loaded_model_is_packed_in_bfloat16_and_in_no_other_dtype():
    folder = str(bundled_models() / "tiny")
    assert isinstance(DecoderModel.load(folder, "cpu", "bfloat16").body.layers[0].mlp.down_proj, PackedLinear)
    assert type(DecoderModel.load(folder, "cpu", "float32").body.layers[0].mlp.down_proj) is nn.Linear


def test_other_dtypes_and_an_older_torch_are_left_alone(monkeypatch):
    assert not supports_packing(tiny.weights().float())
    mixed = tiny.weights().to(torch.bfloat16)
    mixed.model.norm.float()
    assert not supports_packing(mixed)
    whole = tiny.weights().to(torch.bfloat16)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not supports_packing(whole)


@packs
def test_modules_that_are_no_plain_linear_ones_are_left_alone():
    class Scaled(nn.Linear):
        pass

    module = nn.Sequential(Scaled(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8, dtype=torch.bfloat16))
    pack_products(module)
    assert [type(each) for each in module] == [Scaled, PackedLinear]


SHORT = """
import resource, torch
from torch import nn
from ragkv.kernels.packed_products import PackedLinear

torch.set_num_threads(1)
packed = PackedLinear(nn.Linear(576, 1536, bias=False).bfloat16())
packed(torch.ones(2, 576, dtype=torch.bfloat16))
rows = {count: torch.ones(count, 576, dtype=torch.bfloat16) for count in range(9, 80, 7)}
mapped = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
unlimited = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (int(mapped.split()[1]) * 1024 + 300_000, unlimited[1]))
refused = 0
for x in rows.values():
    try:
        packed(x)
    except RuntimeError as error:
        refused += 1
resource.setrlimit(resource.RLIMIT_AS, unlimited)
for x in rows.values():
    packed(x)
print("refused", refused)
"""


@packs
def test_a_thread_in_which_memory_ran_out_multiplies_every_shape_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 0
