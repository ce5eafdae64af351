"""Top blocks: a fixed number of blocks per token, by rank. What PSA is compared with.

    cuboid   ranked by ArkVale's digests, as in PSA
    quest    ranked by bounding boxes (Quest, arXiv 2406.10774)
    exact    ranked by their true share of the attention: the best any ranking can do; reads all keys to know

Near blocks (the sinks', the newest) are always read and not counted. One list per kv head, by the mean over its query
heads. `TopKeys` is the same without blocks: the best single keys of every query head, by their exact scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ragkv.kernels.attention import merge
from ragkv.sparse.base import DecodePolicy, DecodeState, wide
from ragkv.sparse.blocks import BlockTable, bounding, cuboid, fetch, mass
from ragkv.sparse.psa import over

BOXES = {"cuboid": cuboid, "quest": bounding, "exact": None}


@dataclass(frozen=True)
class TopBlocks(DecodePolicy):
    """count: blocks read beside the near ones (a profile says 128) · digest: what ranks them · block: keys a block (a
    profile says 16) · sinks: blocks at the start that are always read."""

    count: int = 32
    digest: Literal["cuboid", "quest", "exact"] = "cuboid"
    block: int = 32
    sinks: int = 1

    def __post_init__(self) -> None:
        if self.digest not in BOXES:
            raise ValueError(f"digest must be one of {', '.join(BOXES)}")
        if self.count < 0 or self.block < 1 or self.sinks < 0:
            raise ValueError("block must be at least 1, count and sinks not negative")

    def start(self) -> Top:
        """State of one request."""
        return Top(self)


class Top(DecodeState):
    """Digests of one request's blocks. marked: bool [Hkv, B] by layer, the blocks that the last step read."""

    def __init__(self, params: TopBlocks):
        super().__init__()
        self.params = params
        self.marked: dict[int, Tensor] = {}
        self._blocks: dict[int, BlockTable] = {}

    def observe(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> None:
        """Digests of the blocks that are full; queries do not matter."""
        p = self.params
        self._blocks.setdefault(layer, BlockTable(p.block, p.sinks, BOXES[p.digest])).update(k, k_pos)

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Decoding.step`."""
        blocks, (rows, heads) = self._blocks[layer], k.shape[:2]
        blocks.update(k, k_pos)
        tail = blocks.tail(rows)
        asked = q.unflatten(0, (heads, -1)).to(wide(q.dtype))
        if self.params.digest == "exact":
            scores = mass(q, k, blocks.size, scale=scale).softmax(-1).unflatten(0, (heads, -1)).mean(1)
        else:
            scores = blocks.scores(asked)
        order = blocks.ranked(scores, tail)
        kept = order[:, : self.params.count]
        parts = [over(asked, *(blocks.near(x, tail).transpose(0, 1) for x in (k, v)), scale=scale)]
        if kept.shape[1]:
            every = torch.arange(heads, device=k.device)
            parts.append(over(asked, *(fetch(x, kept, every, blocks.size) for x in (k, v)), scale=scale))
        read = torch.full((heads,), kept.shape[1], device=k.device)
        self.marked[layer] = blocks.mark(order, read, tail)
        always = rows - order.shape[1] * blocks.size
        return merge(parts)[0].flatten(0, 1).to(q.dtype), always + read * blocks.size


@dataclass(frozen=True)
class TopKeys(DecodePolicy):
    """share, least: keys read of all, k = max(least, share of all)."""

    share: float = 0.02
    least: int = 64

    def __post_init__(self) -> None:
        if not (0 <= self.share <= 1 and self.least >= 1):
            raise ValueError("share must be between 0 and 1, least at least 1")

    def start(self) -> Best:
        """State of one request."""
        return Best(self)


class Best(DecodeState):
    """Nothing is remembered: all keys are scored for every token."""

    def __init__(self, params: TopKeys):
        super().__init__()
        self.params = params

    def observe(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> None:
        """Nothing to learn."""

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Decoding.step`."""
        rows, heads, d = k.shape
        count = min(rows, max(self.params.least, int(self.params.share * rows)))
        asked = q.unflatten(0, (heads, -1))
        scores = (asked @ k.permute(1, 2, 0)).to(wide(q.dtype)) * scale  # [Hkv, g, n]
        best = scores.topk(count, dim=-1)
        weights = best.values.softmax(-1)
        every = torch.arange(heads, device=k.device)[:, None, None]
        out = torch.einsum("hgk,hgkd->hgd", weights, v[best.indices, every].to(weights))
        return out.reshape(-1, d).to(q.dtype), torch.full((q.shape[0],), count, device=k.device)
