"""Decoding on a CPU: a layer loop over products of a few rows, beside the exact weights (`RAGKV_WEIGHTS=auto`).

A decoded token reads every weight once. Prefills, repairs and encoding keep the weights that were loaded, so stored KV
and the first token of an answer are theirs. Passes that decode (`Pass.decodes`) take `kernels/grid_products.py` for up
to `FEW` rows in all; more rows are multiplied with the exact weights, which is faster for them.

The loop has few operations: between products they take longer than their arithmetic, and all rows share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.kernels import cpu_rows, grid_products
from ragkv.kernels.attention import MaskPlan, attend_planned, plan_mask
from ragkv.kernels.packed_products import PackedLinear
from ragkv.model.execution.merged_weights import MergedLayer, is_plain, merge_layers
from ragkv.model.layer_pass import Pass
from ragkv.types import Shape

FEW = {1: 8, 2: 2}
"""Rows up to which the grid is no slower than the exact weights, by its planes (docs/lab-notes.md)."""


class FewRowsLinear:
    """Linear modules as one product: of a few rows by the grid, of more rows by the modules themselves."""

    def __init__(self, modules: Sequence[Any]):
        """Quantise the weights of packed modules. They stay as they are."""
        self._modules, biases = list(modules), [each.bias for each in modules]
        whole = torch.cat([each.weight.to_dense().detach() for each in modules])
        fits = grid_products.fits_grid(whole)
        self._grid = grid_products.pack(whole) if fits else None
        self._bias = None if biases[0] is None else torch.cat([each.detach() for each in biases])

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the product to x [T, in]."""
        grid = self._grid
        if grid is not None and x.shape[0] <= FEW[grid.planes]:
            return grid_products.linear(x, grid, self._bias)
        parts = [module(x) for module in self._modules]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class FewRows:
    """The layers of one model for passes that decode. It holds no request state."""

    @torch.inference_mode()
    def __init__(
        self, body: Any, head: Any, shape: Shape, scale: float, rotary: Callable[[Tensor], tuple[Tensor, Tensor]]
    ):
        """Quantise the weights of a model.

        Args:
            body: the decoder body of a model for which `supports_few_rows` holds.
            head: its head.
            shape: its shape.
            scale: factor of attention scores.
            rotary: maps positions [T] to cos and sin [T, d].
        """
        self._body, self._shape, self._scale, self._rotary = body, shape, scale, rotary
        self._head, self._layers = FewRowsLinear([head]), merge_layers(body, FewRowsLinear)

    def forward(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Run passes of `layer_pass.append` together; return logits [T, vocabulary] of all rows of each."""
        sizes = [p.positions.shape[0] for p in passes]
        cos, sin = cpu_rows.angles(*self._rotary(torch.cat([p.positions for p in passes])))
        rows = self._body.embed_tokens(torch.cat([p.tokens for p in passes]))
        hidden, normed = rows.float(), self._body.layers[0].input_layernorm(rows)
        attention = [_PassAttention(p, self._scale) for p in passes]
        for number, layer in enumerate(self._layers):
            q, k, v = self._project(layer, normed, cos, sin)
            parts = zip(attention, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
            attended = [attend(number, *part) for attend, *part in parts]
            whole = attended[0] if len(attended) == 1 else torch.cat(attended)
            hidden = hidden + layer.o_proj(whole.flatten(1))
            between, after = layer.post_attention_norm, layer.next_norm
            gate, up = layer.gate_up_proj(cpu_rows.norm(hidden, between.weight, between.eps, q.dtype)).chunk(2, -1)
            hidden = hidden + layer.down_proj(F.silu(gate) * up)
            normed = cpu_rows.norm(hidden, after.weight, after.eps, q.dtype)
        return list(self._head(normed).split(sizes))

    def _project(self, layer: MergedLayer, normed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, Hq, d], k and v [T, Hkv, d], with RoPE applied."""
        q_heads, kv_heads, norms = self._shape.q_heads, self._shape.kv_heads, layer.head_norms
        heads = layer.qkv_proj(normed).view(normed.shape[0], -1, self._shape.head_dim)
        turning = heads[:, :-kv_heads]
        if norms is not None:
            parts = zip(turning.tensor_split((q_heads,), 1), norms.weight, strict=True)
            turning = torch.cat([cpu_rows.norm(part, weight, norms.eps, part.dtype) for part, weight in parts], 1)
        turned = cpu_rows.rotate(turning, cos, sin)
        return turned[:, :q_heads], turned[:, q_heads:], heads[:, -kv_heads:]


class _PassAttention:
    """Attention of one pass, whose rows lie one behind the other in every layer of its cache."""

    def __init__(self, p: Pass, scale: float):
        self._p, self._scale, self._count = p, scale, p.positions.shape[0]
        # One row comes behind all keys, so its plan is the same in layers of any length.
        self._plan = MaskPlan(p.positions, p.positions, "whole") if self._count == 1 else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write K and V of the rows, and attend: [T, Hq, d]."""
        p, cache, count = self._p, self._p.cache, self._count
        keys, values = cache.k(layer), cache.v(layer)
        start = int(p.steps[layer].slots[0])
        keys[start : start + count], values[start : start + count] = k, v
        if p.attention is not None:
            return p.attention(layer, q, keys, values, p.positions, cache.positions(layer), scale=self._scale)
        plan = self._plan
        if plan is None or (count > 1 and not plan.fits(p.positions, cache.positions(layer))):
            self._plan = plan = plan_mask(p.positions, cache.positions(layer), q.device, q.shape[1] // k.shape[1])
        return attend_planned(q, keys, values, plan, scale=self._scale)


def supports_few_rows(body: Any, head: Any) -> bool:
    """Return whether a model's products are packed in bfloat16 on a CPU, and torch multiplies by the grid."""
    return grid_products.supports_grid() and type(head) is PackedLinear and is_plain(body, [PackedLinear])
