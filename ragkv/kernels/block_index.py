"""Which keys each tile of queries reads in block-sparse attention.

    tile     consecutive query rows that share one list of keys; row r belongs to tile (r + offset) // tile
    block    consecutive key rows (slots of the cache) that are read together
    column   a single key row

An index says which keys are read. Positions decide which of them are visible, so an index may list blocks that reach
past the queries of their tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_QUERIES = 64
"""Query rows up to which `dense_index` uses the small tile, for example a question or a single token."""
KEYS = 64
"""Key rows per block in a dense index."""
TILE, SMALL_TILE = 64, 32
"""Query rows per tile in a dense index, for many and for few queries."""


@dataclass(frozen=True)
class BlockSparseIndex:
    """Keys that each tile of queries reads, for H groups of query heads.

    Query head h uses group h // (Hq // H). `columns`, `column_counts` and `taken` are given together or not at all.

    Attributes:
        tile: query rows of a tile.
        block: key rows of a block.
        blocks: [H, S, M] int32. Block numbers of a tile; the first counts[h, s] of them are valid.
        counts: [H, S] int32. Number of blocks of a tile.
        clear: [H, S] int32. The first clear[h, s] blocks of a tile are full and visible to each of its queries. This is
            a lower bound: blocks behind them may be visible, too.
        offset: rows that are missing at the start of the first tile.
        columns: [H, C] int32. Key rows that tiles read in addition to their blocks.
        column_counts: [H, S] int32. A tile reads the first column_counts[h, s] columns.
        taken: [H, S, B] bool. The blocks that a tile lists, so that no key is read twice.
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
        """Return the key rows [m] int64 that a tile reads from a cache of `rows` rows."""
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
    most: int | None = None,
) -> BlockSparseIndex:
    """Build an index from boolean masks.

    With `most` and without columns, the host does not wait for the device of the masks.

    Args:
        mark: [H, S, B] bool. The blocks that a tile reads.
        clear: [S, B] bool. Full blocks that every query of a tile sees.
        tile: query rows of a tile.
        block: key rows of a block.
        offset: rows that are missing at the start of the first tile.
        columns: [H, n] bool. Single key rows to read in addition.
        until: [S]. One past the last key row that a tile may see. Give it only where key rows are in the order of
            their positions.
        most: no tile reads more blocks. The kernels divide their work by it, so it should be the length of the longest
            list, which None reads from the device. A smaller number is an error.
    """
    blocks, counts, clear_counts = _compact(mark, mark & clear, most)
    if columns is None or not bool(columns.any()):
        return BlockSparseIndex(tile, block, blocks, counts, clear_counts, offset)
    numbers, totals, _ = _compact(columns, columns, None)
    if until is None:
        visible = totals[:, None].expand(-1, mark.shape[1])
    else:
        visible = columns.cumsum(1, dtype=torch.int32)[:, (until - 1).to(columns.device)]
    return BlockSparseIndex(tile, block, blocks, counts, clear_counts, offset, numbers, visible.contiguous(), mark)


def dense_index(q_pos: Tensor, k_pos: Tensor, group: int) -> BlockSparseIndex:
    """Build an index, on the CPU, of all keys that positions make visible. Rows and keys may be in any order.

    Args:
        q_pos: [T] int64.
        k_pos: [n] int64.
        group: query heads that read the same key/value head. Where a kernel program handles four of them, half as many
            rows per tile are enough, and a tile lists fewer blocks that only some of its rows see.
    """
    tile = SMALL_TILE if q_pos.shape[0] <= FEW_QUERIES or group % 4 == 0 else TILE
    first, last = extremes(q_pos, tile)
    earliest, latest = extremes(k_pos, KEYS)
    full = torch.arange(latest.shape[0]) < k_pos.shape[0] // KEYS
    mark = earliest[None, :] <= last[:, None]
    return build_index(mark[None], (latest[None, :] <= first[:, None]) & full, tile, KEYS)


def clear_blocks(q_pos: Tensor, k_pos: Tensor, tile: int, block: int, offset: int) -> Tensor:
    """Return bool [S, B]: blocks that are full and have no key after the first query of a tile."""
    firsts = torch.arange(-offset, q_pos.shape[0], tile).clamp(min=0)
    full = k_pos.shape[0] // block
    latest = torch.full((-(-k_pos.shape[0] // block),), torch.iinfo(torch.int64).max)
    latest[:full] = k_pos[: full * block].view(full, block).amax(1)
    return latest[None, :] <= q_pos[firsts][:, None]


def extremes(positions: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the (earliest, latest) position [B] in every block of rows."""
    padding = -positions.shape[0] % block
    low = F.pad(positions, (0, padding), value=int(positions.max())).view(-1, block)
    high = F.pad(positions, (0, padding), value=0).view(-1, block)
    return low.amin(1), high.amax(1)


def _compact(mark: Tensor, leading: Tensor, most: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Turn masks [..., n] into lists of numbers.

    Args:
        mark: the entries to list.
        leading: those of them that come first.
        most: no list is longer. None asks the device for the longest.

    Returns:
        The numbers of marked entries [..., M] int32, padded with 0: those of `leading` first, each part ascending;
        their count [...] int32; the count of the leading ones [...] int32.
    """
    counts, leading_counts = (each.sum(-1, dtype=torch.int32) for each in (mark, leading))
    width = max(1, int(counts.max()) if most is None else most)
    within = leading.cumsum(-1, dtype=torch.int32)
    behind = mark.cumsum(-1, dtype=torch.int32).sub_(within).add_(leading_counts[..., None])
    # Ranks begin at 1. Entries without a mark go to column 0, which is dropped: selecting the others would make the
    # host wait for their number.
    rank = torch.where(leading, within, behind).mul_(mark).long()
    entries = torch.arange(mark.shape[-1], dtype=torch.int32, device=mark.device).expand(mark.shape)
    numbers = torch.zeros(*mark.shape[:-1], 1 + width, dtype=torch.int32, device=mark.device)
    numbers.scatter_(-1, rank, entries)
    # A copy also of a single list: a view of it would not be aligned (see `attention.copy_to_device`).
    return numbers[..., 1:].clone(memory_format=torch.contiguous_format), counts, leading_counts
