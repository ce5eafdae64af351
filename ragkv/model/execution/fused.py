"""The layer loop with few launches: what `DecoderModel.forward` runs on a GPU.

The plain loop calls a model's modules one by one, with about forty launches a layer, and inspects positions in every
layer. On a GPU the launches then take longer than the work. Here a layer has nine launches, and the host never waits
for the device:

    projections          q, k and v of a layer are one product, gate and up another (merged_weights.py)
    rope_scatter         head norms, RoPE and cache writes in one kernel (kernels/rows.py)
    attention            one kernel for any positions (kernels/attention.py, `MaskPlan`)
    add_norm, gated      the operations between products (kernels/decode_step.py)

All indices of a pass are copied to the device at once, before its first layer. The result is that of the plain loop, up
to the order of additions, for the same `Pass`. Where rows are blended with stored ones, the pass supplies the blending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ragkv.kernels.attention import MaskPlan, attend_planned, copy_to_device, plan_mask
from ragkv.kernels.decode_step import HeadNorms, apply_norm
from ragkv.kernels.rows import RowKernels, raw_queries, split_qkv
from ragkv.model.execution.layer_body import run_layer
from ragkv.model.execution.merged_weights import merge_weights
from ragkv.model.layer_pass import Pass, write_rows
from ragkv.model.placement import layer_devices, on_device
from ragkv.types import Shape

RotaryOf = Callable[[Tensor], tuple[Tensor, Tensor]]
"""positions [T] -> cos, sin [T, d]"""


class Fused:
    """The layers of one model. It holds no request state."""

    def __init__(
        self, body: Any, head: Any, shape: Shape, scale: float, rotary: RotaryOf, kernels: RowKernels | ModuleType
    ):
        """Merge the weights of a model.

        Args:
            body: the decoder body of a model for which `merged_weights.supports_merging` holds.
            head: maps rows behind the last norm, on the last layer's device, to logits.
            shape: the model's shape.
            scale: factor of attention scores.
            rotary: computes cos and sin.
            kernels: the operations between products.
        """
        self.body, self.head, self.shape, self.scale, self.rotary = body, head, shape, scale, rotary
        self.kernels, self.layers, self.devices = kernels, merge_weights(body), layer_devices(body)

    def forward(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Run passes together, as `DecoderModel.forward` does."""
        runs = [_PassRun(self, p) for p in passes]
        for layer in range(max(run.depth for run in runs)):
            running = [run for run in runs if run.p.start <= layer < run.depth]
            if running:
                for run in running:
                    run.move_to(self.devices[layer])
                with on_device(self.devices[layer]):
                    self._run_layer(layer, running)
        ends = [run.normed.to(self.devices[-1]) for run in runs]
        return list(self.head(_cat(ends)).split([end.shape[0] for end in ends]))

    def _run_layer(self, layer: int, running: Sequence[_PassRun]) -> None:
        weights = self.layers[layer]

        def attend(qkv: Tensor) -> tuple[Tensor, Tensor]:
            parts = qkv.split([run.normed.shape[0] for run in running])
            attended = [run.attend(layer, weights.head_norms, part) for run, part in zip(running, parts, strict=True)]
            return _cat([run.hidden for run in running]), _cat(attended)

        state = run_layer(weights, self.kernels, _cat([run.normed for run in running]), attend)
        sizes = [run.hidden.shape[0] for run in running]
        for run, hidden, normed in zip(running, state.hidden.split(sizes), state.normed.split(sizes), strict=True):
            run.hidden, run.normed = hidden, normed


class _PassRun:
    """One pass on its way through the layers.

    Attributes:
        p: the pass.
        depth: the layer to stop before.
        hidden: [T, hidden]. The residual stream of the rows present.
        normed: [T, hidden]. The same rows behind the next norm.
    """

    def __init__(self, fused: Fused, p: Pass):
        self.p, self.depth = p, fused.shape.layers if p.depth is None else p.depth
        self._fused, self._positions = fused, p.positions
        self._plan: MaskPlan | None = None
        self._device, devices = fused.devices[p.start], fused.devices[p.start : self.depth]
        slots, leave = _layer_indices(p, self.depth)
        distinct = list({id(each): each for each in (*slots, *leave) if each is not None}.values())
        host = [each.int() for each in (p.tokens, p.positions, *distinct)]
        copies = {device: copy_to_device(host, device) for device in dict.fromkeys((self._device, *devices))}
        tokens, positions = copies[self._device][:2]
        number = {id(each): i for i, each in enumerate(distinct, start=2)}
        self._slots = [copies[device][number[id(each)]] for device, each in zip(devices, slots, strict=True)]
        self._leave = [
            None if each is None else (each, copies[device][number[id(each)]])
            for device, each in zip(devices, leave, strict=True)
        ]
        embed = fused.body.embed_tokens
        hidden = embed(tokens.to(embed.weight.device)) if p.hidden is None else p.hidden
        self.hidden = hidden.to(self._device)
        self.normed = fused.body.layers[p.start].input_layernorm(self.hidden)
        self._cos, self._sin = (each.to(self._device) for each in fused.rotary(positions))

    def move_to(self, device: torch.device) -> None:
        """Move the rows to the device of the next layer."""
        if device == self._device:
            return
        self._device, plan = device, self._plan
        self.hidden, self.normed, self._cos, self._sin = (
            each.to(device) for each in (self.hidden, self.normed, self._cos, self._sin)
        )
        self._plan = None if plan is None else plan.to(device)

    def attend(self, layer: int, norms: HeadNorms | None, qkv: Tensor) -> Tensor:
        """Write K and V of the rows to the cache, and compute attention [O, Hq, d] of those that go on."""
        p, fused, step = self.p, self._fused, self.p.steps[layer - self.p.start]
        if p.capture is not None:
            self._capture(norms, qkv)
        k, v = p.cache.k(layer), p.cache.v(layer)
        if step.blend and p.blend is not None:
            rows = torch.arange(qkv.shape[0], dtype=torch.int32, device=qkv.device)
            k, v = (x.new_empty(qkv.shape[0], *x.shape[1:]) for x in (k, v))
            q = fused.kernels.rope_scatter(qkv, self._cos, self._sin, rows, k, v, fused.shape, norms)
            write_rows(p, layer, step, k, v)
        else:
            slots = self._slots[layer - p.start]
            q = fused.kernels.rope_scatter(qkv, self._cos, self._sin, slots, k, v, fused.shape, norms)
        leave = self._leave[layer - p.start]
        if leave is not None:
            q, self.hidden, self._cos, self._sin = (
                x.index_select(0, leave[1]) for x in (q, self.hidden, self._cos, self._sin)
            )
            self._positions = self._positions[leave[0]]
            self.normed = self.normed[: q.shape[0]]  # no longer read; only the number of rows matters
        return self._attend_cache(layer, q)

    def _attend_cache(self, layer: int, q: Tensor) -> Tensor:
        cache, scale = self.p.cache, self._fused.scale
        k, v, k_pos = cache.k(layer), cache.v(layer), cache.positions(layer)
        if self.p.attention is not None and q.shape[0]:
            return self.p.attention(layer, q, k, v, self._positions, k_pos, scale=scale)
        if not q.shape[0]:
            return q
        plan = self._plan
        if plan is None or not plan.fits(self._positions, k_pos):
            self._plan = plan = plan_mask(self._positions, k_pos, q.device, q.shape[1] // k.shape[1])
        return attend_planned(q, k, v, plan, scale=scale)

    def _capture(self, norms: HeadNorms | None, qkv: Tensor) -> None:
        """Add the pre-RoPE rows and the hidden states that entered to the pass's capture."""
        assert self.p.capture is not None
        q, (_, k, v) = raw_queries(qkv, self._fused.shape, norms), split_qkv(qkv, self._fused.shape)
        if norms is not None:
            k = apply_norm(k, norms.weight[1], norms.eps)
        self.p.capture.add(self.hidden, q, k, v)


def _layer_indices(p: Pass, depth: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return, for each layer, the slot of each row present and the rows that go on.

    The slot of a row whose K and V are not written is negative. Layers with equal slots share one tensor.
    """
    slots: list[Tensor] = []
    leaves: list[Tensor | None] = []
    present = p.positions.shape[0]
    for layer, step in enumerate(p.steps[: depth - p.start], start=p.start):
        to, leave = step.slots, step.leave
        if step.write is not None:
            to = torch.full((present,), -1).index_copy_(0, step.write, step.slots)
        slots.append(slots[-1] if slots and (slots[-1] is to or torch.equal(slots[-1], to)) else to)
        if layer == depth - 1 and p.depth is not None:
            leave = torch.empty(0, dtype=torch.int64)  # the pass stops here: nothing above needs its output
        leaves.append(leave)
        present = present if leave is None else leave.shape[0]
    return slots, leaves


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
