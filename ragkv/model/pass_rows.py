"""The rows of passes on their way through the layers, and how those of several passes attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ragkv.kernels.attention import MaskPlan, attend_planned, index_to_device, plan_mask
from ragkv.model.layer_bodies import Attended
from ragkv.model.layer_kinds import LayerKind
from ragkv.model.layer_pass import Pass, write_rows
from ragkv.model.placement import on_device
from ragkv.model.recurrence import RecurrentLayer, RecurrentState
from ragkv.model.rotary import Rotary, rotate, rotate_together
from ragkv.model.shared_kv import KVReader


class PassRows:
    """The rows of one pass between two layers.

    Attributes:
        layer_pass: the pass.
        hidden: hidden states [T, hidden].
        positions: their positions [T] int64, on the CPU.
        depth: the layer that the pass stops before.
        rotary: cos and sin of the rows, by the number of the rotation.
        inputs: what each layer reads of the rows besides, [layers, T, n]; None where layers read nothing else.
    """

    def __init__(
        self,
        layer_pass: Pass,
        hidden: Tensor,
        layers: int,
        states: int = 0,
        behind: bool = False,
        inputs: Tensor | None = None,
    ):
        """Begin a pass.

        Args:
            layer_pass: the pass.
            hidden: hidden states of its rows.
            layers: layers with attention.
            states: layers with a state.
            behind: whether some of these stand behind the last layer with attention.
            inputs: as in the attributes.
        """
        self.inputs = inputs
        self.layer_pass, self.hidden, self.positions = layer_pass, hidden, layer_pass.positions
        self.depth = layers if layer_pass.depth is None else layer_pass.depth
        self.rotary: dict[int, Rotary] = {}
        self._plans: dict[int | None, MaskPlan] = {}
        self._states = list(layer_pass.cache.states or (RecurrentState(),) * states)
        self._composed = list(layer_pass.composition.states if layer_pass.composition else ())
        self._stays = behind and layer_pass.depth is None

    def recur(self, first: int, layers: Sequence[RecurrentLayer]) -> None:
        """Run layers with a state; first: the number of the first one among those of the model."""
        for number, layer in enumerate(layers, first):
            if self._composed:
                _, self._composed[number] = layer(self.hidden, self._composed[number])
            self.hidden, self._states[number] = layer(self.hidden, self._states[number])

    def drop_ended(self) -> None:
        """Drop the rows that end behind the last layer, where layers with a state stood behind it."""
        if self._stays:
            self._stays = False
            rows = self.leave(self.depth - 1, self.hidden.device)
            self.hidden = self.hidden if rows is None else self.hidden[rows]

    def leave_states(self) -> None:
        """Give cache and composition the states behind the rows. A pass that stops early only asks, and leaves none."""
        if self._states and self.layer_pass.depth is None:
            self.layer_pass.cache.states = tuple(self._states)
        if self.layer_pass.composition is not None:
            self.layer_pass.composition.states = tuple(self._composed)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.positions.shape[0]

    def move(self, device: torch.device) -> None:
        """Move the rows to the device of the next layer."""
        self.hidden, self._plans = self.hidden.to(device), {}
        self.rotary = {number: each.to(device) for number, each in self.rotary.items()}
        self.inputs = None if self.inputs is None else self.inputs.to(device)

    def turn(self, rotation: int, make: Callable[[Tensor], Rotary], device: torch.device) -> None:
        """Compute cos and sin of the rows for a rotation, unless they are there."""
        if rotation not in self.rotary:
            self.rotary[rotation] = make(self.positions).to(device)

    def leave(self, layer: int, device: torch.device) -> Tensor | None:
        """Drop the rows that end in a layer; return the indices of the others, None where all go on."""
        if self._stays and layer == self.depth - 1:
            return None  # layers with a state follow, and read every row
        leave = self.layer_pass.steps[layer - self.layer_pass.start].leave
        if layer == self.depth - 1 and self.layer_pass.depth is not None:
            leave = torch.empty(0, dtype=torch.int64)  # the pass stops here: nothing above needs its output
        if leave is None:
            return None
        rows = index_to_device(leave, device)
        self.positions = self.positions[leave]
        self.rotary = {number: each[rows] for number, each in self.rotary.items()}
        self.inputs = None if self.inputs is None else self.inputs[:, rows]
        return rows

    def attend(self, layer: int, kind: LayerKind, q: Tensor) -> Tensor:
        """Compute attention of rows q [O, Hq, d] over the pass's own cache."""
        p, cache = self.layer_pass, self.layer_pass.cache
        if p.attention is None or not kind.plain or not q.shape[0]:
            return self.attend_densely(layer, kind, q)
        k, v = kind.unpack(cache.k(layer)), kind.unpack(cache.v(layer))
        with on_device(q.device):
            return p.attention(layer, q, k, v, self.positions, cache.positions(layer), scale=kind.scale)

    def attend_densely(self, layer: int, kind: LayerKind, q: Tensor) -> Tensor:
        """Compute attention of rows q [O, Hq, d] over all rows of the pass's own cache."""
        cache = self.layer_pass.cache
        k, v, k_pos = kind.unpack(cache.k(layer)), kind.unpack(cache.v(layer)), cache.positions(layer)
        if not q.shape[0]:
            return q
        with on_device(q.device):
            plan = self._plans.get(kind.window)
            if plan is None or not plan.fits(self.positions, k_pos):
                plan = plan_mask(self.positions, k_pos, q.device, q.shape[1] // k.shape[1], kind.window)
                self._plans[kind.window] = plan
            return attend_planned(q, k, v, plan, scale=kind.scale, softcap=kind.softcap, sinks=kind.sinks)


def attend_together(
    layer: int, kind: LayerKind, running: Sequence[PassRows], q: Tensor, k: Tensor, v: Tensor
) -> Attended:
    """Write K and V of the rows of several passes, and attend: each pass to its own cache.

    Args:
        layer: the layer.
        kind: its attention.
        running: the passes.
        q: [T, Hq, d]. Queries of all rows before RoPE, pass after pass.
        k: [T, Hkv, d]. Keys of all rows, likewise.
        v: [T, Hkv, d]. Values of all rows, likewise.
    """
    sizes = [each.count for each in running]
    queries, keys, values = list(q.split(sizes)), list(k.split(sizes)), list(v.split(sizes))
    turned, turned_keys = rotate_together(queries, keys, [each.rotary[kind.rotation] for each in running])
    attended, kept, first, ends = list[Tensor](), list[Tensor](), 0, False
    for i, (pass_rows, size) in enumerate(zip(running, sizes, strict=True)):
        p, new_values = pass_rows.layer_pass, kind.pack(values[i])
        p.cache.wait_ready(layer)
        if p.capture is not None:
            p.capture.add(pass_rows.hidden, queries[i], kind.pack(keys[i]), new_values)
        write_rows(p, layer, p.steps[layer - p.start], kind.pack(turned_keys[i]), new_values)
        rows = pass_rows.leave(layer, q.device)
        if rows is None:
            rows = torch.arange(size, device=q.device) if len(running) > 1 else None
        else:
            turned[i], ends = turned[i][rows], True
        if rows is not None:
            kept.append(rows + first)
        attended.append(pass_rows.attend(layer, kind, turned[i]))
        first += size
    whole = attended[0] if len(attended) == 1 else torch.cat(attended)
    return Attended(whole, (kept[0] if len(kept) == 1 else torch.cat(kept)) if ends else None)


def attend_shared(reader: KVReader, running: Sequence[PassRows], q: Tensor, _k: Tensor, _v: Tensor) -> Attended:
    """Attend in a layer that reads the KV of another one, each pass to its own cache. Nothing is written.

    Args:
        reader: the layer.
        running: the passes.
        q: [T, Hq, d]. Queries of all rows before RoPE, pass after pass.
    """
    kind, queries = reader.kind, q.split([each.count for each in running])
    turned = [rotate(rows, each.rotary[kind.rotation]) for each, rows in zip(running, queries, strict=True)]
    attended = [each.attend_densely(reader.owner, kind, rows) for each, rows in zip(running, turned, strict=True)]
    return Attended(torch.cat(attended), None)
