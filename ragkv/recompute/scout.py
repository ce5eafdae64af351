"""Scout: our own block selection on SamKV's pipeline. A few attention heads retrieve; ask only those, token by token.

Why it exists: on short factual questions the literal selection (queries averaged over the question, keys averaged
over a block, all attention heads added up) loses the answer: averaging drowns the handful of heads that retrieve. Scout
keeps the cheap composite pass and replaces what is averaged:

    query    pre-RoPE queries of the question's tokens, of calibrated retrieval heads only (`ragkv calibrate`)
    keys     their token-level pre-RoPE keys, kept in the head record of every chunk
    score    softmax over all tokens of all chunks, so chunks compete with each other: the cross-document filter is
             the normalisation itself; a token speaks for `reach` neighbours on both sides, because answers run on into
             the next block; blocks add up their tokens; heads are joined by a power mean that favours agreement
    budget   blocks in falling order of score mass until `mass` is covered; at least `floor`, at most `cap` of all

The same blocks are kept in every layer, and every token of them is computed again; the fixed blocks are those of SamKV.
Repair and question go through the model in one pass.
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

from ragkv.recompute.base import Blocks, Piece, Plan, Tokens, fixed_blocks, outside, within
from ragkv.recompute.digest import retrieval_pairs
from ragkv.recompute.samkv import fuse

TAIL = 64
"""Question tokens that ask. Names in a question find the blocks that name them: what "she" in the answer's block needs
to be understood, and what a question's last token does not look for."""


@dataclass(frozen=True)
class Scout:
    """layers: of the model · heads: calibrated (layer, query head) pairs · group: query heads per kv head · scale: of
    the attention · tail: question tokens that ask, from the end (a shorter question asks whole) · reach: tokens a score
    spreads to on each side · power: of the mean over heads (1 averages, smaller favours agreement) · mass: share of the
    score to cover, 1 is never covered · floor: blocks at least · cap: share of all blocks at most · update, repair: as
    in SamKV."""

    layers: int
    heads: tuple[tuple[int, int], ...]
    group: int
    scale: float
    initial: int = 1
    local: int = 2
    tail: int = TAIL
    reach: int = 8
    power: float = 0.5
    mass: float = 0.95
    floor: int = 2
    cap: float = 0.09
    update: Literal["overwrite", "fusion"] = "overwrite"
    repair: Literal["rules", "kept", "none"] = "kept"

    def __post_init__(self) -> None:
        within(0, math.inf, initial=self.initial, local=self.local, reach=self.reach, floor=self.floor)
        within(1, math.inf, tail=self.tail)
        within(1e-3, 10, power=self.power)
        within(0, 1, mass=self.mass, cap=self.cap)

    def first(self, pieces: Sequence[Piece]) -> tuple[Blocks, ...]:
        """Initial and local blocks of every chunk, as in SamKV."""
        return tuple(fixed_blocks(piece.blocks, self.initial, self.local) for piece in pieces)

    def depth(self, layers: int) -> int:
        """The composite pass ends at the deepest retrieval head."""
        return 1 + max(layer for layer, _ in self.heads)

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor]) -> Plan:
        """One choice of blocks for all layers."""
        fixed = self.first(pieces)
        picked = self.choose(pieces, fixed, self.block_mass(pieces, queries))
        kept = tuple(tuple(sorted({*f, *m})) for f, m in zip(fixed, picked, strict=True))
        recompute = self._recompute(pieces, fixed, kept)
        nothing: tuple[Blocks, ...] = ((),) * len(pieces)
        blend = fuse if self.update == "fusion" else None
        return Plan((kept,) * self.layers, (recompute,) * self.layers, (nothing,) * self.layers, blend, one_pass=True)

    def block_mass(self, pieces: Sequence[Piece], queries: Sequence[Tensor]) -> list[list[float]]:
        """Share of the retrieval heads' attention that falls on each block; all chunks together sum to 1."""
        pairs = retrieval_pairs(self.heads, self.group)
        keys = torch.cat([piece.digest.retrieval_keys.to(queries[0]) for piece in pieces], dim=1)  # [P, N, d]
        rows = [queries[layer][-self.tail :, head] for layer, head in self.heads]
        chosen = [keys[pairs.index((layer, head // self.group))] for layer, head in self.heads]
        scores = torch.stack([(q @ k.T * self.scale).softmax(-1).mean(0) for q, k in zip(rows, chosen, strict=True)])
        joined: list[float] = join(pool(scores, pieces, self.reach), self.power).tolist()
        ends = list(accumulate(piece.blocks for piece in pieces))
        return [joined[end - piece.blocks : end] for piece, end in zip(pieces, ends, strict=True)]

    def choose(
        self, pieces: Sequence[Piece], fixed: Sequence[Blocks], masses: Sequence[Sequence[float]]
    ) -> list[Blocks]:
        """Blocks beside the fixed ones: best first until the mass is covered, within floor and cap."""
        covered = sum(masses[i][b] for i, blocks in enumerate(fixed) for b in blocks)
        order = sorted(
            (-masses[i][b], i, b) for i, piece in enumerate(pieces) for b in range(piece.blocks) if b not in fixed[i]
        )
        cap = max(self.floor, int(self.cap * sum(piece.blocks for piece in pieces)))
        picked: list[tuple[int, int]] = []
        for negative, i, b in order[:cap]:
            if covered >= self.mass < 1 and len(picked) >= self.floor:
                break
            picked.append((i, b))
            covered -= negative
        return [tuple(sorted(b for j, b in picked if j == i)) for i in range(len(pieces))]

    def _recompute(
        self, pieces: Sequence[Piece], fixed: Sequence[Blocks], kept: Sequence[Blocks]
    ) -> tuple[Tokens, ...]:
        if self.repair == "none":
            return ((),) * len(pieces)
        return outside(pieces, kept if self.repair == "kept" else fixed)


def pool(scores: Tensor, pieces: Sequence[Piece], reach: int) -> Tensor:
    """Token scores of all chunks [H, N], not negative, to block scores [H, sum of B]: each token takes the best score
    within `reach` in its chunk.

    All chunks at once, each in a row of the longest one's blocks: on a GPU a chunk by itself is nothing but launches.
    """
    block, most = pieces[0].block, max(piece.blocks for piece in pieces)
    count, room = len(pieces), most * block
    tokens, filled = (
        torch.cat([torch.arange(n) + i * width for i, n in enumerate(sizes)]).to(scores.device)
        for sizes, width in (([p.tokens for p in pieces], room), ([p.blocks for p in pieces], most))
    )
    rows = scores.new_zeros(scores.shape[0], count * room).index_copy_(1, tokens, scores)
    spread = F.max_pool1d(rows.view(-1, count, room), 2 * reach + 1, stride=1, padding=reach).flatten(1)
    inside = torch.zeros_like(rows).index_copy_(1, tokens, spread.index_select(1, tokens))
    return inside.view(scores.shape[0], -1, block).sum(-1).index_select(1, filled)


def join(masses: Tensor, power: float) -> Tensor:
    """Block scores of several heads [H, N] to one distribution [N]: power mean of the heads' distributions."""
    joined = (masses / masses.sum(1, keepdim=True)).pow(power).mean(0).pow(1 / power)
    return joined / joined.sum()
