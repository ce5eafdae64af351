"""Attention in torch with its log-sum-exp, for positions in any order. Tensors are those of `attention.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_lse(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Compute exact attention with its log-sum-exp, so that partial results can be merged.

    Returns:
        The output [T, Hq, d] and the log-sum-exp [T, Hq] (natural logarithm). A query that sees no key gives output 0
        and log-sum-exp -inf, the identity of `attention.merge`.
    """
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("tgrd,ngd->tgrn", q.view(q.shape[0], -1, group, q.shape[2]), k) * scale
    hidden = ~visible(q_pos, k_pos).to(q.device)
    scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    out = torch.einsum("tgrn,ngd->tgrd", weights, v)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def visible(q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Return bool [T, n]: the keys that each query may see."""
    return k_pos[None, :] <= q_pos[:, None]
