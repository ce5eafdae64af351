"""Static attention analysis of one chunk at ingest, and the stability of a model's layers. SamKV appendix A.1 and A.2.

Paper: Sparse Attention across Multiple-context KV Cache (AAAI-26, arXiv 2508.11661).

    A[i, j]   causal attention of row i to token j, mean over attention heads
    s_j       salience: mean of A[i, j] over the rows i > j
    rep_b     representative of block b: its token of largest salience. The first LANDMARKS tokens by salience are
              InfLLM's landmarks (its local score is this salience)
    alpha_b   importance exponent: A[i, rep_b] ~ x_i ** -alpha; a smaller one decays more slowly: more important
    u_b       unimportance: salience of the representative; a smaller one is less important

The axis x of the power law is a parameter (paper silent), see `Axis`. Attention is never stored per head: rows are
processed in slabs, and only the mean over heads is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ragkv.types import LANDMARKS

MIN_POINTS = 8
"""With fewer rows than this after a representative, alpha is +inf: the block is never important (paper silent)."""

FLOOR = 1e-12
"""Attention is clamped to this before the logarithm (paper silent)."""

SLAB, SLAB_ON_GPU = 256, 1024
"""Query rows processed at a time. A GPU has the memory for more, and small slabs cost mostly kernel launches there."""


Axis = Literal["row", "distance"]
"""The axis of the power law: the number of keys that row i sees, or its distance to the token (paper silent).

By distance, uniform attention makes late blocks look important; by row, every block gets alpha 1.
"""


@dataclass(frozen=True)
class Salience:
    """Salience of the blocks of one layer, on the device of the layer.

    Attributes:
        alpha: Importance exponent [B] float32.
        unimportance: Salience of the representative [B] float32.
        landmarks: Token indices [B, R] int32 by falling salience, with R = min(LANDMARKS, block). The first one is the
            representative. It also fills the row of a last block that has too few tokens.
    """

    alpha: Tensor
    unimportance: Tensor
    landmarks: Tensor


def analyse(q: Tensor, k: Tensor, *, block: int, before: int, scale: float, axis: Axis = "row") -> Salience:
    """Analyse one layer of a chunk.

    Args:
        q: Rotated queries [n, Hq, d].
        k: Rotated keys [before + n, Hkv, d].
        block: Tokens per block.
        before: The first `before` keys are the prefix that precedes the chunk.
        scale: Softmax scale.
        axis: The axis of the power law.
    """
    rows, device = q.shape[0], q.device
    row = torch.arange(rows, device=device)
    received = torch.zeros(rows, dtype=torch.float64, device=device)
    slabs = list(_slabs(q, k, before, scale))
    for start, attention in slabs:
        strictly_later = row[start : start + attention.shape[0], None] > row
        received += torch.where(strictly_later, attention[:, before:].double(), 0.0).sum(0)
    salience = received / (rows - 1 - row).double().clamp(min=1)
    blocks = -(-rows // block)
    padded = torch.full((blocks * block,), -1.0, dtype=torch.float64, device=device)
    padded[:rows] = salience
    landmarks = padded.view(blocks, block).argsort(dim=1, descending=True, stable=True)[:, :LANDMARKS]
    landmarks = landmarks + torch.arange(0, blocks * block, block, device=device)[:, None]
    landmarks = torch.where(landmarks < rows, landmarks, landmarks[:, :1])
    representative = landmarks[:, 0]
    columns = torch.cat([attention[:, before + representative] for _, attention in slabs])
    alpha = fit_exponents(columns, representative + 1, before, axis)
    return Salience(alpha.float(), salience[representative].float(), landmarks.int())


def fit_exponents(columns: Tensor, starts: Tensor, before: int = 0, axis: Axis = "row") -> Tensor:
    """Fit log A[i] = c - alpha log x_i by least squares.

    Args:
        columns: Attention [n, B] of every row to B tokens.
        starts: First row [B] of each fit, the one behind the token.
        before: Keys before row 0.
        axis: What x_i is.

    Returns:
        alpha [B] float64; +inf with fewer than MIN_POINTS rows.
    """
    row = torch.arange(columns.shape[0], device=columns.device)[:, None]
    used = row >= starts
    points = used.sum(0)
    y = columns.double().clamp(min=FLOOR).log()
    x = (row + (before + 1) if axis == "row" else (row - starts + 1).clamp(min=1)).double().log()
    x = torch.where(used, x - torch.where(used, x, 0.0).sum(0) / points.clamp(min=1), 0.0)
    alpha = -(x * y).sum(0) / (x * x).sum(0)
    return torch.where(points < MIN_POINTS, math.inf, alpha)


def low_outliers(values: Sequence[float]) -> list[int]:
    """Return the indices of values below mean - 3 sigma (PauTa criterion, sample sigma).

    With fewer than 11 values there is never one: the largest possible |z| of N values is (N-1)/sqrt(N).
    """
    if len(values) < 2:
        return []
    mean = math.fsum(values) / len(values)
    sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return [i for i, value in enumerate(values) if sigma > 0 and value < mean - 3 * sigma]


def outlier_tokens(alpha: Tensor, representative: Tensor, middle: range, layers: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of middle blocks worth recomputing: representatives whose alpha is a low outlier.

    The exponents of `layers` (N*) are pooled, since one layer of a short chunk has too few for the criterion. With
    fewer than 11 in all, the single smallest one counts (paper silent).

    Args:
        alpha: Importance exponents [L, B].
        representative: Token indices [L, B].
        middle: Middle blocks.
        layers: Stable layers.
    """
    pool = [(float(alpha[layer, b]), int(representative[layer, b])) for layer in layers for b in middle]
    pool = [(value, token) for value, token in pool if math.isfinite(value)]
    if not pool:
        return ()
    if len(pool) < 11:
        return (min(pool)[1],)
    return tuple(sorted({pool[i][1] for i in low_outliers([value for value, _ in pool])}))


def stability(alphas: Sequence[Tensor]) -> list[int]:
    """Score every layer over a set of chunks (A.2): count the chunks whose best block stands out in the layer.

    beta is the block with the best rank by importance, averaged over layers. A layer scores if the exponent of beta is
    a low outlier among the exponents of the layer's blocks (paper silent on the sample).

    Args:
        alphas: Importance exponents [L, B], per chunk.
    """
    scores = [0] * alphas[0].shape[0]
    for alpha in alphas:
        finite = alpha.isfinite().all(0).nonzero()[:, 0]
        values = alpha[:, finite]
        if values.shape[1] < 2:
            continue
        ranks = values.argsort(1).argsort(1).double()
        beta = int(ranks.mean(0).argmin())
        for layer in range(values.shape[0]):
            scores[layer] += beta in low_outliers(values[layer].tolist())
    return scores


def _slabs(q: Tensor, k: Tensor, before: int, scale: float) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, attention [slab, before + n]): the mean over heads, softmax over what each row sees."""
    group, most = q.shape[1] // k.shape[1], SLAB_ON_GPU if q.is_cuda else SLAB
    for start in range(0, q.shape[0], most):
        rows = q[start : start + most]
        stop = before + start + rows.shape[0]
        scores = torch.einsum("tgrd,ngd->grtn", rows.view(rows.shape[0], -1, group, rows.shape[2]), k[:stop]) * scale
        seen = before + torch.arange(start, start + rows.shape[0], device=q.device)
        hidden = torch.arange(stop, device=q.device) > seen[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32)
        attention = torch.zeros(rows.shape[0], before + q.shape[0], device=q.device)
        attention[:, :stop] = weights.mean((0, 1))
        yield start, attention
