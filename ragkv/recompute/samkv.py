"""SamKV: sparse attention across multiple-context KV caches. One question reads many chunks that were encoded alone.

Paper: Ziyi Cao et al., Sparse Attention across Multiple-context KV Cache, AAAI-26, arXiv 2508.11661.

    notation here   paper              meaning
    q_que  [L,Hq,d]   Q_que            generic query: mean over question tokens in the composite pass
    q_loc  [D,L,Hq,d] Q_doc-i loc      local query of each chunk, stored at ingest
    q_hat  [D,L,Hq,d] Q^_doc-i         personalised query, Eq. 1
    s                 <Q, K>           summed over attention heads; query heads of a group add up on their kv head
    anchor            K_anc            mean of the mean keys of the fixed (initial and local) blocks
    p                 P_doc-i          share of the middle blocks to retrieve, Eq. 2 and 3
    layers            N*               stable layers

Static analysis (A.1, A.2) is in analysis.py, digests are in digest.py, and compared.py prepares what is compared.

Differs from the paper: nothing is left out. Where the paper is silent or contradicts itself, the choice is a field of
`SamKV`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ragkv.recompute.all_chunks import AllChunks
from ragkv.recompute.analysis import outlier_tokens
from ragkv.recompute.base import (
    Blocks,
    Piece,
    Plan,
    Tokens,
    fixed_blocks,
    inexact_tokens,
    middle_blocks,
    padding_for,
    require_between,
)
from ragkv.recompute.compared import Rotate, compared_vectors
from ragkv.recompute.evidence import WITHOUT_PASS, Kind, piece_logits


@dataclass(frozen=True)
class SamKV(AllChunks):
    """Parameters. Defaults follow the paper where it speaks, else the recommended reading.

    Attributes:
        initial: Fixed blocks at the start of every chunk (section 4.1: 1).
        local: Fixed blocks at the end of every chunk (section 4.1: 2).
        layers: Stable layers N*, 0-based (A.2).
        update: `overwrite` stored rows, or `fusion` with them (Eq. 4).
        middle: Blocks taken from the middle: `top_p` (section 3.2), `none` (ablation) or `all` (oracle).
        bias: Whether queries get the personalised bias of Eq. 1; False compares with the generic query (ablation).
        repair: Tokens recomputed: by the `rules` of section 3.3, every `kept` one, or `none` (ablation).
        extremes: K_max and K_min: `static` from ingest, or the `dynamic` best and worst for this query (paper silent).
        same: P where one block is K_max and K_min: 0, or K_min is the least salient of the `others` (paper silent).
        compare: Vectors are compared as they are `before` RoPE, where those of different positions are comparable, or
            `after` it, at their places in the stitched context (paper silent).
        cosine: Cosine of Eq. 1: `flat` over all attention heads at once, or per `head` (paper silent).
        anchor: K_anc: the mean of the fixed `blocks`' mean keys, or one mean over all their `tokens`, which counts a
            partial block less (paper silent).
        rounding: The budget P_i M_i is rounded `up`, to the `nearest` number or `down` (paper silent).
        normalise: Scores before the cross-document filter: by `query` norm, or `min_max` per chunk (paper silent).
        total: "Total block count" of the filter: the retrieved `candidates`, or `all` blocks (paper silent).
        shared: One union of the N* selections for every layer, instead of one selection per layer (paper silent).
        least: Share of a chunk's middle blocks that is retrieved at least (ablation).
        choose: Blocks are ranked by the `query`, or by scout's `evidence` at the same budgets (ablation).
        theta: Cosine of Eq. 4: one per kv `head`, or one per `token` over all of them (paper silent). K and V always
            have their own.
        means: What the mean keys are of, as `key_means` of the profile. `rotated` ones are compared after RoPE.
        rotate: RoPE of the model, which `compare="after"` needs.
    """

    initial: int = 1
    local: int = 2
    layers: tuple[int, ...] = ()
    update: Literal["overwrite", "fusion"] = "fusion"
    middle: Literal["top_p", "none", "all"] = "top_p"
    bias: bool = True
    repair: Literal["rules", "kept", "none"] = "rules"
    extremes: Literal["static", "dynamic"] = "static"
    cosine: Literal["flat", "head"] = "flat"
    normalise: Literal["query", "min_max"] = "query"
    total: Literal["candidates", "all"] = "candidates"
    shared: bool = False
    same: Literal["none", "others"] = "none"
    least: float = 0.0
    choose: Literal["query", "evidence"] = "query"
    compare: Literal["before", "after"] = "before"
    anchor: Literal["blocks", "tokens"] = "blocks"
    rounding: Literal["up", "nearest", "down"] = "up"
    theta: Literal["head", "token"] = "head"
    means: Literal["plain", "rotated"] = "plain"
    rotate: Rotate | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_between(0, math.inf, initial=self.initial)
        require_between(1, math.inf, local=self.local)
        require_between(0, 1, least=self.least)
        if self.compare == "after" and self.rotate is None:
            raise ValueError("compare=after needs the model's RoPE")
        if self.compare == "before" and self.means == "rotated":
            raise ValueError("compare=before needs keys before RoPE, and the profile has key_means=rotated")

    @property
    def evidence(self) -> tuple[Kind, ...]:
        """The kinds of evidence that pieces need."""
        return WITHOUT_PASS if self.choose == "evidence" else ()

    def composite_blocks(self, pieces: Sequence[Piece]) -> tuple[Blocks, ...]:
        """Return the initial and local blocks of every chunk: the composite cache (section 3.1)."""
        return tuple(fixed_blocks(piece.blocks, self.initial, self.local) for piece in pieces)

    def composite_layers(self, layers: int) -> int:
        """Return `layers`: every layer selects with its own query."""
        return layers

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor], read: Sequence[Blocks] = ()) -> Plan:
        """Select blocks (section 3.2) and recompute sets (section 3.3). See `Method.plan`."""
        fixed = self.composite_blocks(pieces)
        if self.middle == "all":
            selected = [[tuple(middle_blocks(p.blocks, self.initial, self.local)) for p in pieces]] * len(queries)
        elif self.middle == "none":
            selected = [[()] * len(pieces)] * len(queries)
        else:
            selected = self._retrieve(pieces, queries)
        kept = tuple(tuple(tuple(sorted({*f, *m})) for f, m in zip(fixed, layer, strict=True)) for layer in selected)
        recompute = self._recompute(pieces, fixed, kept)
        blend = {"head": fuse, "token": fuse_tokens}[self.theta] if self.update == "fusion" else None
        return Plan(kept, recompute, padding_for(pieces, kept, recompute), blend)

    def _retrieve(self, pieces: Sequence[Piece], queries: Sequence[Tensor]) -> list[list[Blocks]]:
        """Select middle blocks per layer and chunk: personalised query, Top-P, cross-document filter."""
        rotation = self.rotate if self.compare == "after" else None
        q_que, q_loc, keys = compared_vectors(pieces, queries, self.local, rotation, self.means)
        q_hat = personalise(q_que, q_loc, self.cosine) if self.bias else q_que.expand_as(q_loc)
        scores = [score(q_hat[i], mean_keys) for i, mean_keys in enumerate(keys)]
        budgets = [self._budget(piece, q_hat[i], keys[i], scores[i]) for i, piece in enumerate(pieces)]
        norms = q_hat.flatten(2).norm(dim=-1).clamp(min=1e-12)  # [D, L]
        pairs = zip(pieces, scores, strict=True)
        ranked = [self._normalised(piece, s, norms[i]).tolist() for i, (piece, s) in enumerate(pairs)]
        if self.choose == "evidence":
            ranked = self._by_evidence(pieces, len(queries))
        size = sum(piece.blocks for piece in pieces) if self.total == "all" else sum(budgets)
        layers = [
            self._filter(pieces, budgets, [chunk[layer] for chunk in ranked], size) for layer in range(len(queries))
        ]
        if not self.shared:
            return layers
        union = [tuple(sorted({b for layer in self.layers for b in layers[layer][i]})) for i in range(len(pieces))]
        return [union] * len(queries)

    @staticmethod
    def _by_evidence(pieces: Sequence[Piece], layers: int) -> list[list[list[float]]]:
        """Return scout's logits of the blocks [chunk][layer][block], the same in every layer."""
        logits = piece_logits(pieces, WITHOUT_PASS)
        return [[chunk.tolist()] * layers for chunk in logits.split([piece.blocks for piece in pieces])]

    def _budget(self, piece: Piece, q_hat: Tensor, mean_keys: Tensor, scores: Tensor) -> int:
        """Compute k_i = P_i M_i, with P_i averaged over N* (Eq. 2, 3), from scores [L, B] of the mean keys."""
        middle = middle_blocks(piece.blocks, self.initial, self.local)
        if not middle:
            return 0
        anchor = score(q_hat, self._anchor(piece, mean_keys))[:, 0].tolist()
        rows = scores.tolist()
        total = 0.0
        for layer in self.layers:
            s = rows[layer][middle.start : middle.stop]
            if self.extremes == "static":
                most = int(piece.digest.alpha[layer, middle.start : middle.stop].argmin())
                salience = piece.digest.unimportance[layer, middle.start : middle.stop].tolist()
                if self.same == "others" and len(s) > 1:
                    salience[most] = math.inf
                s_max, s_min = s[most], s[salience.index(min(salience))]
            else:
                s_max, s_min = max(s), min(s)
            total += top_p(s_max, anchor[layer], s_min)
        share = max(self.least, total / len(self.layers))
        return round_budget(share * len(middle), self.rounding)  # Eq. (3)

    def _anchor(self, piece: Piece, mean_keys: Tensor) -> Tensor:
        """Compute K_anc [L, 1, Hkv, d] from mean keys [L, B, Hkv, d]."""
        fixed = fixed_blocks(piece.blocks, self.initial, self.local)
        if self.anchor == "blocks":
            return mean_keys[:, list(fixed)].mean(1, keepdim=True)
        tokens = torch.tensor([float(len(piece.span(b))) for b in fixed]).to(mean_keys)
        return (mean_keys[:, list(fixed)] * tokens[:, None, None]).sum(1, keepdim=True) / tokens.sum()

    def _normalised(self, piece: Piece, scores: Tensor, norms: Tensor) -> Tensor:
        """Make scores [L, B] comparable across chunks."""
        if self.normalise == "query":
            return scores / norms[:, None]
        middle = scores[:, middle_blocks(piece.blocks, self.initial, self.local)]
        if middle.shape[1] == 0:
            return scores
        low, high = middle.min(1, keepdim=True).values, middle.max(1, keepdim=True).values
        return (scores - low) / (high - low).clamp(min=1e-12)

    def _filter(
        self, pieces: Sequence[Piece], budgets: Sequence[int], scores: Sequence[Sequence[float]], size: int
    ) -> list[Blocks]:
        """Filter one layer: take the top k_i blocks of every chunk, then the best ceil(size / D) of all of them."""
        candidates: list[tuple[float, int, int]] = []
        for i, (piece, k) in enumerate(zip(pieces, budgets, strict=True)):
            middle = middle_blocks(piece.blocks, self.initial, self.local)
            best = sorted(middle, key=lambda b: (-scores[i][b], b))[:k]
            candidates += [(-scores[i][b], i, b) for b in best]
        if len(pieces) > 1:  # a single chunk competes with nothing
            candidates = sorted(candidates)[: math.ceil(size / len(pieces))]
        return [tuple(sorted(b for _, j, b in candidates if j == i)) for i in range(len(pieces))]

    def _recompute(
        self, pieces: Sequence[Piece], fixed: Sequence[Blocks], kept: Sequence[Sequence[Blocks]]
    ) -> tuple[tuple[Tokens, ...], ...]:
        """Compute R_l: tokens of the fixed blocks, and outlier tokens of the selected middle blocks (section 3.3)."""
        if self.repair == "none":
            return tuple(((),) * len(pieces) for _ in kept)
        if self.repair == "kept":
            return tuple(inexact_tokens(pieces, layer) for layer in kept)
        base = inexact_tokens(pieces, fixed)
        outliers = [() if piece.exact else self._outliers(piece) for piece in pieces]
        return tuple(
            tuple(
                tuple(sorted({*rows, *(t for t in outliers[i] if t // pieces[i].block in layer[i])}))
                for i, rows in enumerate(base)
            )
            for layer in kept
        )

    def _outliers(self, piece: Piece) -> Tokens:
        middle = middle_blocks(piece.blocks, self.initial, self.local)
        return outlier_tokens(piece.digest.alpha, piece.digest.representative, middle, self.layers)


def personalise(q_que: Tensor, q_loc: Tensor, cosine: Literal["flat", "head"] = "flat") -> Tensor:
    """Compute Q^_i = Q_que + 1/(D-1) sum_{j != i} |cos(Q_que, Q_loc_j)| Q_loc_j. Eq. (1)

    With one chunk, the generic query is returned unchanged.

    Args:
        q_que: Generic query [L, Hq, d].
        q_loc: Local queries [D, L, Hq, d].
        cosine: As in `SamKV`.

    Returns:
        Personalised queries [D, L, Hq, d].
    """
    chunks = q_loc.shape[0]
    if chunks == 1:
        return q_que[None]
    if cosine == "flat":
        weight = torch.cosine_similarity(q_que.flatten(1)[None], q_loc.flatten(2), dim=-1).abs()[..., None, None]
    else:
        weight = torch.cosine_similarity(q_que[None], q_loc, dim=-1).abs()[..., None]
    weighted = weight * q_loc
    return q_que + (weighted.sum(0, keepdim=True) - weighted) / (chunks - 1)  # Eq. (1)


def score(query: Tensor, keys: Tensor) -> Tensor:
    """Compute s(x) = <query, key> over all attention heads: [L, B] of query [L, Hq, d] and keys [L, B, Hkv, d]."""
    group = query.shape[1] // keys.shape[2]
    return torch.einsum("lgd,lbgd->lb", query.view(query.shape[0], -1, group, query.shape[2]).sum(2), keys)


def top_p(s_max: float, s_anchor: float, s_min: float) -> float:
    """Compute P of one layer: (maximum - anchor) / (maximum - minimum). Eq. (2)"""
    if s_min < s_anchor <= s_max:
        return (s_max - s_anchor) / (s_max - s_min)  # Eq. (2)
    return 0.0


def round_budget(blocks: float, rounding: Literal["up", "nearest", "down"]) -> int:
    """Round a number of blocks. What float arithmetic adds to a whole number does not count."""
    if rounding == "nearest":
        return math.floor(blocks + 0.5 + 1e-9)
    return math.ceil(blocks - 1e-9) if rounding == "up" else math.floor(blocks + 1e-9)


def fuse(new: Tensor, old: Tensor) -> Tensor:
    """Compute theta new + (1 - theta) old with theta = cos(new, old), clamped to [0, 1]. Eq. (4)

    theta is per token and kv head.

    Args:
        new: New rows [m, Hkv, d].
        old: Stored rows [m, Hkv, d], with the same rotation.
    """
    theta = torch.cosine_similarity(new, old, dim=-1).clamp(0, 1)[..., None]
    return theta * new + (1 - theta) * old  # Eq. (4)


def fuse_tokens(new: Tensor, old: Tensor) -> Tensor:
    """Compute `fuse` with one theta per token: the cosine of its rows over all kv heads."""
    theta = torch.cosine_similarity(new.flatten(1), old.flatten(1), dim=-1).clamp(0, 1)[:, None, None]
    return theta * new + (1 - theta) * old  # Eq. (4)
