"""Scout: our own block selection on SamKV's pipeline. Only the few attention heads that retrieve score the blocks.

On short factual questions, SamKV's literal selection loses the answer. It averages queries over the question and keys
over a block and adds up all attention heads, so the few heads that retrieve are lost in the average. Its fixed blocks
are a fifth of a context of short chunks. Scout asks twice, and keeps what it finds:

    query    pre-RoPE queries of the question's tokens, of calibrated retrieval heads only (`ragkv calibrate`)
    keys     their token-level pre-RoPE keys, which the head record of every chunk stores
    score    softmax over all tokens of all chunks. Chunks compete with each other, so the normalisation itself is the
             cross-document filter. A score spreads to `reach` neighbours on both sides, because answers continue in the
             next block. The score of a block is the sum over its tokens; heads are combined by a power mean that
             favours agreement. It is multiplied by the chunk's relevance for retrieval, to the power `prior`
    budget   blocks in falling order of score down to a share `weakest` of the best one; at least `floor` blocks, at
             most a share `cap` of all. A chunk of which nothing is selected keeps nothing; of the others the first
             `opening` blocks, which hold the title, are kept as well

The first look runs the question over S alone, and no KV is loaded for it. The second look runs it over the blocks that
the first one selected: a question about a person then finds what is said of "her", and what the found place refers to.

The same blocks are kept in every layer. All of their tokens are recomputed, or none where the model was trained to read
chunks that were encoded alone. Repair and question prefill run as one pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.kernels.attention import index_to_device
from ragkv.recompute.base import Blocks, Piece, Plan, inexact_tokens, require_between
from ragkv.recompute.digest import retrieval_pairs
from ragkv.recompute.samkv import fuse

TAIL = 64
"""Question tokens that score blocks.

Names in a question find the blocks that mention them. A block that only says "she" needs those blocks to be understood,
and the last token of a question does not find them.
"""


@dataclass(frozen=True)
class Scout:
    """Parameters.

    Attributes:
        layers: Layers of the model.
        heads: Calibrated retrieval heads, as (layer, query head) pairs.
        group: Query heads per kv head.
        scale: Softmax scale.
        opening: Blocks at the start of a chunk that are kept with any other of its blocks.
        look: Largest share of all blocks that the first look selects, if that is more than `floor`; 0 asks once.
        tail: Question tokens that score blocks, counted from the end of the question.
        reach: Tokens that a score spreads to on each side.
        power: Exponent of the mean over heads. 1 averages, a smaller one favours agreement.
        weakest: Score of the weakest block that is selected, as a share of the best block's.
        floor: Smallest number of blocks that a look selects; a context of so few is kept whole.
        cap: Largest number of blocks to keep, as a share of all blocks, if that is more than `floor`.
        prior: Exponent of a chunk's relevance for retrieval in the scores of its blocks; 0 leaves it out.
        chunks: Most retrieved chunks that join the context, those of the strongest blocks; 0: all.
        update: As in `SamKV`.
        repair: Recompute every `kept` token, or `none`.
    """

    layers: int
    heads: tuple[tuple[int, int], ...]
    group: int
    scale: float
    opening: int = 1
    look: float = 0.06
    tail: int = TAIL
    reach: int = 8
    power: float = 0.5
    weakest: float = 0.3
    floor: int = 8
    cap: float = 0.2
    prior: float = 0.0
    chunks: int = 0
    update: Literal["overwrite", "fusion"] = "overwrite"
    repair: Literal["kept", "none"] = "kept"

    def __post_init__(self) -> None:
        require_between(0, math.inf, opening=self.opening, reach=self.reach, chunks=self.chunks)
        require_between(1, math.inf, tail=self.tail, floor=self.floor)
        require_between(1e-3, 10, power=self.power)
        require_between(0, 100, prior=self.prior)
        require_between(0, 1, look=self.look, weakest=self.weakest, cap=self.cap)

    def composite_blocks(self, pieces: Sequence[Piece]) -> tuple[Blocks, ...]:
        """Return no block of any chunk: the first look asks over S alone."""
        return ((),) * len(pieces)

    def screen(self, pieces: Sequence[Piece], queries: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the chunks of the strongest blocks, in their order. See `Method.screen`."""
        strongest = [max(masses) for masses in self.block_mass(pieces, queries)]
        best = sorted(range(len(pieces)), key=lambda i: -strongest[i])
        return tuple(sorted(best[: self.chunks or None]))

    def second_look(self, pieces: Sequence[Piece], queries: Sequence[Tensor]) -> tuple[Blocks, ...]:
        """Select the blocks over which the question is asked again. See `Method.second_look`."""
        if not self.look:
            return ()
        return self.select_blocks(pieces, self.block_mass(pieces, queries), self.look)

    def composite_layers(self, layers: int) -> int:
        """Return the number of layers up to the deepest retrieval head."""
        return 1 + max(layer for layer, _ in self.heads)

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor], read: Sequence[Blocks] = ()) -> Plan:
        """Select the same blocks for all layers. See `Method.plan`."""
        kept = self.select_blocks(pieces, self.block_mass(pieces, queries), self.cap, read)
        recompute = inexact_tokens(pieces, kept) if self.repair == "kept" else ((),) * len(pieces)
        nothing: tuple[Blocks, ...] = ((),) * len(pieces)
        blend = fuse if self.update == "fusion" else None
        return Plan((kept,) * self.layers, (recompute,) * self.layers, (nothing,) * self.layers, blend, one_pass=True)

    def block_mass(self, pieces: Sequence[Piece], queries: Sequence[Tensor]) -> list[list[float]]:
        """Compute the share of the retrieval heads' attention per chunk and block, weighted by relevance.

        All chunks together sum to 1.
        """
        pairs = retrieval_pairs(self.heads, self.group)
        keys = torch.cat([piece.digest.retrieval_keys.to(queries[0]) for piece in pieces], dim=1)  # [P, N, d]
        rows = [queries[layer][-self.tail :, head] for layer, head in self.heads]
        head_keys = [keys[pairs.index((layer, head // self.group))] for layer, head in self.heads]
        scores = torch.stack([(q @ k.T * self.scale).softmax(-1).mean(0) for q, k in zip(rows, head_keys, strict=True)])
        joined = join_heads(pool_blocks(scores, pieces, self.reach), self.power)
        weights = [piece.relevance**self.prior for piece in pieces for _ in range(piece.blocks)]
        joined *= index_to_device(torch.tensor(weights, dtype=joined.dtype), joined.device)
        shares: list[float] = (joined / joined.sum()).tolist()
        ends = list(accumulate(piece.blocks for piece in pieces))
        return [shares[end - piece.blocks : end] for piece, end in zip(pieces, ends, strict=True)]

    def select_blocks(
        self,
        pieces: Sequence[Piece],
        masses: Sequence[Sequence[float]],
        cap: float,
        read: Sequence[Blocks] = (),
    ) -> tuple[Blocks, ...]:
        """Select blocks, best first, as long as they are strong enough and there is room.

        Args:
            pieces: The chunks.
            masses: Share of the attention per chunk and block.
            cap: Largest share of all blocks; `floor` counts for more.
            read: Blocks per chunk that are selected already.
        """
        chunk, block = (each.tolist() for each in _numbered([piece.blocks for piece in pieces]))
        mass = [each for row in masses for each in row]
        order = torch.tensor(mass, dtype=torch.float64).argsort(descending=True, stable=True).tolist()
        room = cap * len(order)
        selected = [set(blocks) for blocks in read] if read else [set() for _ in pieces]
        size = sum(map(len, selected))
        for at in order:
            i, b = chunk[at], block[at]
            new = {b, *range(min(self.opening, pieces[i].blocks))} - selected[i]
            if size >= self.floor and (mass[at] < self.weakest * mass[order[0]] or size + len(new) > room):
                break
            selected[i] |= new
            size += len(new)
        return tuple(tuple(sorted(blocks)) for blocks in selected)


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
        index_to_device(chunk * width + number, scores.device)
        for (chunk, number), width in (
            (_numbered([piece.tokens for piece in pieces]), room),
            (_numbered([piece.blocks for piece in pieces]), most),
        )
    )
    rows = scores.new_zeros(scores.shape[0], count * room).index_copy_(1, tokens, scores)
    spread = F.max_pool1d(rows.view(-1, count, room), 2 * reach + 1, stride=1, padding=reach).flatten(1)
    inside = torch.zeros_like(rows).index_copy_(1, tokens, spread.index_select(1, tokens))
    return inside.view(scores.shape[0], -1, block).sum(-1).index_select(1, filled)


def _numbered(sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the chunk, and the number within it, of every block (or token) of chunks of so many."""
    return (
        torch.cat([torch.full((size,), chunk) for chunk, size in enumerate(sizes)]),
        torch.cat([torch.arange(size) for size in sizes]),
    )


def join_heads(masses: Tensor, power: float) -> Tensor:
    """Combine block scores [H, N] of several heads to one distribution [N]: the power mean of their distributions."""
    joined = (masses / masses.sum(1, keepdim=True)).pow(power).mean(0).pow(1 / power)
    return joined / joined.sum()
