"""Transfer of blocks: the reference against unpack and rotate, the Triton kernel against both."""

from __future__ import annotations

import pytest
import torch

from ragkv.kernels import transfer as reference
from ragkv.kernels.transfer import TransferFormat, TransferTable
from ragkv.model.rotary import Rotary, rotate
from ragkv.store.format.codec import unpack
from ragkv.store.format.layout import BODIES, Layout, block_ranges
from ragkv.types import Shape
from tests.store.chunks import finite_kv, packed

triton_transfer = pytest.importorskip("ragkv.kernels.triton_transfer")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
KERNELS = {"reference": reference.transfer_blocks, "triton": triton_transfer.transfer_blocks}
CASES = [(22, 4, 2, 8), (16, 16, 3, 20), (21, 16, 1, 64), (5, 16, 8, 128)]
"""Tokens of a chunk, tokens of a block, kv heads, head size. The last block is full, one token, or the only one."""
BEFORE, ROOM = 3, 40


def angles(dtype, count, d):
    radians = torch.rand(count, d // 2, generator=torch.Generator().manual_seed(9)) * 6
    return [torch.cat([each, each], -1).to(DEVICE, dtype) for each in (radians.cos(), radians.sin())]


class Case:
    """The blocks of a chunk in separate slots of memory, and a cache for each layer."""

    def __init__(self, body, tokens, block, kv_heads, d, dtype=torch.float32):
        shape = Shape(3, kv_heads, kv_heads, d)
        self.layout = Layout(shape, tokens, block, dtype, body)
        _, _, data = packed(finite_kv(tokens, block, shape, dtype), block, form=body)
        self.requested = [range(self.layout.blocks), [0], [self.layout.blocks - 1]]
        self.found = block_ranges(self.layout, self.requested)
        # Page-locked on a machine with a GPU, so that the Triton kernel reads it in place.
        self.pool = torch.zeros(len(self.found) + 1, self.layout.full_bytes, dtype=torch.uint8, pin_memory=CUDA)
        for slot, (layer, _, start, size) in enumerate(self.found, start=1):
            self.pool[slot, :size] = torch.frombuffer(data[layer], dtype=torch.uint8)[start : start + size]
        self.k, self.v = (torch.full((3, ROOM, kv_heads, d), 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
        self.form = TransferFormat(body, block, kv_heads, d, dtype)
        self.cos, self.sin = angles(dtype, tokens + 30, d)

    def entries(self):
        """Return entries that put the chunk at position 11, behind some other rows."""
        table, raw, k, v = [], [], [], []
        used = [BEFORE] * 3
        for slot, (layer, block, _, size) in enumerate(self.found, start=1):
            count, row = self.layout.block_tokens(block), used[layer]
            used[layer] += count
            raw.append(self.pool[slot, :size])
            k.append(self.k[layer, row : row + count])
            v.append(self.v[layer, row : row + count])
            position = 11 + block * self.layout.block
            table.append([raw[-1].data_ptr(), count, k[-1].data_ptr(), v[-1].data_ptr(), position])
        return TransferTable(torch.tensor(table, dtype=torch.int64).T.contiguous().to(DEVICE), raw, k, v)

    def expected(self):
        """Yield (k, v) of each layer by unpack and rotate."""
        starts = torch.arange(1, len(self.found) + 1).numpy() * self.layout.full_bytes
        rows = unpack(self.pool.flatten(), starts, self.found, self.layout)
        for blocks, (k, v) in zip(self.requested, rows, strict=True):
            at = [11 + t for b in blocks for t in range(b * self.layout.block, self.layout.tokens)][: len(k)]
            if len(blocks) > 1:
                at = list(range(11, 11 + len(k)))
            yield rotate(k.to(DEVICE), Rotary(self.cos, self.sin)[torch.tensor(at, device=DEVICE)]), v.to(DEVICE)


def transfer(name, case, entries):
    raw = [each.to(DEVICE) for each in entries.raw]  # the reference cannot read across devices
    KERNELS[name](
        TransferTable(entries.table, raw, entries.k, entries.v), 0, len(entries.raw), case.cos, case.sin, case.form
    )


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("sizes", CASES)
def test_transferred_blocks_equal_unpacked_and_rotated_rows(name, body, sizes):
    case = Case(body, *sizes)
    entries = case.entries()
    transfer(name, case, entries)
    for layer, (k, v) in enumerate(case.expected()):
        rows = slice(BEFORE, BEFORE + len(k))
        if name == "reference":
            assert torch.equal(case.k[layer, rows], k)
        torch.testing.assert_close(case.k[layer, rows], k, rtol=1e-6, atol=2e-6)
        assert torch.equal(case.v[layer, rows], v)
        for store in (case.k, case.v):
            assert (store[layer, :BEFORE] == 7).all()
            assert (store[layer, BEFORE + len(k) :] == 7).all()


@pytest.mark.parametrize("body", BODIES)
def test_the_triton_kernel_rounds_where_the_reference_does(body):
    half = torch.bfloat16 if CUDA else torch.float16
    one, other = (Case(body, 37, 16, 2, 64, half) for _ in range(2))
    transfer("reference", one, one.entries())
    transfer("triton", other, other.entries())
    assert torch.equal(one.v, other.v)
    if CUDA:  # the compiler may fuse a product and a sum without rounding between
        assert (one.k.float() - other.k.float()).norm() < 4e-3 * one.k.float().norm()
    else:
        torch.testing.assert_close(one.k, other.k, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("name", KERNELS)
def test_only_the_given_entries_are_transferred(name):
    case = Case("exact", 22, 4, 2, 8)
    entries = case.entries()
    raw = [each.to(DEVICE) for each in entries.raw]
    call = (case.cos, case.sin, case.form)
    KERNELS[name](TransferTable(entries.table, raw, entries.k, entries.v), 6, 1, *call)
    assert (case.k[0] == 7).all()
    assert (case.k[2] == 7).all()
    assert (case.k[1, BEFORE : BEFORE + 4] != 7).any()
    KERNELS[name](TransferTable(entries.table), 0, 0, *call)
    assert (case.k[0] == 7).all()
