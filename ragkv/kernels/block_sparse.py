"""Attention over lists of keys: each tile of queries reads its own blocks and columns, and nothing else.

    tile     consecutive query rows that share a list; row r is in tile (r + offset) // tile
    block    consecutive key rows (slots of the cache) that are read together
    column   a single key row

A list says what is read; what is visible among it is decided by positions, as everywhere. So a list may hold blocks
that reach past its queries. The reference gathers list by list, so it too computes no more than what is listed; on a
GPU its Triton twin takes its place (`triton_block_sparse.py`): one signature, one parametrised test.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.kernels.decode_step import CachePointers
from ragkv.types import Shape


@dataclass(frozen=True)
class BlockSparseIndex:
    """Which keys each tile of queries reads, for H lists of attention heads; query head h uses list h // (Hq // H).

    blocks [H, S, M] int32: block numbers of a tile, the first counts[h, s] of them · counts [H, S] int32 · clear [H, S]
    int32: so many of them, the first ones, are full and visible to every query of the tile, as far as is known ·
    tile, block: rows · offset: rows that the first tile lacks at its start
    columns [H, C] int32: key rows that tiles read beside their blocks; None: none · column_counts [H, S] int32: a tile
    reads the first so many · taken [H, S, B] bool: which blocks are listed, so that no key is read twice; both are
    given with columns
    """

    tile: int
    block: int
    blocks: Tensor
    counts: Tensor
    clear: Tensor
    offset: int = 0
    columns: Tensor | None = None
    column_counts: Tensor | None = None
    taken: Tensor | None = None

    def keys(self, head: int, tile: int, rows: int) -> Tensor:
        """Key rows [m] int64 that a tile reads, out of `rows`."""
        blocks = self.blocks[head, tile, : int(self.counts[head, tile])].long()
        keys = (blocks[:, None] * self.block + torch.arange(self.block, device=blocks.device)).flatten()
        keys = keys[keys < rows]
        if self.columns is None or self.column_counts is None or self.taken is None:
            return keys
        columns = self.columns[head, : int(self.column_counts[head, tile])].long()
        return torch.cat([keys, columns[~self.taken[head, tile, columns // self.block]]])


def build_index(
    mark: Tensor,
    clear: Tensor,
    tile: int,
    block: int,
    offset: int = 0,
    columns: Tensor | None = None,
    until: Tensor | None = None,
) -> BlockSparseIndex:
    """Lists of what is marked.

    mark [H, S, B] bool: which blocks a tile reads · clear [S, B] bool: full blocks that every query of a tile sees ·
    columns [H, n] bool: single keys beside them · until [S]: the key row behind the last one that a tile may see, where
    key rows stand in the order of their positions; None: they do not
    """
    blocks, counts, ahead = _compact(mark, mark & clear)
    if columns is None or not bool(columns.any()):
        return BlockSparseIndex(tile, block, blocks, counts, ahead, offset)
    singles, each, _ = _compact(columns, columns)
    if until is None:
        shown = each[:, None].expand(-1, mark.shape[1])
    else:
        shown = columns.cumsum(1, dtype=torch.int32)[:, (until - 1).to(columns.device)]
    return BlockSparseIndex(tile, block, blocks, counts, ahead, offset, singles, shown.contiguous(), mark)


FEW = 64
"""Queries of a question, say, or of one token."""
KEYS = 64
"""Keys that are read together where everything visible is."""
TILE, TILE_OF_FEW = 64, 32
"""Queries that read them together, of many and of few."""


def dense_index(q_pos: Tensor, k_pos: Tensor, alike: int) -> BlockSparseIndex:
    """Lists of all that positions let each tile see, on the CPU; rows and keys in any order.

    alike: query heads that read the same keys. Where a program does four of them, half as many rows are enough, and
    their lists hold less that only some of them see.
    """
    tile = TILE_OF_FEW if q_pos.shape[0] <= FEW or alike % 4 == 0 else TILE
    first, last = extremes(q_pos, tile)
    earliest, latest = extremes(k_pos, KEYS)
    full = torch.arange(latest.shape[0]) < k_pos.shape[0] // KEYS
    mark = earliest[None, :] <= last[:, None]
    return build_index(mark[None], (latest[None, :] <= first[:, None]) & full, tile, KEYS)


def clear_blocks(q_pos: Tensor, k_pos: Tensor, tile: int, block: int, offset: int) -> Tensor:
    """bool [S, B]: blocks of `block` key rows that are full and not after the first query of a tile."""
    firsts = torch.arange(-offset, q_pos.shape[0], tile).clamp(min=0)
    full = k_pos.shape[0] // block
    latest = torch.full((-(-k_pos.shape[0] // block),), torch.iinfo(torch.int64).max)
    latest[:full] = k_pos[: full * block].view(full, block).amax(1)
    return latest[None, :] <= q_pos[firsts][:, None]


def extremes(positions: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(earliest, latest) [B] position in every block of cache rows."""
    lacking = -positions.shape[0] % block
    low = F.pad(positions, (0, lacking), value=int(positions.max())).view(-1, block)
    high = F.pad(positions, (0, lacking), value=0).view(-1, block)
    return low.amin(1), high.amax(1)


def attend_block_sparse(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, index: BlockSparseIndex, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of q [T, Hq, d] to the listed ones of k, v [n, Hkv, d] that are not after them.

    q_pos [T], k_pos [n] int64. Returns out [T, Hq, d] and the log-sum-exp [T, Hq], natural logarithm, float32 at least.
    A query that sees none of what is listed gives 0 and -inf. On a GPU the Triton twin runs.
    """
    if q.is_cuda and q.dtype != torch.float64:
        return attend_block_sparse(q, k, v, q_pos, k_pos, index, scale=scale)
    return reference(q, k, v, q_pos, k_pos, index, scale=scale)


def attend_block_sparse_at(
    q: Tensor,
    pointers: CachePointers,
    layer: int,
    shape: Shape,
    q_pos: Tensor,
    k_pos: Tensor,
    index: BlockSparseIndex,
    *,
    scale: float,
) -> Tensor:
    """As `attend_lists`, over the rows of a layer that the last request of `places` holds, the new one included: so for
    rows that are found by address. k_pos may be longer than that. Returns out [T, Hq, d]."""
    if q.is_cuda and q.dtype != torch.float64:
        return attend_block_sparse_at(q, pointers, layer, shape, q_pos, k_pos, index, scale=scale)
    rows = int(pointers.table[2, layer, -1]) + 1
    k, v = (store[layer][-1][:rows] for store in (pointers.k, pointers.v))
    return reference(q, k, v, q_pos, k_pos[:rows], index, scale=scale)[0]


def reference(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, index: BlockSparseIndex, *, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend_lists` in torch, one list after another."""
    from ragkv.kernels.attention import attend_lse

    heads, tiles = index.counts.shape
    share, group = q.shape[1] // heads, q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"))
    for head in range(heads):
        asking = slice(head * share, (head + 1) * share)
        asked = slice(asking.start // group, (asking.stop - 1) // group + 1)
        for tile in range(tiles):
            rows = slice(max(0, tile * index.tile - index.offset), (tile + 1) * index.tile - index.offset)
            keys = index.keys(head, tile, k.shape[0])
            keys = keys[k_pos[keys] <= q_pos[rows].max()]
            out[rows, asking], lse[rows, asking] = attend_lse(
                q[rows, asking], k[keys, asked], v[keys, asked], q_pos[rows], k_pos[keys], scale=scale
            )
    return out, lse


def _compact(mark: Tensor, ahead: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """bool [..., n], twice -> (numbers of the marked ones [..., M] int32, those of `ahead` first, each part ascending,
    padded with 0; how many [...] int32; how many of them are `ahead` [...] int32)."""
    counts, leading = (each.sum(-1, dtype=torch.int32) for each in (mark, ahead))
    at = mark.nonzero(as_tuple=True)
    numbers = torch.zeros(*mark.shape[:-1], max(1, int(counts.max())), dtype=torch.int32, device=mark.device)
    within = ahead.cumsum(-1, dtype=torch.int32)
    behind = mark.cumsum(-1, dtype=torch.int32) - within + leading[..., None]
    rank = torch.where(ahead, within, behind)[at].long() - 1
    numbers[(*at[:-1], rank)] = at[-1].int()
    return numbers, counts, leading
