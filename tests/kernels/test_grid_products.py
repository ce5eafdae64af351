"""Products with weights on a grid of 16 codes: which weights lie on one, the reference, and the operator of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ragkv.kernels import grid_products
from ragkv.kernels.grid_products import (
    GROUP,
    LOSS,
    Grid,
    PackedGrid,
    fits_grid,
    linear,
    linear_reference,
    pack,
    quantise,
    supports_grid,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not supports_grid(), reason="torch has no products of 4 bits on a CPU"),
]
IMPLEMENTATIONS = {"reference": (quantise, linear_reference), "packed": (pack, linear)}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(least: int, most: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(least, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def error(found: Tensor, weight: Tensor) -> float:
    return float((found.double() - weight.double()).norm() / weight.double().norm())


def of_gguf(kind: str, rows: int, columns: int) -> Tensor:
    """Return weights as a GGUF file of a type of 4 bits holds them."""
    quants = pytest.importorskip("gguf.quants")
    types = pytest.importorskip("gguf").GGMLQuantizationType
    if kind == "Q4_K":  # the package writes none: blocks of 256 with two scales, 12 bytes of scales and 128 of codes
        random = np.random.default_rng(0)
        blocks = random.integers(0, 256, (rows * columns // 256, 144), dtype=np.uint8)
        blocks[:, :4] = np.array([0.002, 0.004], dtype=np.float16).view(np.uint8)
        return torch.from_numpy(quants.dequantize(blocks.reshape(rows, -1), types.Q4_K))
    data = quants.quantize(drawn(rows, columns).numpy(), types[kind])
    return torch.from_numpy(quants.dequantize(data, types[kind]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "size", "outputs"), [(1, 32, 16), (2, 96, 80), (4, 64, 144), (7, 160, 64)])
def test_a_product_of_whole_numbers_is_exact(
    implementation: str, planes: int, bias: bool, rows: int, size: int, outputs: int
) -> None:
    weight = whole(0, 15, outputs, size)
    weight[:, ::GROUP], weight[:, 1::GROUP] = 0, 15  # both ends in every group, so that a step is 1
    if planes == 2:  # sixteenths, of which only a second plane knows
        weight += whole(0, 1, outputs, size, seed=1) / 16 * (weight % 15 > 0)
    x, added = whole(-2, 2, rows, size, seed=2), whole(-9, 9, outputs, seed=3) if bias else None
    quantised, product = IMPLEMENTATIONS[implementation]
    held: Grid | PackedGrid = quantised(weight.bfloat16())
    found = product(x.bfloat16(), held, None if added is None else added.bfloat16())
    expected = x.double() @ quantise(weight.bfloat16()).restored().double().T
    assert planes == (held.planes if isinstance(held, PackedGrid) else held.codes.shape[0])
    rounded = expected.bfloat16() if added is None else expected.bfloat16() + added.bfloat16()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, rounded, rtol=1 / 128, atol=0)
    if planes == 1:
        assert torch.equal(quantise(weight.bfloat16()).restored(), weight)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_product_is_near_that_of_the_matrix(implementation: str, rows: int) -> None:
    quantised, product = IMPLEMENTATIONS[implementation]
    weight, x = drawn(96, 256).bfloat16(), drawn(rows, 256, seed=1).bfloat16()
    found = product(x, quantised(weight), None)
    assert found.shape == (rows, 96)
    if rows:
        assert error(found, x.double() @ weight.double().T) < 0.01


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_weights_of_4_bits_need_one_plane(kind: str) -> None:
    weight = of_gguf(kind, 128, 512).bfloat16()
    grid = quantise(weight)
    assert grid.codes.shape[0] == 1
    assert error(grid.restored(), weight) <= LOSS


def test_a_group_that_does_not_reach_both_ends_lies_on_the_grid_that_it_was_made_on() -> None:
    codes = whole(2, 11, 32, 128)
    weight = (codes - 8).unflatten(1, (-1, GROUP)) * (1 + drawn(32, 4, 1).abs())
    grid = quantise(weight.flatten(1).bfloat16())
    assert grid.codes.shape[0] == 1
    assert error(grid.restored(), weight.flatten(1)) <= LOSS


def test_other_weights_get_a_second_plane_and_keep_eight_bits() -> None:
    weight = drawn(64, 512)
    grid = quantise(weight)
    assert grid.codes.shape[0] == 2
    assert error(grid.restored(), weight) < 1.5 * LOSS
    first = Grid(grid.codes[:1], grid.scale[:1], grid.centre[:1])
    assert error(first.restored(), weight) > 10 * LOSS


@pytest.mark.parametrize("value", [0.0, -3.5])
def test_weights_that_are_all_alike_stay_so(value: float) -> None:
    weight = torch.full((16, 64), value)
    assert torch.equal(quantise(weight).restored(), weight)


def test_a_matrix_that_is_packed_in_pieces_is_packed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(16 * 21, 96)
    at_once = pack(weight)
    monkeypatch.setattr(grid_products, "_CHUNK", 1)
    in_pieces = pack(weight)
    assert torch.equal(in_pieces.codes, at_once.codes)
    assert torch.equal(in_pieces.scales, at_once.scales)


def test_sizes_that_the_operator_does_not_take_are_known() -> None:
    assert fits_grid(drawn(16, 32))
    assert not fits_grid(drawn(97, 64))
    assert not fits_grid(drawn(64, 48))
