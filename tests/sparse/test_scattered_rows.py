"""Repaired rows and a question over a stitched context: tiles of scattered rows, what they read, and its count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.kernels.attention import attend
from ragkv.sparse.critiprefill import CritiPrefill
from ragkv.sparse.loopserve import LoopServe
from ragkv.sparse.pairs import VisiblePairs, indexed_pairs
from ragkv.sparse.prefill import PassPositions, SparsePrefill
from ragkv.sparse.tiles import LEAST_ROWS, query_tiles, scattered_size


def rows(count, heads, seed, d=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, heads, d, generator=generator, dtype=torch.float64)


def stitched(chunks, tokens, repaired, question, seed=0):
    """Positions of repaired rows with a question behind them, and of keys in the order of a shuffled cache."""
    total = chunks * tokens
    again = [chunk * tokens + i for chunk in range(1, chunks) for i in range(repaired)]
    q_pos = torch.tensor([*again, *range(total, total + question)])
    blocks = torch.arange(total).view(-1, 16)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
    return q_pos, torch.cat([blocks[order].flatten(), torch.arange(total, total + question)])


def test_consecutive_rows_are_counted_from_position_0():
    tiles = query_tiles(torch.arange(5, 21), 8)
    assert (tiles.size, tiles.offset) == (8, 5)
    assert (tiles.starts.tolist(), tiles.first.tolist(), tiles.last.tolist()) == ([0, 8, 16], [5, 8, 16], [7, 15, 20])


def test_scattered_rows_have_smaller_tiles_that_span_as_much():
    q_pos, _ = stitched(6, 512, 32, 40)
    tiles = query_tiles(q_pos, 256)
    assert tiles.size == scattered_size(256, len(q_pos), int(q_pos[-1] - q_pos[0]) + 1) == LEAST_ROWS
    assert tiles.first[:3].tolist() == [512, 528, 1024]
    assert tiles.last[:3].tolist() == [527, 543, 1039]
    assert tiles.last[-1] == q_pos[-1]


def everything(policy, chunks=4):
    q_pos, k_pos = stitched(chunks, 64, 24, 20)
    q, k, v = rows(len(q_pos), 8, 1), rows(len(k_pos), 2, 2), rows(len(k_pos), 2, 3)
    sparse = SparsePrefill(policy.start(), None)
    for layer in range(2):
        out = sparse(layer, q, k, v, q_pos, k_pos, scale=0.3)
    return out, attend(q, k, v, q_pos, k_pos, scale=0.3), sparse


@pytest.mark.parametrize("policy", [CritiPrefill(32, 8, 4096), LoopServe(alpha=1 - 1e-12, tile=16, dense=1.0)])
def test_a_policy_that_keeps_everything_gives_dense_attention(policy):
    out, exact, sparse = everything(policy)
    torch.testing.assert_close(out, exact, rtol=0, atol=1e-12)
    assert sparse.pairs_read == sparse.dense_pairs
    assert sparse.selected


@pytest.mark.parametrize("policy", [CritiPrefill(32, 8, 16), LoopServe(alpha=0.8, tile=16, sample=16)])
def test_scattered_rows_and_the_question_read_less(policy):
    """Every row attends to itself and to a key in the first chunk."""
    q_pos, k_pos = stitched(4, 64, 24, 20)
    k, v = torch.nn.functional.normalize(rows(len(k_pos), 4, 2, d=64), dim=-1), rows(len(k_pos), 4, 3, d=64)
    at = k_pos.argsort()
    q = 40 * (k[at[q_pos]] + k[at[20]])
    sparse = SparsePrefill(policy.start(), None)
    for layer in range(2):
        out = sparse(layer, q, k, v, q_pos, k_pos, scale=0.3)
    assert sparse.selected
    assert sparse.pairs_read < 0.9 * sparse.dense_pairs
    if isinstance(policy, LoopServe):
        exact = attend(q, k, v, q_pos, k_pos, scale=0.3)
        assert (out - exact).norm() < 0.2 * exact.norm()


class Spied:
    """A state that keeps the indexes it returns."""

    def __init__(self, state):
        self.state, self.indexes = state, []

    def select(self, *args, **kwargs):
        self.indexes.append(self.state.select(*args, **kwargs))
        return self.indexes[-1]


def counted(index, q_pos, k_pos, q_heads):
    """Pairs of an index, key by key."""
    heads, share = index.counts.shape[0], q_heads // index.counts.shape[0]
    total = 0
    for head in range(heads):
        for row, position in enumerate(q_pos.tolist()):
            keys = index.keys(head, (row + index.offset) // index.tile, len(k_pos))
            assert len(set(keys.tolist())) == len(keys)
            total += share * int((k_pos[keys] <= position).sum())
    return total


def computed(index, count, q_heads):
    """Pairs of whole tiles with whole blocks and columns, row by row."""
    tiles = [(row + index.offset) // index.tile for row in range(count)]
    columns = 0 if index.column_counts is None else index.column_counts
    keys = index.counts * index.block + columns
    return sum(int(keys[:, tile].sum()) for tile in tiles) * (q_heads // len(keys))


def test_layers_with_the_same_positions_share_one_copy_on_a_device():
    q_pos, k_pos = stitched(3, 16, 4, 5)
    positions = PassPositions(VisiblePairs(q_pos, k_pos), 1, True)
    assert positions.on_device(torch.device("cpu")) == (q_pos, k_pos)
    other = torch.device("meta")
    first, second = positions.on_device(other), positions.on_device(other)
    assert all(one is same for one, same in zip(first, second, strict=True))
    for copy, position in zip(first, (q_pos, k_pos), strict=True):
        assert (copy.shape, copy.dtype, copy.device) == (position.shape, torch.int32, other)


@settings(max_examples=25, deadline=None)
@given(
    chunks=st.integers(2, 6),
    repaired=st.integers(0, 40),
    question=st.integers(2, 30),
    start=st.integers(0, 30),
    lines=st.booleans(),
    seed=st.integers(0, 99),
)
def test_pairs_are_counted_exactly(chunks, repaired, question, start, lines, seed):
    q_pos, k_pos = stitched(chunks, 48, repaired, question, seed)
    q_pos = q_pos[min(start, len(q_pos) - 2) :]
    q, k, v = rows(len(q_pos), 4, seed), rows(len(k_pos), 2, seed + 1), rows(len(k_pos), 2, seed + 2)
    policy = LoopServe(alpha=0.5, tile=16, sample=16) if lines else CritiPrefill(32, 8, 16, skip=0)
    spied = Spied(policy.start())
    sparse = SparsePrefill(spied, None)
    sparse(0, q, k, v, q_pos, k_pos, scale=0.3)
    dense = 4 * sum(int((k_pos <= position).sum()) for position in q_pos.tolist())
    index = spied.indexes[0]
    assert sparse.dense_pairs == dense
    assert sparse.pairs_read == (dense if index is None else counted(index, q_pos, k_pos, 4))
    if index is not None:
        assert int(indexed_pairs(index, q)) == computed(index, len(q_pos), 4)


@pytest.mark.parametrize("policy", [CritiPrefill(32, 8, 16), CritiPrefill(32, 8, 32, skip=0)])
def test_no_row_learns_from_later_keys(policy):
    q_pos, k_pos = stitched(5, 64, 24, 20)
    q, k, v = rows(len(q_pos), 4, 1), rows(len(k_pos), 2, 2), rows(len(k_pos), 2, 3)
    later = k_pos > 150
    changed = k + 9 * later[:, None, None]
    outs = []
    for keys in (k, changed):
        sparse = SparsePrefill(policy.start(), None)
        outs.append([sparse(layer, q, keys, v, q_pos, k_pos, scale=0.3) for layer in range(2)])
    early = query_tiles(q_pos, 32).last.repeat_interleave(query_tiles(q_pos, 32).size)[: len(q_pos)] <= 150
    assert early.any()
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one[early], other[early])
