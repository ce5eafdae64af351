"""The layer loop with few launches: what `DecoderModel.forward` runs on a GPU.

The plain loop calls a model's modules one by one, some forty launches a layer, and looks at positions in every one. On
a GPU the launches then take longer than the work. Here a layer is nine launches, and nothing waits for the device:

    products           q, k and v of a layer are one, gate and up another (joined.py)
    place              norms of heads, RoPE, rows to their slots: one kernel (kernels/rows.py)
    attend             one kernel for any positions (kernels/attention.py, `Sight`)
    add_norm, gated    what is left between products (kernels/steps.py)

All indices of a pass are sent in one copy before its first layer. It computes what the plain loop computes, up to the
order of additions, and reads the same `Pass`; where rows are blended with stored ones, blending itself is the pass's.
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
from ragkv.model.execution.merged_weights import Layer, merge_weights
from ragkv.model.layer_pass import Pass, write_rows
from ragkv.model.placement import current, devices_of
from ragkv.types import Shape

RotaryOf = Callable[[Tensor], tuple[Tensor, Tensor]]
"""positions [T] -> cos, sin [T, d]"""


class Fused:
    """The layers of one model. No request state."""

    def __init__(
        self, body: Any, head: Any, shape: Shape, scale: float, rotary: RotaryOf, kernels: RowKernels | ModuleType
    ):
        """body: of a model that `joined.fits`; its weights are joined · head: rows behind the last norm, on the last
        layer's device, to logits · scale: of attention."""
        self.body, self.head, self.shape, self.scale, self.rotary = body, head, shape, scale, rotary
        self.kernels, self.layers, self.devices = kernels, merge_weights(body), devices_of(body)

    def forward(self, passes: Sequence[Pass]) -> list[Tensor]:
        """As `DecoderModel.forward`."""
        runs = [_Run(self, p) for p in passes]
        for i in range(max(run.depth for run in runs)):
            running = [run for run in runs if run.p.start <= i < run.depth]
            if running:
                for run in running:
                    run.enter(self.devices[i])
                with current(self.devices[i]):
                    self._layer(i, self.layers[i], running)
        ends = [run.normed.to(self.devices[-1]) for run in runs]
        return list(self.head(_cat(ends)).split([end.shape[0] for end in ends]))

    def _layer(self, i: int, layer: Layer, running: Sequence[_Run]) -> None:
        qkv = layer.qkv(_cat([run.normed for run in running]))
        parts = qkv.split([run.normed.shape[0] for run in running])
        attended = _cat([run.attend(i, layer.heads, part) for run, part in zip(running, parts, strict=True)])
        if not attended.shape[0]:  # the last layer of passes that end early
            return
        x, k = _cat([run.x for run in running]), self.kernels
        x, normed = k.add_norm(x, layer.out(attended.flatten(1)), layer.middle.weight, layer.middle.eps)
        x, normed = k.add_norm(x, layer.down(k.gated(layer.gate_up(normed))), layer.last.weight, layer.last.eps)
        sizes = [run.x.shape[0] for run in running]
        for run, one, two in zip(running, x.split(sizes), normed.split(sizes), strict=True):
            run.x, run.normed = one, two


class _Run:
    """One pass on its way through the layers.

    x [T, hidden]: the rows as they stand · normed: the same behind the norm that comes next.
    """

    def __init__(self, fused: Fused, p: Pass):
        self.p, self.depth = p, fused.shape.layers if p.depth is None else p.depth
        self._fused, self._at = fused, p.positions
        self._kept: MaskPlan | None = None
        self._device, devices = fused.devices[p.start], fused.devices[p.start : self.depth]
        slots, leave = _places(p, self.depth)
        distinct = list({id(each): each for each in (*slots, *leave) if each is not None}.values())
        sent = [each.int() for each in (p.tokens, p.positions, *distinct)]
        there = {device: copy_to_device(sent, device) for device in dict.fromkeys((self._device, *devices))}
        tokens, positions = there[self._device][:2]
        number = {id(each): i for i, each in enumerate(distinct, start=2)}
        self._slots = [there[at][number[id(each)]] for at, each in zip(devices, slots, strict=True)]
        self._leave = [
            None if each is None else (each, there[at][number[id(each)]])
            for at, each in zip(devices, leave, strict=True)
        ]
        embed = fused.body.embed_tokens
        x = embed(tokens.to(embed.weight.device)) if p.hidden is None else p.hidden
        self.x = x.to(self._device)
        self.normed = fused.body.layers[p.start].input_layernorm(self.x)
        self._cos, self._sin = (each.to(self._device) for each in fused.rotary(positions))

    def enter(self, device: torch.device) -> None:
        """The next layer is on this device."""
        if device == self._device:
            return
        self._device, kept = device, self._kept
        self.x, self.normed, self._cos, self._sin = (
            each.to(device) for each in (self.x, self.normed, self._cos, self._sin)
        )
        self._kept = None if kept is None else kept.to(device)

    def attend(self, i: int, heads: HeadNorms | None, qkv: Tensor) -> Tensor:
        """K and V of the rows to the cache; those that go on attend: out [O, Hq, d]."""
        p, fused, step = self.p, self._fused, self.p.steps[i - self.p.start]
        if p.capture is not None:
            self._record(heads, qkv)
        k, v = p.cache.k(i), p.cache.v(i)
        if step.blend and p.blend is not None:
            rows = torch.arange(qkv.shape[0], dtype=torch.int32, device=qkv.device)
            k, v = (x.new_empty(qkv.shape[0], *x.shape[1:]) for x in (k, v))
            q = fused.kernels.rope_scatter(qkv, self._cos, self._sin, rows, k, v, fused.shape, heads)
            write_rows(p, i, step, k, v)
        else:
            slots = self._slots[i - p.start]
            q = fused.kernels.rope_scatter(qkv, self._cos, self._sin, slots, k, v, fused.shape, heads)
        leave = self._leave[i - p.start]
        if leave is not None:
            q, self.x, self._cos, self._sin = (x.index_select(0, leave[1]) for x in (q, self.x, self._cos, self._sin))
            self._at = self._at[leave[0]]
            self.normed = self.normed[: q.shape[0]]  # not read any more, but as many as there are rows
        return self._attended(i, q)

    def _attended(self, i: int, q: Tensor) -> Tensor:
        cache, scale = self.p.cache, self._fused.scale
        k, v, at = cache.k(i), cache.v(i), cache.positions(i)
        if self.p.attention is not None and q.shape[0]:
            return self.p.attention(i, q, k, v, self._at, at, scale=scale)
        if not q.shape[0]:
            return q
        known = self._kept
        if known is None or known.q_pos is not self._at or not torch.equal(known.k_pos, at):
            self._kept = known = plan_mask(self._at, at, q.device, q.shape[1] // k.shape[1])
        return attend_planned(q, k, v, known, scale=scale)

    def _record(self, heads: HeadNorms | None, qkv: Tensor) -> None:
        """Pre-RoPE rows and what entered, for whoever asked for them."""
        assert self.p.capture is not None
        q, (_, k, v) = raw_queries(qkv, self._fused.shape, heads), split_qkv(qkv, self._fused.shape)
        if heads is not None:
            k = apply_norm(k, heads.weight[1], heads.eps)
        self.p.capture.add(self.x, q, k, v)


def _places(p: Pass, depth: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """By layer: the slot of each row that is present, below 0 where its K and V are not written; which rows go on.
    Layers that have the same have the same tensor."""
    slots: list[Tensor] = []
    leaves: list[Tensor | None] = []
    present = p.positions.shape[0]
    for layer, step in enumerate(p.steps[: depth - p.start], start=p.start):
        to, leave = step.slots, step.leave
        if step.write is not None:
            to = torch.full((present,), -1).index_copy_(0, step.write, step.slots)
        slots.append(slots[-1] if slots and (slots[-1] is to or torch.equal(slots[-1], to)) else to)
        if layer == depth - 1 and p.depth is not None:
            leave = torch.empty(0, dtype=torch.int64)  # stops here: nothing above needs its output
        leaves.append(leave)
        present = present if leave is None else leave.shape[0]
    return slots, leaves


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
