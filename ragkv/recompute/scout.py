"""Scout: our own block selection on SamKV's pipeline. Evidence scores the blocks, and the model only where it pays.

On short factual questions, SamKV's literal selection loses the answer. It averages queries over the question and keys
over a block and adds up all attention heads, so the few heads that retrieve are lost in the average. Scout puts
evidence of several kinds on one scale, and keeps what it finds:

    meaning      the question and the block's window, as the retrieval embedder understands them
    words        the question's words in the window (both in evidence.py; neither needs a pass of the model)
    attention    of calibrated retrieval heads (`ragkv calibrate`), where the model has any: the question is asked over
                 the blocks that the other kinds find best, so that it knows of whom "she" is said. The softmax of the
                 queries over the token-level keys of all chunks, which their head records store, is spread to `reach`
                 neighbours and summed over each block; heads are combined by a power mean that favours agreement
    budget       the sum of the kinds is a logit, and its softmax the probability that the answer is in a block. Blocks
                 are kept in falling order until `promise` of the probability is; at least `floor` blocks, at most a
                 share `cap` of all, in a long context fewer. A chunk of which nothing is selected keeps nothing; of
                 the others the first `opening` blocks, which hold the title, are kept as well

All chunks compete with each other, so the softmax itself is the cross-document filter.

The same blocks are kept in every layer. All of their tokens are recomputed, or none where the model was trained to read
chunks that were encoded alone. Repair and question prefill run as one pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.kernels.attention import index_to_device
from ragkv.recompute.base import Blocks, Piece, Plan, StatesBehind, inexact_tokens, require_between
from ragkv.recompute.digest import retrieval_pairs
from ragkv.recompute.evidence import WEIGHTS, WITHOUT_PASS, BlockEvidence, Kind, evidence_logits, piece_logits
from ragkv.recompute.samkv import fuse

TAIL = 64
"""Question tokens that score blocks by attention.

Names in a question find the blocks that mention them. A block that only says "she" needs those blocks to be understood,
and the last token of a question does not find them.
"""
ATTENTION: Kind = "attention"
SHORT = 96
"""Blocks of a context of which a share `cap` may be kept: 8 chunks of 200 tokens."""


@dataclass(frozen=True)
class Scout:
    """Parameters.

    Attributes:
        layers: Layers of the model.
        heads: Calibrated retrieval heads, as (layer, query head) pairs.
        group: Query heads per kv head.
        scale: Softmax scale.
        evidence: The kinds of evidence that count.
        opening: Blocks at the start of a chunk that are kept with any other of its blocks.
        look: Share of all blocks, best first, over which the question is asked for `attention`, if that is more than
            half of `floor`; 0 asks over S alone.
        tail: Question tokens that score blocks by attention, counted from the end of the question.
        reach: Tokens that an attention score spreads to on each side.
        power: Exponent of the mean over heads. 1 averages, a smaller one favours agreement.
        promise: Probability that the answer is in what is kept, where `cap` and `most` leave room for it.
        floor: Smallest number of blocks that are selected; a context of so few is kept whole.
        cap: Largest number of blocks to keep, as a share of all blocks, if that is more than `floor`.
        growth: Exponent with which that number grows in a context of more than SHORT blocks: what a question asks for
            does not grow with the context. 1 keeps the share.
        chunks: Most retrieved chunks that join the context, those of the strongest blocks; 0: all.
        update: As in `SamKV`.
        repair: Recompute every `kept` token, or `none`.
        states: As in `Method`.
    """

    layers: int
    heads: tuple[tuple[int, int], ...]
    group: int
    scale: float
    evidence: tuple[Kind, ...] = WITHOUT_PASS
    opening: int = 1
    look: float = 0.06
    tail: int = TAIL
    reach: int = 8
    power: float = 0.5
    promise: float = 0.97
    floor: int = 8
    cap: float = 0.17
    growth: float = 0.33
    chunks: int = 0
    update: Literal["overwrite", "fusion"] = "overwrite"
    repair: Literal["kept", "none"] = "kept"
    states: StatesBehind = "last"

    def __post_init__(self) -> None:
        require_between(0, math.inf, opening=self.opening, reach=self.reach, chunks=self.chunks)
        require_between(1, math.inf, tail=self.tail, floor=self.floor)
        require_between(1e-3, 10, power=self.power)
        require_between(0, 1, look=self.look, promise=self.promise, cap=self.cap, growth=self.growth)
        if self.asks and not self.heads:
            raise ValueError("attention needs retrieval heads")

    @property
    def asks(self) -> bool:
        """Whether a pass of the model takes part in the selection."""
        return ATTENTION in self.evidence

    def screen(self, found: Sequence[BlockEvidence]) -> tuple[int, ...]:
        """Return the chunks of the strongest blocks, in their order. See `Method.screen`."""
        logits = evidence_logits(found, self.evidence)
        strongest = [float(each.max()) for each in logits.split([len(each.meaning) for each in found])]
        best = sorted(range(len(found)), key=lambda i: -strongest[i])
        return tuple(sorted(best[: self.chunks or None]))

    def composite_blocks(self, pieces: Sequence[Piece]) -> tuple[Blocks, ...]:
        """Return the blocks that the evidence without a pass finds best, where the model is asked; else none."""
        alone = self.evidence == (ATTENTION,) or any(piece.evidence is None for piece in pieces)
        if alone or not (self.asks and self.look):
            return ((),) * len(pieces)
        return self.look_at(_sizes(pieces), piece_logits(pieces, self.evidence))

    def look_at(self, sizes: Sequence[int], logits: Tensor) -> tuple[Blocks, ...]:
        """Return the blocks over which the question is asked. What a look reads is kept: half of a budget.

        Args:
            sizes: Blocks of each chunk.
            logits: Logit of each block [sum of B], by the evidence without a pass.
        """
        return replace(self, floor=max(1, self.floor // 2)).select_blocks(sizes, logits, self.look, 1.0)

    def room(self, blocks: int, cap: float) -> float:
        """Return the largest number of blocks to keep of so many, where `cap` is their share in a short context."""
        return cap * blocks if blocks <= SHORT else cap * SHORT * (blocks / SHORT) ** self.growth

    def composite_layers(self, layers: int) -> int:
        """Return the number of layers up to the deepest retrieval head, 0 where the model is not asked."""
        return 1 + max(layer for layer, _ in self.heads) if self.asks else 0

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor], read: Sequence[Blocks] = ()) -> Plan:
        """Select the same blocks for all layers. See `Method.plan`."""
        logits = piece_logits(pieces, self.evidence)
        if self.asks:
            shares = self.block_shares(pieces, queries).to(logits)
            logits = logits + WEIGHTS[ATTENTION] * (shares * len(shares)).clamp_min(1e-6).log()
        sizes = _sizes(pieces)
        kept = self.select_blocks(sizes, logits, self.cap, self.promise, read)
        recompute = inexact_tokens(pieces, kept) if self.repair == "kept" else ((),) * len(pieces)
        nothing: tuple[Blocks, ...] = ((),) * len(pieces)
        return Plan(
            (kept,) * self.layers,
            (recompute,) * self.layers,
            (nothing,) * self.layers,
            fuse if self.update == "fusion" else None,
            one_pass=True,
            promised=promised(sizes, logits, kept),
        )

    def block_shares(self, pieces: Sequence[Piece], queries: Sequence[Tensor]) -> Tensor:
        """Compute the share of the retrieval heads' attention on each block [sum of B]. They sum to 1."""
        pairs = retrieval_pairs(self.heads, self.group)
        keys = torch.cat([piece.digest.retrieval_keys.to(queries[0]) for piece in pieces], dim=1)  # [P, N, d]
        rows = [queries[layer][-self.tail :, head] for layer, head in self.heads]
        head_keys = [keys[pairs.index((layer, head // self.group))] for layer, head in self.heads]
        scores = torch.stack([(q @ k.T * self.scale).softmax(-1).mean(0) for q, k in zip(rows, head_keys, strict=True)])
        return join_heads(pool_blocks(scores, pieces, self.reach), self.power)

    def select_blocks(
        self,
        sizes: Sequence[int],
        logits: Tensor,
        cap: float,
        promise: float,
        read: Sequence[Blocks] = (),
    ) -> tuple[Blocks, ...]:
        """Select blocks, best first, until the promise is kept or there is no more room.

        Args:
            sizes: Blocks of each chunk.
            logits: Logit of each block [sum of B].
            cap: Largest share of all blocks; `floor` counts for more.
            promise: Probability that is enough.
            read: Blocks per chunk that are selected already.
        """
        numbered = [(i, b) for i, size in enumerate(sizes) for b in range(size)]
        probability, order = logits.double().softmax(0).sort(descending=True, stable=True)
        before = probability.cumsum(0) - probability
        room = self.room(len(order), cap)
        selected = [set(blocks) for blocks in read] if read else [set() for _ in sizes]
        size = sum(map(len, selected))
        for at, reached in zip(order.tolist(), before.tolist(), strict=True):
            i, b = numbered[at]
            new = {b, *range(min(self.opening, sizes[i]))} - selected[i]
            if size >= self.floor and (reached >= promise or size + len(new) > room):
                break
            selected[i] |= new
            size += len(new)
        return tuple(tuple(sorted(blocks)) for blocks in selected)


def promised(sizes: Sequence[int], logits: Tensor, kept: Sequence[Blocks]) -> float:
    """Return the probability, by the logits of all blocks, that the answer is in what is kept. sizes: of the chunks."""
    starts = itertools.accumulate(sizes, initial=0)
    at = [start + number for start, blocks in zip(starts, kept, strict=False) for number in blocks]
    return min(1.0, float(logits.double().softmax(0)[at].sum()))


def pool_blocks(scores: Tensor, pieces: Sequence[Piece], reach: int) -> Tensor:
    """Sum token scores to block scores. Each token first takes the best score within `reach` in its chunk.

    All chunks are processed at once, each in a row as long as the longest chunk: chunk by chunk, a GPU would spend its
    time on kernel launches.

    Args:
        scores: Token scores of all chunks [H, N], not negative.
        pieces: The chunks.
        reach: Tokens that a score spreads to on each side.

    Returns:
        Block scores [H, sum of B].
    """
    block, most = pieces[0].block, max(piece.blocks for piece in pieces)
    count, room = len(pieces), most * block
    tokens, filled = (
        index_to_device(_cells(sizes, width), scores.device)
        for sizes, width in (([piece.tokens for piece in pieces], room), (_sizes(pieces), most))
    )
    rows = scores.new_zeros(scores.shape[0], count * room).index_copy_(1, tokens, scores)
    spread = F.max_pool1d(rows.view(-1, count, room), 2 * reach + 1, stride=1, padding=reach).flatten(1)
    inside = torch.zeros_like(rows).index_copy_(1, tokens, spread.index_select(1, tokens))
    return inside.view(scores.shape[0], -1, block).sum(-1).index_select(1, filled)


def _sizes(pieces: Sequence[Piece]) -> list[int]:
    """Return the number of blocks of each chunk."""
    return [piece.blocks for piece in pieces]


def _cells(sizes: Sequence[int], width: int) -> Tensor:
    """Return the cell of every block (or token) of chunks of so many, each chunk in a row of `width` cells."""
    return torch.cat([torch.arange(i * width, i * width + size) for i, size in enumerate(sizes)])


def join_heads(masses: Tensor, power: float) -> Tensor:
    """Combine block scores [H, N] of several heads to one distribution [N]: the power mean of their distributions."""
    joined = (masses / masses.sum(1, keepdim=True)).pow(power).mean(0).pow(1 / power)
    return joined / joined.sum()
