"""Blocks of a growing cache: their digests, which blocks every step reads, and how the other blocks are gathered.

    block b    rows [b*size, (b+1)*size) of the cache, in slot order; it is full once all its rows are there
    digest     a box [center - radius, center + radius] per full block and kv head, over its rotated keys
    near       rows that every step reads: the blocks with the earliest positions (attention sinks), and the block that
               holds the last row, with all rows after it
    middle     all other blocks: they are full, have a digest, and are ranked

The score of a box is the sum over dimensions of max(q·high, q·low). This equals q·center + |q|·radius: it takes one
product, and it is linear in (q, |q|), so the mean score of the query heads of a group is the score of their means.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ragkv.sparse.attention import score_dtype

BoxFunction = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps keys [B, size, Hkv, d] to center and radius [B, Hkv, d]."""


def cuboid(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ArkVale's box: the middle of the extremes, and the mean distance of the keys from it.

    Its score is not an upper bound.
    """
    center = (keys.amax(1) + keys.amin(1)) / 2
    return center, (keys - center[:, None]).abs().mean(1)


def bounding_box(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Quest's box, which contains every key: its score is at least the score of the best key inside."""
    high, low = keys.amax(1), keys.amin(1)
    return (high + low) / 2, (high - low) / 2


class BlockDigests:
    """Digests and sink blocks of one layer of one request.

    Attributes:
        size: Rows per block.
        full: Number of full blocks.
        sinks: Numbers of the sink blocks, ascending.
    """

    def __init__(self, size: int, sinks: int, box: BoxFunction | None):
        """Create digests without blocks.

        Args:
            size: Rows per block.
            sinks: How many blocks with the earliest positions are sinks.
            box: Computes the digests; None if blocks are ranked without digests.
        """
        self.size, self._sink_count, self._box = size, sinks, box
        self.full = 0
        self.sinks = torch.empty(0, dtype=torch.int64)
        self._digests: Tensor | None = None

    def update(self, k: Tensor, k_pos: Tensor) -> None:
        """Add the blocks of k [n, Hkv, d] at k_pos [n] that have become full."""
        full = k.shape[0] // self.size
        if full == self.full:
            return
        if self._box is not None:
            keys = k[self.full * self.size : full * self.size].unflatten(0, (-1, self.size)).to(score_dtype(k.dtype))
            self._append(torch.cat(self._box(keys), dim=-1).transpose(0, 1), full)
        if len(self.sinks) < self._sink_count:
            earliest = k_pos[: full * self.size].view(full, self.size).amin(1)
            self.sinks = earliest.argsort()[: self._sink_count].sort().values.to(k.device)
        self.full = full

    def _append(self, new: Tensor, full: int) -> None:
        """Append digests. Spare capacity avoids a copy of all digests when a block becomes full while decoding."""
        old = self._digests
        if old is None or old.shape[1] < full:
            self._digests = new.new_empty(new.shape[0], full + max(16, full // 4), new.shape[2])
            if old is not None:
                self._digests[:, : self.full] = old[:, : self.full]
        assert self._digests is not None
        self._digests[:, self.full : full] = new

    def scores(self, q: Tensor) -> Tensor:
        """Score the full blocks for q [Hkv, g, d].

        Returns:
            [Hkv, full], the mean over the group of sum_d max(q·high, q·low), without softmax scale.
        """
        if self._digests is None:  # no block is full yet
            return q.new_zeros(q.shape[0], 0)
        query = torch.cat([q, q.abs()], dim=-1).mean(1).to(self._digests.dtype)
        return torch.einsum("hbd,hd->hb", self._digests[:, : self.full], query)

    def tail(self, rows: int) -> int:
        """Return the block that holds the last of `rows` rows. All rows from its start on are near."""
        return (rows - 1) // self.size

    def rank(self, scores: Tensor, tail: int) -> Tensor:
        """Sort the middle blocks [Hkv, M] by scores [Hkv, >= tail], best first."""
        sinks = self.sinks[self.sinks < tail]
        scores = scores[:, :tail].index_fill(1, sinks, float("-inf"))
        order: Tensor = scores.argsort(dim=1, descending=True, stable=True)
        return order[:, : tail - len(sinks)]

    def near_rows(self, x: Tensor, tail: int) -> Tensor:
        """Return the near rows [m, Hkv, d] of x [n, Hkv, d]."""
        sinks = [x[b * self.size : (b + 1) * self.size] for b in self.sinks.tolist() if b < tail]
        return torch.cat([*sinks, x[tail * self.size :]])

    def mark_read(self, order: Tensor, count: Tensor, tail: int) -> Tensor:
        """Mark the blocks that a step has read.

        Args:
            order: Ranked blocks [Hkv, M].
            count: How many of the ranked blocks each kv head has read [Hkv].
            tail: As in `tail`.

        Returns:
            bool [Hkv, tail + 1], which includes the near blocks.
        """
        marked = torch.zeros(order.shape[0], tail + 1, dtype=torch.bool, device=order.device)
        marked.scatter_(1, order, torch.arange(order.shape[1], device=order.device) < count[:, None])
        marked[:, self.sinks[self.sinks < tail]] = True
        marked[:, tail] = True
        return marked


def gather_blocks(x: Tensor, blocks: Tensor, heads: Tensor, size: int) -> Tensor:
    """Gather rows of full blocks.

    Args:
        x: Keys or values [n, Hkv, d].
        blocks: Block numbers [a, m], a list per entry of `heads`.
        heads: Kv heads [a].
        size: Rows per block.

    Returns:
        Rows [a, m·size, d].
    """
    rows = (blocks[..., None] * size + torch.arange(size, device=x.device)).flatten(1)
    flat = rows * x.shape[1] + heads[:, None]
    return x.reshape(-1, x.shape[2]).index_select(0, flat.flatten()).view(*rows.shape, -1)


def block_logsumexp(q: Tensor, k: Tensor, size: int, *, scale: float) -> Tensor:
    """Compute the true log-sum-exp [Hq, B] of q [Hq, d] over each block of k [n, Hkv, d], the last one full or not.

    This reads all keys.
    """
    group = q.shape[0] // k.shape[1]
    scores = torch.einsum("hgd,nhd->hgn", q.unflatten(0, (-1, group)), k).flatten(0, 1).to(score_dtype(q.dtype)) * scale
    missing = -k.shape[0] % size
    padded = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
    lse: Tensor = padded.unflatten(1, (-1, size)).logsumexp(-1)
    return lse


def coverage(q: Tensor, k: Tensor, marked: Tensor, size: int, *, scale: float) -> Tensor:
    """Compute the share [Hq] of the whole attention of q [Hq, d] that falls on marked blocks [Hkv, B].

    A stop rule only estimates this share. The function reads all keys: it is for measurements, not for serving.
    """
    share = block_logsumexp(q, k, size, scale=scale).softmax(-1)
    return (share * marked.repeat_interleave(q.shape[0] // k.shape[1], dim=0)).sum(-1)
