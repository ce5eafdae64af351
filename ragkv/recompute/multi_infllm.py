"""Multi-InfLLM: the stored caches as one long context, made sparse as InfLLM does it. SamKV's rival.

Xiao et al., "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory" (2024).

The first and the last blocks of the whole context are kept. Every layer adds the middle blocks that match the mean
query of the question best in that layer. The mean key of its landmarks represents a block; landmarks are the tokens
that later tokens attend to most. Queries and keys are compared before RoPE, over all attention heads. All retrieved
keys are rotated to one position, the edge of the local window. Nothing is recomputed, and every block is loaded, since
any layer may ask for any block.

Differs from InfLLM: the local window is the end of the context, not of what precedes each token, and decoding continues
with the question's blocks. SamKV gives no sizes (paper silent); with ours it keeps about as much as SamKV does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ragkv.recompute.all_chunks import AllChunks
from ragkv.recompute.base import Blocks, ChunkSpan, Piece, Plan, require_between
from ragkv.recompute.samkv import score


@dataclass(frozen=True)
class MultiInfLLM(AllChunks):
    """Parameters.

    Attributes:
        layers: Layers of the model.
        initial: Blocks kept at the start of the whole context.
        local: Blocks kept at its end.
        share: Blocks to retrieve, as a share of all blocks.
        angle: Rotation of retrieved keys: `one` for all of them, or that of their `stitched` positions.
    """

    layers: int
    initial: int = 8
    local: int = 16
    share: float = 0.10
    angle: Literal["one", "stitched"] = "one"

    def __post_init__(self) -> None:
        require_between(0, math.inf, initial=self.initial)
        require_between(1, math.inf, local=self.local)
        require_between(0, 1, share=self.share)

    def composite_blocks(self, pieces: Sequence[Piece]) -> tuple[Blocks, ...]:
        """Return nothing: the question selects blocks during its own prefill."""
        return ()

    def composite_layers(self, layers: int) -> int:
        """Return 0: there is no composite pass."""
        return 0

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor], read: Sequence[Blocks] = ()) -> Plan:
        """Keep the two ends of the context. The rest is selected layer by layer."""
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
            expansion=partial(_select_best, pieces, middle, count),
            key_positions=partial(_window_positions, window) if self.angle == "one" else None,
        )


def _select_best(
    pieces: Sequence[Piece],
    middle: Sequence[tuple[int, int]],
    count: int,
    layer: int,
    queries: Tensor,
    keys: Sequence[Tensor],
) -> tuple[Blocks, ...]:
    """Select the `count` middle blocks with the largest scores. Of equal scores, the first blocks win."""
    means = [
        k[piece.digest.landmarks[layer].long().to(k.device)].mean(1) for piece, k in zip(pieces, keys, strict=True)
    ]
    query = queries.mean(0, keepdim=True)
    scores = [score(query, m[None].to(query))[0].tolist() for m in means]
    ranked = sorted(middle, key=lambda at: (-scores[at[0]][at[1]], at))
    return _by_chunk(ranked[:count], len(pieces))


def _by_chunk(selected: Sequence[tuple[int, int]], chunks: int) -> tuple[Blocks, ...]:
    return tuple(tuple(sorted(block for j, block in selected if j == i)) for i in range(chunks))


def _window_positions(window: int, tokens: Tensor, span: ChunkSpan) -> Tensor:
    """Leave local tokens at their positions and move everything before them to the edge of the local window."""
    return torch.clamp(tokens + span.start, min=span.end - window)
