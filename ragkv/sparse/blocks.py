"""Blocks of a growing cache: what is known of each without reading it, which are always read, how the others are
fetched.

    block b    rows [b·size, (b+1)·size) of the cache, in slot order; one is full once all its rows are there
    digest     a box [center - radius, center + radius] per full block and kv head, over its rotated keys
    near       rows that every step reads: the blocks with the earliest positions (attention sinks) and those with rows
               that came last, full or not
    middle     all other blocks: full, with a digest, and ranked

The score of a box, sum over dimensions of max(q·high, q·low), is q·center + |q|·radius: one product, and linear in
(q, |q|), so the mean over the query heads of a group is the score of their means.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ragkv.sparse.base import wide

Box = Callable[[Tensor], tuple[Tensor, Tensor]]
"""keys [B, size, Hkv, d] -> center, radius [B, Hkv, d]"""


def cuboid(keys: Tensor) -> tuple[Tensor, Tensor]:
    """ArkVale's box: the middle of the extremes, and the mean distance of the keys from it. No upper bound."""
    center = (keys.amax(1) + keys.amin(1)) / 2
    return center, (keys - center[:, None]).abs().mean(1)


def bounding(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quest's box, which holds every key: its score is at least that of the best key inside."""
    high, low = keys.amax(1), keys.amin(1)
    return (high + low) / 2, (high - low) / 2


class BlockTable:
    """Digests and sink blocks of one layer of one request. box: None where blocks are ranked without digests."""

    def __init__(self, size: int, sinks: int, box: Box | None):
        self.size, self._count, self._box = size, sinks, box
        self.full = 0
        self.sinks = torch.empty(0, dtype=torch.int64)
        self._digests: Tensor | None = None

    def update(self, k: Tensor, k_pos: Tensor) -> None:
        """Take in the blocks of k [n, Hkv, d] at k_pos [n] that have become full."""
        full = k.shape[0] // self.size
        if full == self.full:
            return
        if self._box is not None:
            keys = k[self.full * self.size : full * self.size].unflatten(0, (-1, self.size)).to(wide(k.dtype))
            self._store(torch.cat(self._box(keys), dim=-1).transpose(0, 1), full)
        if len(self.sinks) < self._count:
            earliest = k_pos[: full * self.size].view(full, self.size).amin(1)
            self.sinks = earliest.argsort()[: self._count].sort().values.to(k.device)
        self.full = full

    def _store(self, new: Tensor, full: int) -> None:
        """With room to spare, so that a block that becomes full while decoding does not copy all digests before it."""
        old = self._digests
        if old is None or old.shape[1] < full:
            self._digests = new.new_empty(new.shape[0], full + max(16, full // 4), new.shape[2])
            if old is not None:
                self._digests[:, : self.full] = old[:, : self.full]
        assert self._digests is not None
        self._digests[:, self.full : full] = new

    def scores(self, q: Tensor) -> Tensor:
        """[Hkv, full] of q [Hkv, g, d]: mean over the group of sum_d max(q·high, q·low), without softmax scale."""
        if self._digests is None:  # no block is full yet
            return q.new_zeros(q.shape[0], 0)
        asked = torch.cat([q, q.abs()], dim=-1).mean(1).to(self._digests.dtype)
        return torch.einsum("hbd,hd->hb", self._digests[:, : self.full], asked)

    def tail(self, rows: int) -> int:
        """The first block that holds the last row, out of `rows`: from there on all is near."""
        return (rows - 1) // self.size

    def ranked(self, scores: Tensor, tail: int) -> Tensor:
        """Middle blocks [Hkv, M] of scores [Hkv, >= tail], best first."""
        sinks = self.sinks[self.sinks < tail]
        scores = scores[:, :tail].index_fill(1, sinks, float("-inf"))
        order: Tensor = scores.argsort(dim=1, descending=True, stable=True)
        return order[:, : tail - len(sinks)]

    def near(self, x: Tensor, tail: int) -> Tensor:
        """The near rows [m, Hkv, d] of x [n, Hkv, d]."""
        sinks = [x[b * self.size : (b + 1) * self.size] for b in self.sinks.tolist() if b < tail]
        return torch.cat([*sinks, x[tail * self.size :]])

    def mark(self, order: Tensor, read: Tensor, tail: int) -> Tensor:
        """bool [Hkv, tail + 1]: near blocks, and the first read[h] [Hkv] of the ranked ones."""
        marked = torch.zeros(order.shape[0], tail + 1, dtype=torch.bool, device=order.device)
        marked.scatter_(1, order, torch.arange(order.shape[1], device=order.device) < read[:, None])
        marked[:, self.sinks[self.sinks < tail]] = True
        marked[:, tail] = True
        return marked


def fetch(x: Tensor, blocks: Tensor, heads: Tensor, size: int) -> Tensor:
    """Rows [a, m·size, d] of full blocks [a, m] of x [n, Hkv, d], block lists of kv heads [a]."""
    rows = (blocks[..., None] * size + torch.arange(size, device=x.device)).flatten(1)
    flat = rows * x.shape[1] + heads[:, None]
    return x.reshape(-1, x.shape[2]).index_select(0, flat.flatten()).view(*rows.shape, -1)


def mass(q: Tensor, k: Tensor, size: int, *, scale: float) -> Tensor:
    """True log-sum-exp [Hq, B] of q [Hq, d] over each block of k [n, Hkv, d], the last one full or not. Reads all
    keys."""
    group = q.shape[0] // k.shape[1]
    scores = torch.einsum("hgd,nhd->hgn", q.unflatten(0, (-1, group)), k).flatten(0, 1).to(wide(q.dtype)) * scale
    lacking = -k.shape[0] % size
    padded = torch.nn.functional.pad(scores, (0, lacking), value=float("-inf"))
    found: Tensor = padded.unflatten(1, (-1, size)).logsumexp(-1)
    return found


def coverage(q: Tensor, k: Tensor, marked: Tensor, size: int, *, scale: float) -> Tensor:
    """Share [Hq] of the whole attention of q [Hq, d] that lies in marked blocks [Hkv, B]: what a stop rule only
    estimates.

    Reads all keys: for measuring, not for serving.
    """
    share = mass(q, k, size, scale=scale).softmax(-1)
    return (share * marked.repeat_interleave(q.shape[0] // k.shape[1], dim=0)).sum(-1)
