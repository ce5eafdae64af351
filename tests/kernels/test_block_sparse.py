"""Block-sparse attention: reference and Triton kernel equal dense attention under the index mask. O5, O6, O7."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.kernels import block_sparse
from ragkv.kernels import block_sparse_reference as reference
from ragkv.kernels.attention import attend_planned, copy_to_device, index_to_device, plan_mask
from ragkv.kernels.block_index import build_index, clear_blocks, dense_index
from ragkv.kernels.decode_step import CachePointers
from ragkv.types import Shape
from tests.kernels.test_attention import GROUPINGS, dense

triton_block_sparse = pytest.importorskip("ragkv.kernels.triton_block_sparse")
triton_block_sparse_tma = pytest.importorskip("ragkv.kernels.triton_block_sparse_tma")
block_sparse_launch = pytest.importorskip("ragkv.kernels.block_sparse_launch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = {"reference": reference.attend_block_sparse, "triton": triton_block_sparse.attend_block_sparse}


def rows(count, heads, seed, d=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, heads, d, generator=generator).to(DEVICE)


def case(q_pos, k_pos, heads, tile, block, offset=0, seed=0, share=0.5, columns=0.0):
    """Build a random index over given positions."""
    generator = torch.Generator().manual_seed(seed)
    tiles, blocks = -(-(len(q_pos) + offset) // tile), -(-len(k_pos) // block)
    mark = torch.rand(heads, tiles, blocks, generator=generator) < share
    single = torch.rand(heads, len(k_pos), generator=generator) < columns
    clear = clear_blocks(q_pos, k_pos, tile, block, offset)
    return build_index(mark.to(DEVICE), clear.to(DEVICE), tile, block, offset, single.to(DEVICE))


def mask_of(index, q_pos, k_pos):
    """Return bool [H, T, n]: the keys that a query may read."""
    heads = index.counts.shape[0]
    mask = torch.zeros(heads, len(q_pos), len(k_pos), dtype=torch.bool)
    for head in range(heads):
        for row in range(len(q_pos)):
            keys = index.keys(head, (row + index.offset) // index.tile, len(k_pos)).cpu()
            mask[head, row, keys] = k_pos[keys] <= q_pos[row]
    return mask


def check(name, q, k, v, q_pos, k_pos, index, tolerance=2e-5):
    out, lse = KERNELS[name](q, k, v, q_pos.to(q.device), k_pos.to(q.device), index, scale=0.3)
    mask = mask_of(index, q_pos, k_pos).repeat_interleave(q.shape[1] // index.counts.shape[0], dim=0).to(q.device)
    some = mask.any(-1).T
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,nhd->htn", q, k.repeat_interleave(group, dim=1)) * 0.3
    expected = torch.logsumexp(scores.masked_fill(~mask, -math.inf), -1).T
    expected_out = dense(q, k, v, mask, 0.3).nan_to_num(0.0)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse[some], expected[some], rtol=0, atol=tolerance)
    assert bool((lse[~some] == -math.inf).all())
    assert bool((out[~some] == 0).all())


def random_marks(heads, tiles, blocks, share, seed):
    """Random masks, on the CPU, of the blocks that tiles read and of the clear ones. Some tiles read nothing."""
    generator = torch.Generator().manual_seed(seed)
    mark = torch.rand(heads, tiles, blocks, generator=generator) < share
    mark &= torch.rand(heads, tiles, 1, generator=generator) < 0.8
    return mark, torch.rand(tiles, blocks, generator=generator) < 0.5


@settings(deadline=None, max_examples=40)
@given(
    heads=st.integers(1, 3),
    tiles=st.integers(1, 4),
    blocks=st.integers(1, 20),
    share=st.sampled_from([0.0, 0.2, 0.7, 1.1]),
    spare=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_a_known_longest_list_gives_the_same_lists(heads, tiles, blocks, share, spare, seed):
    """Clear blocks come first, each part ascends, and zeros follow."""
    mark, clear = random_marks(heads, tiles, blocks, share, seed)
    longest = int(mark.sum(-1).max())
    counted = build_index(mark, clear, 16, 8)
    known = build_index(mark, clear, 16, 8, most=longest + spare)
    assert counted.blocks.shape[2] == max(1, longest)
    assert known.blocks.shape[2] == max(1, longest + spare)
    for index in (counted, known):
        assert index.blocks.is_contiguous()
        assert index.blocks.data_ptr() % 16 == 0, "Triton compiles another kernel for tensors that are not aligned"
        width = index.blocks.shape[2]
        for head in range(heads):
            for tile in range(tiles):
                listed = mark[head, tile].nonzero()[:, 0].tolist()
                ordered = sorted(listed, key=lambda block: (not clear[tile, block], block))
                assert index.blocks[head, tile].tolist() == ordered + [0] * (width - len(listed))
        assert torch.equal(index.counts, mark.sum(-1).int())
        assert torch.equal(index.clear, (mark & clear).sum(-1).int())


def test_a_list_that_is_longer_than_the_known_longest_is_an_error():
    mark, clear = random_marks(2, 3, 12, 0.7, 1)
    with pytest.raises(RuntimeError, match="out of bounds"):
        build_index(mark, clear, 16, 8, most=int(mark.sum(-1).max()) - 1)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
@pytest.mark.parametrize("heads", [1, 8])
def test_every_grouping_of_attention_heads(name, q_heads, kv_heads, heads):
    q_pos, k_pos = torch.arange(20, 60), torch.arange(60)
    q, k, v = rows(40, q_heads, 1), rows(60, kv_heads, 2), rows(60, kv_heads, 3)
    check(name, q, k, v, q_pos, k_pos, case(q_pos, k_pos, heads, 16, 8))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("q_pos", "k_pos"),
    [
        (torch.arange(40), torch.arange(40)),  # prefill
        (torch.tensor([55]), torch.arange(56)),  # decoding
        (torch.tensor([1, 4, 30, 31, 47]), torch.arange(48)),  # repair
        (torch.arange(50, 70), torch.cat([torch.arange(10), torch.arange(30, 70)])),  # after gaps
        (torch.tensor([9, 3, 30, 12]), torch.arange(31).flip(0)),  # positions decide, order does not
    ],
)
@pytest.mark.parametrize("columns", [0.0, 0.2])
def test_positions_decide_what_is_visible(name, q_pos, k_pos, columns):
    q, k, v = rows(len(q_pos), 4, 1), rows(len(k_pos), 2, 2), rows(len(k_pos), 2, 3)
    check(name, q, k, v, q_pos, k_pos, case(q_pos, k_pos, 4, 16, 4, columns=columns))


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, max_examples=15)
@given(
    count=st.integers(1, 50),
    before=st.integers(0, 40),
    tile=st.sampled_from([16, 32, 48]),
    block=st.sampled_from([1, 2, 8, 16, 64]),
    offset=st.integers(0, 15),
    share=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_any_tiles_blocks_and_offsets(name, count, before, tile, block, offset, share, seed):
    q_pos, k_pos = torch.arange(before, before + count), torch.arange(before + count)
    q, k, v = rows(count, 4, seed), rows(before + count, 2, seed + 1), rows(before + count, 2, seed + 2)
    check(name, q, k, v, q_pos, k_pos, case(q_pos, k_pos, 2, tile, block, offset, seed, share, 0.1))


@pytest.mark.parametrize("name", KERNELS)
def test_an_index_of_everything_gives_dense_attention(name):
    q_pos = k_pos = torch.arange(70)
    q, k, v = rows(70, 4, 1), rows(70, 2, 2), rows(70, 2, 3)
    index = case(q_pos, k_pos, 2, 32, 8, share=2.0)
    out, _ = KERNELS[name](q, k, v, q_pos.to(DEVICE), k_pos.to(DEVICE), index, scale=0.3)
    expected = dense(q, k, v, (k_pos[None] <= q_pos[:, None]).to(DEVICE), 0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_half_precision_is_near_single_precision(name):
    q_pos = k_pos = torch.arange(64)
    q, k, v = rows(64, 4, 1), rows(64, 2, 2), rows(64, 2, 3)
    index = case(q_pos, k_pos, 2, 32, 8, share=0.8)
    exact = reference.attend_block_sparse(q, k, v, q_pos.to(DEVICE), k_pos.to(DEVICE), index, scale=0.3)[0]
    half = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16
    low = [each.to(half) for each in (q, k, v)]
    out = KERNELS[name](*low, q_pos.to(DEVICE), k_pos.to(DEVICE), index, scale=0.3)[0]
    assert out.dtype == half
    assert (out.float() - exact).norm() < 2e-2 * exact.norm()


def test_columns_end_at_the_last_visible_key_of_a_tile():
    q_pos = k_pos = torch.arange(32)
    every = torch.ones(1, 32, dtype=torch.bool)
    nothing = torch.zeros(1, 2, 4, dtype=torch.bool)
    index = build_index(nothing, nothing[0], 16, 8, 0, every, until=torch.tensor([16, 32]))
    assert index.column_counts.tolist() == [[16, 32]]
    check("reference", rows(32, 2, 1).cpu(), rows(32, 1, 2).cpu(), rows(32, 1, 3).cpu(), q_pos, k_pos, index)


def test_the_kernel_refuses_blocks_it_cannot_read():
    at = torch.arange(12)
    index = case(at, at, 1, 16, 3)
    with pytest.raises(ValueError, match="blocks of 1, 2, 4"):
        triton_block_sparse.attend_block_sparse(
            rows(12, 2, 1), rows(12, 1, 2), rows(12, 1, 3), at, at, index, scale=1.0
        )


@pytest.mark.parametrize("count", [1, 20, 40, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_a_dense_index_gives_dense_attention(name, count):
    """Rows of a repaired context are scattered and keys are shuffled. Few rows use another tile size than many."""
    generator = torch.Generator().manual_seed(3)
    k_pos = torch.randperm(400, generator=generator)[:300]
    q_pos = k_pos[torch.randperm(300, generator=generator)[:count]].sort().values
    index = dense_index(q_pos, k_pos, 4)
    assert (index.tile, index.block) == (32, 64)
    assert dense_index(q_pos, k_pos, 7).tile == (32 if count <= 64 else 64)
    assert bool((index.counts[0, 1:] >= index.counts[0, :-1]).all())
    q, k, v = rows(count, 8, 0), rows(300, 2, 1), rows(300, 2, 2)
    out, _ = KERNELS[name](q, k, v, q_pos.to(DEVICE), k_pos.to(DEVICE), on_device(index), scale=0.3)
    mask = (k_pos[None, :] <= q_pos[:, None]).expand(8, -1, -1).to(DEVICE)
    torch.testing.assert_close(out, dense(q, k, v, mask, 0.3), rtol=0, atol=2e-5)


@pytest.mark.parametrize("columns", [0.0, 0.1])
def test_programs_share_the_list_of_few_queries_over_many_keys(columns):
    """Sharing does not change the result."""
    q_pos, k_pos = torch.arange(1500, 1503), torch.arange(1503)
    assert block_sparse_launch.count_splits(2, 1503 // 64) == 8
    index = case(q_pos, k_pos, 2, 16, 16, share=0.9, columns=columns)
    check("triton", rows(3, 4, 0), rows(1503, 2, 1), rows(1503, 2, 2), q_pos, k_pos, index)


def test_queries_that_see_nothing_of_a_shared_list_give_zero():
    q_pos, k_pos = torch.tensor([0, 1]), torch.arange(5, 1600)
    index = case(q_pos, k_pos, 1, 16, 16, share=1.0)
    check("triton", rows(2, 4, 0), rows(1595, 2, 1), rows(1595, 2, 2), q_pos, k_pos, index)


BY_ADDRESS = {"reference": reference.attend_block_sparse_at, "triton": triton_block_sparse.attend_block_sparse_at}


@pytest.mark.parametrize("name", BY_ADDRESS)
@pytest.mark.parametrize("layer", [0, 1])
def test_rows_that_are_found_by_address(name, layer):
    """The cache has capacity behind its rows. The last request gives the number of rows; the first request has another
    cache."""
    generator, shape, held = torch.Generator().manual_seed(3), Shape(2, 8, 2, 16), 299
    stores = [[rows(340, 2, 10 * i + side) for i in range(2)] for side in (0, 1)]
    other = rows(9, 2, 7)
    addresses = [[[other.data_ptr(), each.data_ptr()] for each in side] for side in stores]
    table = torch.tensor([*addresses, [[3, held]] * 2], device=DEVICE)
    pointers = CachePointers(table, *([[other, each] for each in side] for side in stores))
    k_pos = torch.randperm(400, generator=generator)[: held + 1]
    q_pos = torch.cat([torch.tensor([-1, -1]), k_pos[torch.randperm(300, generator=generator)[:30]]])
    index, q = dense_index(q_pos, k_pos, 4), rows(32, 8, 0)
    padding = torch.full((30,), 2**31 - 1)
    at = torch.cat([k_pos, padding]).to(DEVICE)
    found = BY_ADDRESS[name](q, pointers, layer, shape, q_pos.to(DEVICE), at, on_device(index), scale=0.3)
    mask = (k_pos[None, :] <= q_pos[:, None]).expand(8, -1, -1).to(DEVICE)
    expected_out = dense(q, *(side[layer][: held + 1] for side in stores), mask, 0.3).nan_to_num(0.0)
    assert bool((found[:2] == 0).all())
    torch.testing.assert_close(found, expected_out, rtol=0, atol=2e-5)


HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "heads", "tile", "offset", "form"),
    [
        (16, 4, 1, 32, 0, (32, 4)),
        (16, 4, 1, 48, 5, (32, 4)),  # the second half of a tile has 16 rows
        (16, 4, 4, 64, 0, (32, 4)),  # an index for each kv head
        (16, 8, 2, 64, 40, (64, 2)),
        (14, 2, 1, 64, 0, (64, 1)),
        (16, 4, 16, 128, 9, (128, 1)),  # an index for each query head
    ],
)
@pytest.mark.parametrize("shuffled", [False, True])
def test_whole_blocks_that_the_copy_engine_reads(q_heads, kv_heads, heads, tile, offset, form, shuffled, monkeypatch):
    """Tiles of many rows over blocks of 64 keys with a shorter last block, in order of positions and shuffled."""
    monkeypatch.setattr(triton_block_sparse_tma, "PROGRAMS", 0)  # few rows are enough for the test
    generator = torch.Generator().manual_seed(4)
    k_pos = torch.randperm(230, generator=generator) if shuffled else torch.arange(230)
    q_pos = torch.cat([torch.tensor([0]), torch.randperm(230, generator=generator)[:139].sort().values])
    index = case(q_pos, k_pos, heads, tile, 64, offset, share=0.7)
    q, k, v = (
        rows(n, h, i, 64).to(HALF) for i, (n, h) in enumerate([(140, q_heads), (230, kv_heads), (230, kv_heads)])
    )
    index = replace(index, columns=None, column_counts=None, taken=None)
    found = triton_block_sparse_tma.tile_shape(q, k, index)
    assert (found.rows, found.fold) == form
    positions = [each.to(DEVICE, torch.int32) for each in (q_pos, k_pos)]
    out, lse = triton_block_sparse_tma.attend_block_sparse(q, k, v, *positions, index, scale=0.3)
    exact = reference.attend_block_sparse(
        *(x.float() for x in (q, k, v)), q_pos.to(DEVICE), k_pos.to(DEVICE), index, scale=0.3
    )
    assert out.dtype == HALF
    assert (out.float() - exact[0]).norm() < 5e-3 * exact[0].norm()
    blind = exact[1] == -math.inf
    torch.testing.assert_close(lse, exact[1], rtol=0, atol=5e-3)
    assert bool((out[blind] == 0).all())


def test_inputs_that_the_copy_engine_cannot_read_are_refused():
    """These are other blocks, columns, single precision and few rows."""
    q_pos = k_pos = torch.arange(2100)
    q, k = rows(2100, 16, 0, 64).to(HALF), rows(2100, 4, 1, 64).to(HALF)
    index = dense_index(q_pos, k_pos, 4)
    assert triton_block_sparse_tma.tile_shape(q, k, index) is not None
    few = dense_index(q_pos[-200:], k_pos, 4)
    for q_of, index_of in (
        (q.float(), index),
        (q[-200:], few),
        (q, case(q_pos, k_pos, 1, 32, 32)),
        (q, case(q_pos, k_pos, 1, 32, 64, columns=0.5)),
    ):
        assert triton_block_sparse_tma.tile_shape(q_of, k, index_of) is None
    with pytest.raises(ValueError, match="blocks of 64 keys"):
        triton_block_sparse_tma.attend_block_sparse(q[-200:], k, k, q_pos[-200:], k_pos, few, scale=1.0)


@pytest.mark.parametrize("sizes", [(3, 5, 1), (4, 8, 2), (1, 1, 1)])
def test_copied_tensors_are_aligned(sizes):
    """Triton compiles another kernel for tensors that do not begin at multiples of 16 bytes."""
    parts = [torch.arange(size).int().view(1, -1) for size in sizes]
    sent = copy_to_device(parts, torch.device(DEVICE))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(sent, parts, strict=True))
    assert all(each.data_ptr() % 16 == sent[0].data_ptr() % 16 for each in sent)


def test_an_index_is_copied_to_another_device_only():
    index = torch.arange(5)
    assert index_to_device(index, torch.device("cpu")) is index
    sent = index_to_device(index, torch.device(DEVICE))
    assert (sent.device.type, sent.tolist()) == (DEVICE, index.tolist())
    assert index_to_device(sent, sent.device) is sent


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_another_number_of_rows_or_keys_compiles_no_kernel():
    def compiled_kernels():
        kernels = (triton_block_sparse._attend, triton_block_sparse._merge, triton_block_sparse_tma._attend)
        return [sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in kernels]

    def attend_last(count, held):
        plan = plan_mask(torch.arange(held - count, held), torch.arange(held), torch.device(DEVICE), 4)
        q, k, v = (rows(n, h, i, 64).to(HALF) for i, (n, h) in enumerate([(count, 32), (held, 8), (held, 8)]))
        attend_planned(q, k, v, plan, scale=0.3)

    attend_last(1100, 2048), attend_last(100, 200), attend_last(30, 64 * 64)
    before = compiled_kernels()
    for count, held in ((1136, 2049), (1101, 1777), (101, 207), (96, 193), (31, 4000), (29, 4097)):
        attend_last(count, held)
    assert compiled_kernels() == before


class OnGpu:
    """Queries that claim to be on a GPU."""

    is_cuda, dtype = True, torch.float32


def test_queries_on_a_gpu_run_the_triton_kernel(monkeypatch):
    calls = []
    for name in ("attend_block_sparse", "attend_block_sparse_at"):
        monkeypatch.setattr(triton_block_sparse, name, lambda *args, name=name, **_: calls.append((name, len(args))))
    block_sparse.attend_block_sparse(OnGpu(), None, None, None, None, None, scale=1.0)
    block_sparse.attend_block_sparse_at(OnGpu(), None, 0, None, None, None, None, scale=1.0)
    assert calls == [("attend_block_sparse", 6), ("attend_block_sparse_at", 7)]


def on_device(index):
    """Return the same index on the test device."""
    moved = {name: getattr(index, name).to(DEVICE) for name in ("blocks", "counts", "clear")}
    return replace(index, **moved)
