"""Counts of query-key pairs: how many attention computes, how many causality allows, how many of those are read.

A pair is a query row of one attention head and a key that is not after it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.kernels.attention import index_to_device
from ragkv.kernels.block_index import BlockSparseIndex


def causal_pairs(q_pos: Tensor, k_pos: Tensor) -> int:
    """Count the pairs of one attention head that causality allows."""
    return int(torch.searchsorted(k_pos.sort().values, q_pos, right=True).sum())


def appended_pairs(present: int, rows: int, attending: int) -> int:
    """Count the pairs of one attention head where the last `attending` of `rows` rows attend, after `present` keys."""
    return attending * (present + rows) - attending * (attending - 1) // 2


def indexed_pairs(index: BlockSparseIndex, q: Tensor) -> Tensor:
    """Count the query-key pairs that are computed for q [T, Hq, d], over all attention heads.

    Whole tiles are computed against whole blocks. Pairs inside a listed block that causality hides are counted, too.
    """
    keys = index.counts.long() * index.block
    if index.column_counts is not None:
        keys = keys + index.column_counts
    # All tiles are full but the first and the last one. Their rows are no tensor, which would have to be copied.
    missing = index.counts.shape[1] * index.tile - index.offset - q.shape[0]
    pairs = index.tile * keys.sum() - index.offset * keys[:, 0].sum() - missing * keys[:, -1].sum()
    return pairs * (q.shape[1] // index.counts.shape[0])


class VisiblePairs:
    """Counts the pairs that an index reads, for rows and keys at given positions.

    Attributes:
        q_pos: Ascending positions [T] of the rows, on the CPU.
        k_pos: Positions [n] of the keys, on the CPU.
    """

    def __init__(self, q_pos: Tensor, k_pos: Tensor):
        self.q_pos, self.k_pos = q_pos, k_pos
        # A row sees a key from this row on.
        self._sees_from = torch.searchsorted(q_pos, k_pos)
        self._shares: dict[tuple[int, int, int], Tensor] = {}

    def matches(self, q_pos: Tensor, k_pos: Tensor) -> bool:
        """Return whether rows and keys are at the same positions."""
        return torch.equal(self.q_pos, q_pos) and torch.equal(self.k_pos, k_pos)

    def read(self, index: BlockSparseIndex, q_heads: int) -> Tensor:
        """Count the visible pairs [] int64 that `index` reads, over all attention heads."""
        shape = index.tile, index.block, index.offset
        share = self._shares.get(shape)
        if share is None:
            share = self._per_block(*shape)
        share = self._shares[shape] = index_to_device(share, index.blocks.device)
        listed = share.expand(index.blocks.shape[0], -1, -1).gather(2, index.blocks.long())
        valid = torch.arange(index.blocks.shape[2], device=listed.device) < index.counts[..., None]
        pairs = (listed * valid).sum()
        if index.columns is not None:
            pairs = pairs + self._in_columns(index)
        return pairs * (q_heads // index.counts.shape[0])

    def _tiles(self, tile: int, offset: int) -> tuple[Tensor, Tensor]:
        """Return the first row and the row behind the last one [S] of each tile."""
        count = self.q_pos.shape[0]
        begin = torch.arange(-offset, count, tile)
        return begin.clamp(min=0), (begin + tile).clamp(max=count)

    def _seen(self, start: Tensor, stop: Tensor, sees_from: Tensor) -> Tensor:
        """Count the rows in [start, stop) that see keys; all arguments broadcast."""
        return (stop - torch.maximum(start, sees_from)).clamp(min=0)

    def _per_block(self, tile: int, block: int, offset: int) -> Tensor:
        """Count the visible pairs [S, B] int64 of each tile and block, for one attention head."""
        start, stop = (each[:, None] for each in self._tiles(tile, offset))
        padding = -self.k_pos.shape[0] % block
        from_row = F.pad(self._sees_from, (0, padding), value=self.q_pos.shape[0]).view(-1, block)
        keys = torch.full((from_row.shape[0],), block)
        keys[-1] -= padding
        least, most = from_row[:, : block - padding].amin(1), from_row.amax(1)
        least[:-1] = from_row[:-1].amin(1)
        most[-1] = from_row[-1, : block - padding].amax()
        pairs = (stop - start) * keys * (most <= start)
        mixed = (most > start) & (least < stop)
        s, b = mixed.nonzero(as_tuple=True)
        pairs[s, b] = self._seen(start[s], stop[s], from_row[b]).sum(1)
        return pairs

    def _in_columns(self, index: BlockSparseIndex) -> Tensor:
        """Count the visible pairs in columns outside of the listed blocks, one query head of every group."""
        assert index.columns is not None
        assert index.column_counts is not None
        assert index.taken is not None
        start, stop = self._tiles(index.tile, index.offset)
        pairs = torch.zeros((), dtype=torch.int64)
        most = index.column_counts.amax(1).tolist()
        taken, counts = index.taken.cpu(), index.column_counts.cpu()
        for head, columns in enumerate(index.columns.long().cpu()):
            columns = columns[: most[head]]
            seen = self._seen(start[:, None], stop[:, None], self._sees_from[columns])
            listed = torch.arange(len(columns)) < counts[head][:, None]
            pairs += (seen * (listed & ~taken[head][:, columns // index.block])).sum()
        return pairs.to(index.blocks.device)
