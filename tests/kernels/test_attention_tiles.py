"""Attention by tiles in bfloat16 on a CPU equals attention in float64, up to bfloat16's rounding."""

import pytest
import torch

from ragkv.kernels.attention import attend
from ragkv.kernels.attention_reference import attend_lse
from ragkv.kernels.attention_tiles import MIN_ROWS, TILE, attend_tiles, supports_tiles, visible_span

pytestmark = pytest.mark.usefixtures("one_thread")


def tensors(rows, keys, q_heads=6, kv_heads=2, d=16):
    generator = torch.Generator().manual_seed(rows + keys)
    sizes = ((rows, q_heads, d), (keys, kv_heads, d), (keys, kv_heads, d))
    return [torch.randn(size, generator=generator, dtype=torch.float64).bfloat16() for size in sizes]


def check(q, k, v, q_pos, k_pos):
    exact = attend_lse(q.double(), k.double(), v.double(), q_pos, k_pos, scale=0.25)[0]
    for out in (attend_tiles(q, k, v, q_pos, k_pos, scale=0.25), attend(q, k, v, q_pos, k_pos, scale=0.25)):
        torch.testing.assert_close(out.double(), exact, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("rows", [8, TILE, 2 * TILE + 5])
def test_a_prefill_and_a_continuation(rows):
    positions = torch.arange(rows + 40)
    check(*tensors(rows, rows), positions[:rows], positions[:rows])
    check(*tensors(rows, rows + 40), positions[40:], positions)
    check(*tensors(rows, 40), positions[40:], positions[:40])


def test_scattered_rows_over_keys_in_any_order():
    generator = torch.Generator().manual_seed(1)
    k_pos = torch.randperm(300, generator=generator)
    q_pos = torch.randperm(300, generator=generator)[: TILE + 9]
    check(*tensors(TILE + 9, 300), q_pos, k_pos)


def test_later_keys_have_no_influence_at_all():
    q, k, v = tensors(20, 60)
    q_pos, k_pos = torch.arange(20, 40), torch.arange(60)
    first = attend_tiles(q, k, v, q_pos, k_pos, scale=0.25)
    k[30:], v[30:] = 7.0, 7.0
    assert torch.equal(attend_tiles(q, k, v, q_pos, k_pos, scale=0.25)[:10], first[:10])


def test_the_span_in_which_positions_decide():
    assert visible_span(torch.tensor([3, 5]), torch.tensor([0, 1, 4, 2, 9])) == (2, 4)
    assert visible_span(torch.tensor([9]), torch.tensor([0, 1, 4])) == (3, 3)


def test_other_dtypes_and_few_rows_keep_torchs_kernel():
    q = tensors(MIN_ROWS, 9)[0]
    assert supports_tiles(q)
    assert not supports_tiles(q.float())
    assert not supports_tiles(q[1:])
