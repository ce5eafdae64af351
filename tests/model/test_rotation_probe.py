"""How queries and keys turn is found from rows that were turned with codes, in any dtype."""

from __future__ import annotations

import pytest
import torch

from ragkv.model.rotary import rotate
from ragkv.model.rotation_probe import arrange, find_turning, make_codes

SIZE, SAMPLES = 16, 24


def rows(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 1, SIZE, generator=generator).to(dtype)


def halves(x, cos, sin):
    return x * cos + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * sin


def neighbours(x, cos, sin):
    cos, sin = (each[..., : each.shape[-1] // 2].repeat_interleave(2, -1) for each in (cos, sin))
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


FORMS = {
    "halves": (halves, SIZE),
    "halves of a part": (lambda x, cos, sin: torch.cat([halves(x[..., :6], cos, sin), x[..., 6:]], -1), 6),
    "neighbours": (neighbours, SIZE),
    "neighbours of a part": (lambda x, cos, sin: torch.cat([neighbours(x[..., :8], cos, sin), x[..., 8:]], -1), 8),
    "nothing": (lambda x, cos, sin: x, 8),
}


def table(width):
    angles = torch.arange(5)[:, None] * 0.7 ** torch.arange(width // 2)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_of_turned_queries_and_keys_are_the_models(form, dtype):
    turn, width = FORMS[form]
    codes, x = make_codes(width), rows(dtype)
    coded = turn(x.expand(-1, len(codes.cos), -1), codes.cos.to(dtype), codes.sin.to(dtype))
    noise = {torch.float64: 0.0, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    coded = coded * (1 + noise * torch.randn(coded.shape, generator=torch.Generator().manual_seed(2))).to(dtype)
    cos, sin = table(width)
    rotation = arrange(find_turning(coded, codes), cos, sin, ())
    order = list(range(SIZE)) if rotation.order is None else list(rotation.order)
    exact = rows()[:5].expand(-1, 5, -1)
    own = turn(exact, cos.double(), sin.double())
    ours = rotate(exact[..., order][..., None, :], rotation.form(cos.double(), sin.double()))[..., 0, :]
    torch.testing.assert_close(ours @ ours.mT, own @ own.mT, rtol=0, atol=1e-6)


@pytest.mark.parametrize("empty", [[5], [13], [5, 13], [0, 3]])
def test_a_dimension_that_is_always_0_is_known_by_its_partner(empty):
    codes, x = make_codes(SIZE), rows()
    x[..., empty] = 0
    rotation = arrange(find_turning(halves(x, codes.cos, codes.sin), codes), *table(SIZE), ())
    exact = rows()[:5].expand(-1, 5, -1).clone()
    exact[..., empty] = 0
    cos, sin = (each.double() for each in table(SIZE))
    order = list(range(SIZE)) if rotation.order is None else list(rotation.order)
    own, ours = halves(exact, cos, sin), rotate(exact[..., order][..., None, :], rotation.form(cos, sin))[..., 0, :]
    torch.testing.assert_close(ours @ ours.mT, own @ own.mT, rtol=0, atol=1e-9)


def test_a_norm_behind_the_rotation_is_not_explained():
    codes = make_codes(SIZE)
    turned = halves(rows(), codes.cos, codes.sin)
    normed = turned / turned.norm(dim=-1, keepdim=True).clamp(min=1e-9) * torch.linspace(0.5, 1.5, SIZE)
    assert find_turning(normed, codes) is None


def test_a_turn_by_another_angle_than_the_partners_is_no_pair():
    codes = make_codes(SIZE)
    cos, sin = table(SIZE)
    turning = find_turning(halves(rows(), codes.cos, codes.sin), codes)
    assert arrange(turning, cos, sin, ()) is not None
    assert arrange(turning, torch.rand(5, SIZE), sin, ()) is None
