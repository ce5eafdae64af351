"""Static attention analysis of one chunk at ingest, and the stability of a model's layers. SamKV appendix A.1 and A.2.

Paper: Sparse Attention across Multiple-context KV Cache (AAAI-26, arXiv 2508.11661).

    A[i, j]   causal attention of row i to token j, mean over attention heads
    s_j       salience: mean of A[i, j] over the rows i > j
    rep_b     representative of block b: its token of largest salience. The first LANDMARKS tokens by salience are
              InfLLM's landmarks (its local score is this salience)
    alpha_b   importance exponent: A[i, rep_b] ~ e^c x_i ** -alpha; a smaller one decays more slowly: more important
    u_b       unimportance: salience of the representative; a smaller one is less important

The axis x and the constant c of the power law are parameters (paper silent), see `Axis` and `Constant`. Attention is
never stored per head: only the mean over heads is kept (kernels/head_mean.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.kernels.head_mean import mean_attention
from ragkv.types import LANDMARKS

MIN_POINTS = 8
"""With fewer rows than this after a representative, alpha is +inf: the block is never important (paper silent)."""

FLOOR = 1e-12
"""Attention is clamped to this before the logarithm (paper silent)."""

Axis = Literal["row", "distance"]
"""The axis of the power law: the number of keys that row i sees, or its distance to the token (paper silent).

By distance, uniform attention makes late blocks look important; by row, every block gets alpha 1.
"""


Constant = Literal["free", "common", "origin"]
"""The constant c of the power law (paper silent): `free` for each block, `common` to all blocks of a layer, or 0, so
that the line goes through the `origin`.

The paper orders blocks by their exponents, because a smaller one means more attention overall. That holds only between
lines with the same constant.
"""


@dataclass(frozen=True)
class Salience:
    """Salience of the blocks of G layers, on their device.

    Attributes:
        alpha: Importance exponent [G, B] float32.
        unimportance: Salience of the representative [G, B] float32.
        landmarks: Token indices [G, B, R] int32 by falling salience, with R = min(LANDMARKS, block). The first one is
            the representative. It also fills the row of a last block that has too few tokens.
    """

    alpha: Tensor
    unimportance: Tensor
    landmarks: Tensor


def analyse(
    q: Tensor,
    k: Tensor,
    *,
    block: int,
    before: int,
    scale: float,
    axis: Axis = "row",
    constant: Constant = "free",
) -> Salience:
    """Analyse G layers of a chunk.

    Args:
        q: Rotated queries [G, n, Hq, d].
        k: Rotated keys [G, before + n, Hkv, d].
        block: Tokens per block.
        before: The first `before` keys are the prefix that precedes the chunk.
        scale: Softmax scale.
        axis: The axis of the power law.
        constant: Its constant.
    """
    rows, device = q.shape[1], q.device
    attention = mean_attention(q, k, scale=scale)[..., before:]
    attention.diagonal(dim1=1, dim2=2).zero_()  # only later rows count, for salience and for exponents
    later = torch.arange(rows - 1, -1, -1, device=device).clamp(min=1)
    salience = attention.sum(1, dtype=torch.float64) / later.double()
    blocks = -(-rows // block)
    padded = F.pad(salience, (0, blocks * block - rows), value=-1.0)
    landmarks = padded.unflatten(1, (blocks, block)).argsort(dim=-1, descending=True, stable=True)[..., :LANDMARKS]
    landmarks = landmarks + torch.arange(0, blocks * block, block, device=device)[:, None]
    landmarks = torch.where(landmarks < rows, landmarks, landmarks[..., :1])
    representative = landmarks[..., 0]
    columns = attention.gather(2, representative[:, None].expand(-1, rows, -1))
    alpha = fit_exponents(columns, representative + 1, before, axis=axis, constant=constant)
    return Salience(alpha.float(), salience.gather(1, representative).float(), landmarks.int())


def fit_exponents(
    columns: Tensor, starts: Tensor, before: int = 0, *, axis: Axis = "row", constant: Constant = "free"
) -> Tensor:
    """Fit log A[i] = c - alpha log x_i by least squares.

    Args:
        columns: Attention [..., n, B] of every row to B tokens.
        starts: First row [..., B] of each fit, the one behind the token.
        before: Keys before row 0.
        axis: What x_i is.
        constant: What c is.

    Returns:
        alpha [..., B] float64; +inf with fewer than MIN_POINTS rows.
    """
    row, starts = torch.arange(columns.shape[-2], device=columns.device)[:, None], starts[..., None, :]
    used = row >= starts
    points = used.sum(-2)
    y = columns.double().clamp(min=FLOOR).log()
    x = (row + (before + 1) if axis == "row" else (row - starts + 1).clamp(min=1)).double().log()
    x, y = torch.where(used, x, 0.0), torch.where(used, y, 0.0)
    sum_x, sum_y, squares, products = x.sum(-2), y.sum(-2), (x * x).sum(-2), (x * y).sum(-2)
    if constant == "free":
        x = torch.where(used, x - (sum_x / points.clamp(min=1))[..., None, :], 0.0)
        alpha = -(x * y).sum(-2) / (x * x).sum(-2)
    else:
        # The best slope for a given c, and the c that leaves the smallest error with the best slope of every block.
        fitted, share = points >= MIN_POINTS, sum_x / squares
        free = torch.where(fitted, sum_y - share * products, 0.0).sum(-1, keepdim=True)
        c = free / torch.where(fitted, points - share * sum_x, 0.0).sum(-1, keepdim=True)
        alpha = -(products - (c if constant == "common" else 0.0) * sum_x) / squares
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
