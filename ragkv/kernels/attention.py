"""Attention over scattered queries and keys, with causality from positions.

Every caller gives the positions of its queries and keys. A query sees a key if and only if the key's position is not
after its own. Shapes and alignment do not matter: a repaired token in the middle of the context sees what precedes it,
and not what a bottom-right triangular mask would show.

    q [T, Hq, d]   k, v [n, Hkv, d]   q_pos [T], k_pos [n] int64 on the CPU   out [T, Hq, d]
    query head h reads key/value head h // (Hq // Hkv)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.kernels.attention_reference import visible
from ragkv.kernels.attention_scores import ScoreTile, attend_scores, score_tiles
from ragkv.kernels.attention_tiles import attend_tiles, supports_tiles
from ragkv.kernels.block_index import BlockSparseIndex, dense_index
from ragkv.kernels.block_sparse import attend_block_sparse


@dataclass(frozen=True)
class MaskPlan:
    """Visibility of keys, computed once for all layers whose rows and keys have the same positions.

    Attributes:
        q_pos: [T] int64, on the CPU.
        k_pos: [n] int64, on the CPU.
        kind: `square` where queries and keys are the same rows in order; `whole` where every query sees every key
            (detected on a CPU only); `part` where positions decide.
        device_q_pos: `q_pos` as int32 on the GPU, where block-sparse attention runs.
        device_k_pos: `k_pos` as int32 on the GPU, likewise.
        index: the visible keys of each tile of queries, likewise.
        window: how many of the last positions a query sees; None for all.
    """

    q_pos: Tensor
    k_pos: Tensor
    kind: Literal["square", "whole", "part"]
    device_q_pos: Tensor | None = None
    device_k_pos: Tensor | None = None
    index: BlockSparseIndex | None = None
    window: int | None = None
    _tiles: dict[torch.device, list[ScoreTile]] = field(default_factory=dict)

    def tiles(self, device: torch.device) -> list[ScoreTile]:
        """The keys of each tile of queries, for attention with scores."""
        if device not in self._tiles:
            self._tiles[device] = score_tiles(self.q_pos, self.k_pos, self.window, device)
        return self._tiles[device]

    @cached_property
    def visible(self) -> Tensor:
        """Whether each query sees each key [T, n], on the CPU."""
        return visible(self.q_pos, self.k_pos)

    def fits(self, q_pos: Tensor, k_pos: Tensor) -> bool:
        """Whether the plan is one for these positions."""
        return self.q_pos is q_pos and torch.equal(self.k_pos, k_pos)

    def to(self, device: torch.device) -> MaskPlan:
        """Return the same plan for rows on another device."""
        if self.index is None or self.device_q_pos is None or self.device_k_pos is None:
            return self
        index, positions = self.index, [each.to(device) for each in (self.device_q_pos, self.device_k_pos)]
        blocks, counts, clear = (each.to(device) for each in (index.blocks, index.counts, index.clear))
        moved = replace(index, blocks=blocks, counts=counts, clear=clear)
        return replace(self, device_q_pos=positions[0], device_k_pos=positions[1], index=moved)


def plan_mask(q_pos: Tensor, k_pos: Tensor, device: torch.device, group: int, window: int | None = None) -> MaskPlan:
    """Plan the mask of rows that are on `device`.

    Args:
        q_pos: [T] int64, on the CPU.
        k_pos: [n] int64, on the CPU.
        device: where attention runs.
        group: query heads that read the same key/value head.
        window: how many of the last positions a query sees; None for all.
    """
    if window is not None and q_pos.shape[0] and bool((q_pos.max() - k_pos.min() >= window).item()):
        return MaskPlan(q_pos, k_pos, "part", window=window)
    if q_pos.shape == k_pos.shape and torch.equal(q_pos, k_pos) and _increasing(q_pos):
        return MaskPlan(q_pos, k_pos, "square")
    if device.type != "cuda" or q_pos.shape[0] == 0:
        whole = q_pos.shape[0] == 0 or bool((q_pos.min() >= k_pos.max()).item())
        return MaskPlan(q_pos, k_pos, "whole" if whole else "part")
    # A GPU takes this path also where every query sees every key: torch's kernels were no faster for that
    # (docs/lab-notes.md).
    index = dense_index(q_pos, k_pos, group)
    device_q_pos, device_k_pos, blocks, counts, clear = copy_to_device(
        [each.int() for each in (q_pos, k_pos, index.blocks, index.counts, index.clear)], device
    )
    moved = replace(index, blocks=blocks, counts=counts, clear=clear)
    return MaskPlan(q_pos, k_pos, "part", device_q_pos, device_k_pos, moved)


def copy_to_device(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy CPU tensors of one dtype to a device in one transfer that the host does not wait for.

    Each copy begins at a multiple of 16 bytes. Triton compiles a kernel once for aligned and once for unaligned
    tensors, and without padding the alignment would change from one request to the next.
    """
    step = 16 // parts[0].dtype.itemsize
    sizes = [-(-part.numel() // step) * step for part in parts]
    whole = torch.cat(
        [F.pad(part.flatten(), (0, size - part.numel())) for part, size in zip(parts, sizes, strict=True)]
    )
    split = index_to_device(whole, device).split(sizes)
    return [each[: part.numel()].view(part.shape) for each, part in zip(split, parts, strict=True)]


def index_to_device(index: Tensor, device: torch.device) -> Tensor:
    """Return row numbers, positions or masks on a device. The host does not wait for a copy from the CPU to a GPU."""
    if index.device.type == "cpu" and device.type == "cuda":
        # PyTorch does not reuse pinned memory before the copy out of it is done.
        return index.pin_memory().to(device, non_blocking=True)
    return index.to(device)


def attend(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> Tensor:
    """Compute exact attention [T, Hq, d] with the fastest kernel that the positions allow.

    Every query must see at least one key (its own row is always in the cache).
    """
    return attend_planned(q, k, v, plan_mask(q_pos, k_pos, q.device, q.shape[1] // k.shape[1]), scale=scale)


def attend_planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: MaskPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attend` with a mask that was planned before, and what else `attention_scores` describes."""
    if q.shape[0] == 0:
        return q
    if plan.window is not None or softcap is not None or sinks is not None:
        return attend_scores(q, k, v, plan.tiles(q.device), scale=scale, softcap=softcap, sinks=sinks)
    if supports_tiles(q):
        return attend_tiles(q, k, v, plan.q_pos, plan.k_pos, scale=scale)
    if plan.kind == "square":
        # Queries and keys are the same rows in order: the only case in which a square causal kernel is right.
        out = F.scaled_dot_product_attention(
            _heads(q), _heads(k), _heads(v), is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    if plan.index is not None and plan.device_q_pos is not None and plan.device_k_pos is not None:
        return attend_block_sparse(q, k, v, plan.device_q_pos, plan.device_k_pos, plan.index, scale=scale)[0]
    group = q.shape[1] // k.shape[1]
    mask = None
    if plan.kind == "part":
        mask = plan.visible.to(q.device).repeat(group, 1)
    # The g query heads of a key/value head become g*T rows over it, so keys are read once and never repeated.
    rows, d = q.shape[0], q.shape[2]
    if rows == 1:  # as they lie: a decoded token spares what the order of several rows costs
        only = q.view(1, -1, group, d)
        return F.scaled_dot_product_attention(only, _heads(k), _heads(v), attn_mask=mask, scale=scale).view(q.shape)
    folded = q.view(rows, -1, group, d).permute(1, 2, 0, 3).reshape(1, -1, group * rows, d)
    out = F.scaled_dot_product_attention(folded, _heads(k), _heads(v), attn_mask=mask, scale=scale)
    return out.view(-1, group, rows, d).permute(2, 0, 1, 3).reshape(rows, -1, d)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union.

    l = logaddexp(l_A, l_B), o = o_A exp(l_A - l) + o_B exp(l_B - l). The order of the parts does not matter.

    Args:
        parts: (output [T, Hq, d], log-sum-exp [T, Hq]) of each set.
    """
    lses = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - torch.where(lse.isinf(), 0.0, lse))
    out = sum(weight[..., None] * part for weight, (part, _) in zip(weights, parts, strict=True))
    return torch.as_tensor(out), lse


def _increasing(positions: Tensor) -> bool:
    return bool((positions[1:] > positions[:-1]).all().item())


def _heads(x: Tensor) -> Tensor:
    """View [rows, heads, d] as [1, heads, rows, d]."""
    return x.transpose(0, 1)[None]
