"""Attention over scattered queries and keys: one signature, causality from positions.

Every caller states where its queries and keys stand. A key is visible to a query iff key position <= query position;
shapes and alignments say nothing (a repaired token in the middle of the context sees what is before it, not
what a bottom-right triangle would show it).

    q [T, Hq, d]   k, v [n, Hkv, d]   q_pos [T], k_pos [n] int64 on the CPU   out [T, Hq, d]
    query head h reads key/value head h // (Hq // Hkv)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ragkv.kernels.block_sparse import BlockSparseIndex


@dataclass(frozen=True)
class MaskPlan:
    """Who sees what: worked out once for all layers whose rows and keys stand at the same positions.

    q_pos [T], k_pos [n] · kind: `square`, the same rows in order; `part`, positions decide; `whole`, every query sees
    every key, told on a CPU only · q_at, k_at: positions as int32 on the GPU, lists: the keys that a tile of queries
    may see there (attention over lists); None elsewhere.
    """

    q_pos: Tensor
    k_pos: Tensor
    kind: Literal["square", "whole", "part"]
    q_at: Tensor | None = None
    k_at: Tensor | None = None
    index: BlockSparseIndex | None = None

    def to(self, device: torch.device) -> MaskPlan:
        """The same for rows on another device."""
        if self.index is None or self.q_at is None or self.k_at is None:
            return self
        lists, at = self.index, [each.to(device) for each in (self.q_at, self.k_at)]
        blocks, counts, clear = (each.to(device) for each in (lists.blocks, lists.counts, lists.clear))
        return replace(self, q_at=at[0], k_at=at[1], index=replace(lists, blocks=blocks, counts=counts, clear=clear))


def plan_mask(q_pos: Tensor, k_pos: Tensor, device: torch.device, alike: int) -> MaskPlan:
    """What rows on `device` see. Positions int64 on the CPU; alike: query heads that read the same keys."""
    if q_pos.shape == k_pos.shape and torch.equal(q_pos, k_pos) and _increasing(q_pos):
        return MaskPlan(q_pos, k_pos, "square")
    if device.type != "cuda" or q_pos.shape[0] == 0:
        whole = q_pos.shape[0] == 0 or bool((q_pos.min() >= k_pos.max()).item())
        return MaskPlan(q_pos, k_pos, "whole" if whole else "part")
    # Also where all see everything: one way for whatever stands behind a context, and torch's kernels for that were no
    # quicker (docs/lab-notes.md).
    from ragkv.kernels.block_sparse import dense_index

    lists = dense_index(q_pos, k_pos, alike)
    q_at, k_at, blocks, counts, clear = copy_to_device(
        [each.int() for each in (q_pos, k_pos, lists.blocks, lists.counts, lists.clear)], device
    )
    there = replace(lists, blocks=blocks, counts=counts, clear=clear)
    return MaskPlan(q_pos, k_pos, "part", q_at, k_at, there)


def copy_to_device(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of one dtype on the CPU -> the same on the device, in one copy that nothing waits for.

    Each begins at a multiple of 16 bytes: a kernel is compiled once for tensors that do and once for others, and where
    the next part begins would differ from one request to another.
    """
    step = 16 // parts[0].dtype.itemsize
    sizes = [-(-part.numel() // step) * step for part in parts]
    whole = torch.cat(
        [F.pad(part.flatten(), (0, size - part.numel())) for part, size in zip(parts, sizes, strict=True)]
    )
    if device.type == "cuda":
        # Memory that is pinned is not used anew before the copy out of it is done.
        whole = whole.pin_memory()
    whole = whole.to(device, non_blocking=True)
    split = whole.split(sizes)
    return [each[: part.numel()].view(part.shape) for each, part in zip(split, parts, strict=True)]


def attend(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> Tensor:
    """Exact attention, dispatched to the fused kernel that fits what the positions show.

    Returns [T, Hq, d]. Every query must see at least one key (its own row is always in the cache).
    """
    return attend_planned(q, k, v, plan_mask(q_pos, k_pos, q.device, q.shape[1] // k.shape[1]), scale=scale)


def attend_planned(q: Tensor, k: Tensor, v: Tensor, seen: MaskPlan, *, scale: float) -> Tensor:
    """As `attend`, of what the queries see."""
    if q.shape[0] == 0:
        return q
    if seen.kind == "square":
        # Queries and keys are the same rows in order: the one case where a square causal kernel is right.
        out = F.scaled_dot_product_attention(
            _heads(q), _heads(k), _heads(v), is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    if seen.index is not None and seen.q_at is not None and seen.k_at is not None:
        from ragkv.kernels.block_sparse import attend_block_sparse

        return attend_block_sparse(q, k, v, seen.q_at, seen.k_at, seen.index, scale=scale)[0]
    group = q.shape[1] // k.shape[1]
    mask = None
    if seen.kind == "part":
        mask = visible(seen.q_pos, seen.k_pos).to(q.device).repeat(group, 1)
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
