"""Top blocks: every token reads a fixed number of blocks, by rank. This is what PSA is compared with.

    cuboid   blocks are ranked by ArkVale's digests, as in PSA
    quest    blocks are ranked by bounding boxes (Quest, arXiv 2406.10774)
    exact    blocks are ranked by their true share of the attention: the best any ranking can do, but it reads all keys

Near blocks (the sinks and the newest block) are always read and are not counted. Each kv head has its own list, ranked
by the mean over its query heads. `TopKeys` is the same without blocks: the best single keys of every query head, by
their exact scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ragkv.kernels.attention import merge
from ragkv.sparse.attention import attend_heads, score_dtype
from ragkv.sparse.base import DecodePolicy, DecodeState
from ragkv.sparse.blocks import BlockDigests, block_logsumexp, bounding_box, cuboid, gather_blocks

BOXES = {"cuboid": cuboid, "quest": bounding_box, "exact": None}


@dataclass(frozen=True)
class TopBlocks(DecodePolicy):
    """Parameters.

    Attributes:
        count: Blocks read besides the near ones (a profile says 128).
        digest: What ranks the blocks.
        block: Keys per block (a profile says 16).
        sinks: Blocks at the start that are always read.
        most: Largest share of the ranked blocks that are read.
    """

    count: int = 32
    digest: Literal["cuboid", "quest", "exact"] = "cuboid"
    block: int = 32
    sinks: int = 1
    most: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.most <= 1:
            raise ValueError("most must be from 0 to 1")
        if self.digest not in BOXES:
            raise ValueError(f"digest must be one of {', '.join(BOXES)}")
        if self.count < 0 or self.block < 1 or self.sinks < 0:
            raise ValueError("block must be at least 1, count and sinks not negative")

    def start(self) -> TopBlocksState:
        """Create the state of one request."""
        return TopBlocksState(self)


class TopBlocksState(DecodeState):
    """Digests of one request's blocks.

    Attributes:
        params: The parameters.
        marked: bool [Hkv, B] by layer, the blocks that the last step read.
    """

    name = "topk"

    def __init__(self, params: TopBlocks):
        super().__init__()
        self.params = params
        self.marked: dict[int, Tensor] = {}
        self._blocks: dict[int, BlockDigests] = {}

    def learn(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> None:
        """Build the digests of full blocks. Queries do not matter."""
        p = self.params
        self._blocks.setdefault(layer, BlockDigests(p.block, p.sinks, BOXES[p.digest])).update(k, k_pos)

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `DecodeState.step`."""
        blocks, (rows, heads) = self._blocks[layer], k.shape[:2]
        blocks.update(k, k_pos)
        tail = blocks.tail(rows)
        queries = q.unflatten(0, (heads, -1)).to(score_dtype(q.dtype))
        if self.params.digest == "exact":
            lse = block_logsumexp(q, k, blocks.size, scale=scale)
            scores = lse.softmax(-1).unflatten(0, (heads, -1)).mean(1)
        else:
            scores = blocks.scores(queries)
        order = blocks.rank(scores, tail)
        best = order[:, : min(self.params.count, math.ceil(self.params.most * order.shape[1]))]
        parts = [attend_heads(queries, *(blocks.near_rows(x, tail).transpose(0, 1) for x in (k, v)), scale=scale)]
        if best.shape[1]:
            every_head = torch.arange(heads, device=k.device)
            gathered = (gather_blocks(x, best, every_head, blocks.size) for x in (k, v))
            parts.append(attend_heads(queries, *gathered, scale=scale))
        count = torch.full((heads,), best.shape[1], device=k.device)
        self.marked[layer] = blocks.mark_read(order, count, tail)
        near = rows - order.shape[1] * blocks.size
        return merge(parts)[0].flatten(0, 1).to(q.dtype), near + count * blocks.size


@dataclass(frozen=True)
class TopKeys(DecodePolicy):
    """Parameters. A step reads k = max(least, share of all) keys.

    Attributes:
        share: Share of all keys.
        least: Smallest number of keys.
    """

    share: float = 0.02
    least: int = 64

    def __post_init__(self) -> None:
        if not (0 <= self.share <= 1 and self.least >= 1):
            raise ValueError("share must be between 0 and 1, least at least 1")

    def start(self) -> TopKeysState:
        """Create the state of one request."""
        return TopKeysState(self)


class TopKeysState(DecodeState):
    """A state that stores nothing: all keys are scored for every token."""

    name = "topkeys"

    def __init__(self, params: TopKeys):
        super().__init__()
        self.params = params

    def learn(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> None:
        """Do nothing."""

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `DecodeState.step`."""
        rows, heads, d = k.shape
        count = min(rows, max(self.params.least, int(self.params.share * rows)))
        queries = q.unflatten(0, (heads, -1))
        scores = (queries @ k.permute(1, 2, 0)).to(score_dtype(q.dtype)) * scale  # [Hkv, g, n]
        best = scores.topk(count, dim=-1)
        weights = best.values.softmax(-1)
        every_head = torch.arange(heads, device=k.device)[:, None, None]
        out = torch.einsum("hgk,hgkd->hgd", weights, v[best.indices, every_head].to(weights))
        return out.reshape(-1, d).to(q.dtype), torch.full((q.shape[0],), count, device=k.device)
