"""Attention over scattered queries and keys: one signature, causality from positions.

Every caller states where its queries and keys stand. A key is visible to a query iff key position <= query position;
shapes and alignments say nothing (a repaired token in the middle of the context sees what is before it, not
what a bottom-right triangle would show it).

    q [T, Hq, d]   k, v [n, Hkv, d]   q_pos [T], k_pos [n] int64 on the CPU   out [T, Hq, d]
    query head h reads key/value head h // (Hq // Hkv)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> Tensor:
    """Exact attention, dispatched to the fused kernel that fits what the positions show.

    Returns [T, Hq, d]. Every query must see at least one key (its own row is always in the cache).
    """
    if q.shape[0] == 0:
        return q
    if q_pos.shape == k_pos.shape and torch.equal(q_pos, k_pos) and _increasing(q_pos):
        # Queries and keys are the same rows in order: the one case where a square causal kernel is right.
        out = F.scaled_dot_product_attention(
            _heads(q), _heads(k), _heads(v), is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    group = q.shape[1] // k.shape[1]
    if bool((q_pos.min() >= k_pos.max()).item()):
        mask = None
    else:
        mask = visible(q_pos, k_pos).to(q.device).repeat(group, 1)
    # The g query heads of a key/value head become g*T rows over it, so keys are read once and never repeated.
    rows, d = q.shape[0], q.shape[2]
    folded = q.view(rows, -1, group, d).permute(1, 2, 0, 3).reshape(1, -1, group * rows, d)
    out = F.scaled_dot_product_attention(folded, _heads(k), _heads(v), attn_mask=mask, scale=scale)
    return out.view(-1, group, rows, d).permute(2, 0, 1, 3).reshape(rows, -1, d)


def attend_lse(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Reference attention that also returns the log-sum-exp [T, Hq] (natural log), for merging partial results.

    A query that sees no key gives output 0 and -inf: the identity of `merge`.
    """
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("tgrd,ngd->tgrn", q.view(q.shape[0], -1, group, q.shape[2]), k) * scale
    hidden = ~visible(q_pos, k_pos).to(q.device)
    scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    out = torch.einsum("tgrn,ngd->tgrd", weights, v)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combine (out [T, Hq, d], lse [T, Hq]) over disjoint key sets into the result over their union.

    l = logaddexp(l_A, l_B), o = o_A exp(l_A - l) + o_B exp(l_B - l); any order gives the same.
    """
    lses = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - torch.where(lse.isinf(), 0.0, lse))
    out = sum(weight[..., None] * part for weight, (part, _) in zip(weights, parts, strict=True))
    return torch.as_tensor(out), lse


def visible(q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """bool [T, n]: which keys each query may see."""
    return k_pos[None, :] <= q_pos[:, None]


def _increasing(positions: Tensor) -> bool:
    return bool((positions[1:] > positions[:-1]).all().item())


def _heads(x: Tensor) -> Tensor:
    """[rows, heads, d] -> [1, heads, rows, d], a view."""
    return x.transpose(0, 1)[None]
