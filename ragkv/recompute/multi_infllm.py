"""Multi-InfLLM: the stored caches as one long context, sparsified as InfLLM does with one: SamKV's rival.

Xiao et al., "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory" (2024).

Kept are the first and the last blocks of the whole context and, at every layer, the middle blocks that answer the
question's mean query there best. A block is represented by the mean key of its landmarks, the tokens that those after
them attend to most; queries and keys meet before RoPE, over all attention heads. Retrieved keys all get one angle, the
edge of the local window. Nothing is recomputed, and every block is loaded, since any may be asked for at any layer.

Differs from InfLLM: the local window is the end of the context, not of what each token has before it, and decoding
goes on with the question's blocks. SamKV gives no sizes (paper silent); ours make it keep about what SamKV keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ragkv.recompute.base import Blocks, ChunkSpan, Piece, Plan, within
from ragkv.recompute.samkv import score


@dataclass(frozen=True)
class MultiInfLLM:
    """layers: of the model · initial, local: blocks of the whole context · share: of all its blocks, to retrieve ·
    angle: of retrieved keys, `one` for all of them or that of their `stitched` places."""

    layers: int
    initial: int = 8
    local: int = 16
    share: float = 0.10
    angle: Literal["one", "stitched"] = "one"

    def __post_init__(self) -> None:
        within(0, math.inf, initial=self.initial)
        within(1, math.inf, local=self.local)
        within(0, 1, share=self.share)

    def first(self, pieces: Sequence[Piece]) -> tuple[Blocks, ...]:
        """No query is needed beforehand: the question chooses while it is read."""
        return ()

    def depth(self, layers: int) -> int:
        """No composite pass."""
        return 0

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor]) -> Plan:
        """The two ends of the context; the rest is chosen layer by layer."""
        every = [(i, block) for i, piece in enumerate(pieces) for block in range(piece.blocks)]
        ends = every if len(every) <= self.initial + self.local else every[: self.initial] + every[-self.local :]
        middle = sorted(set(every) - set(ends))
        count = min(len(middle), math.ceil(self.share * len(every) - 1e-9))
        nothing: tuple[Blocks, ...] = ((),) * len(pieces)
        window = sum(len(pieces[i].span(block)) for i, block in every[-self.local :])
        return Plan(
            (_by_chunk(ends, len(pieces)),) * self.layers,
            (nothing,) * self.layers,
            (nothing,) * self.layers,
            expansion=partial(_best, pieces, middle, count),
            key_positions=partial(_edge, window) if self.angle == "one" else None,
        )


def _best(
    pieces: Sequence[Piece],
    middle: Sequence[tuple[int, int]],
    count: int,
    layer: int,
    queries: Tensor,
    keys: Sequence[Tensor],
) -> tuple[Blocks, ...]:
    """The `count` middle blocks with the largest scores; the first of equals."""
    means = [
        k[piece.digest.landmarks[layer].long().to(k.device)].mean(1) for piece, k in zip(pieces, keys, strict=True)
    ]
    query = queries.mean(0, keepdim=True)
    scores = [score(query, m[None].to(query))[0].tolist() for m in means]
    ranked = sorted(middle, key=lambda at: (-scores[at[0]][at[1]], at))
    return _by_chunk(ranked[:count], len(pieces))


def _by_chunk(chosen: Sequence[tuple[int, int]], chunks: int) -> tuple[Blocks, ...]:
    return tuple(tuple(sorted(block for j, block in chosen if j == i)) for i in range(chunks))


def _edge(window: int, tokens: Tensor, place: ChunkSpan) -> Tensor:
    """Local tokens stay where they are, everything before them comes to the edge of the local window."""
    return torch.clamp(tokens + place.start, min=place.end - window)
