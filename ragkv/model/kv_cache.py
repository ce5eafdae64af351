"""The context cache: the stitched, sparse KV one request attends to. Ragged per layer, positions explicit.

layer l:  k, v [capacity, Hkv, d]  rotated at their stitched position
          positions [capacity] int64 (CPU)
          rows [0, lengths[l]) are live, in the order they were put: order means nothing, positions do
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ragkv.types import Shape


class PendingCopy(Protocol):
    """Something that is being written on another stream, like a CUDA event behind it."""

    def wait(self) -> None:
        """Have the current stream wait for it; the host does not."""
        ...


class ContextCache:
    """State of one request. Not shared, not thread-safe.

    Rows of a layer may be on their way (`expect`). Whatever gives or takes rows here settles the layer first, so that
    only who has asked for `stores` before has to see to it.
    """

    def __init__(
        self,
        shape: Shape,
        capacity: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | Sequence[torch.device] = "cpu",
    ):
        """capacity: rows to make room for, per layer or for all; the cache grows when it is passed · device: of all
        layers, or of each."""
        sizes = [capacity] * shape.layers if isinstance(capacity, int) else list(capacity)
        self.shape, self.dtype = shape, dtype
        if isinstance(device, (torch.device, str)):
            device = [torch.device(device)] * shape.layers
        self.devices = tuple(device)
        self._k = [
            torch.empty(size, shape.kv_heads, shape.head_dim, dtype=dtype, device=at)
            for size, at in zip(sizes, self.devices, strict=True)
        ]
        self._v = [torch.empty_like(k) for k in self._k]
        self._positions = [torch.empty(size, dtype=torch.int64) for size in sizes]
        self.lengths = [0] * shape.layers
        self._pending: list[PendingCopy | None] = [None] * shape.layers

    def record_event(self, layer: int, copy: PendingCopy) -> None:
        """Rows of the layer are being written; `coming` is behind all that was expected before."""
        self._pending[layer] = copy

    def wait_ready(self, layer: int) -> None:
        """Have the current stream wait for rows of the layer that are on their way, and so for those of other layers
        that come with them. Costs nothing where none are."""
        coming = self._pending[layer]
        if coming is not None:
            coming.wait()
            self._pending = [None if each is coming else each for each in self._pending]

    @property
    def pending(self) -> bool:
        """Whether rows of a layer are on their way."""
        return any(each is not None for each in self._pending)

    @property
    def device(self) -> torch.device:
        """The first layer's."""
        return self.devices[0]

    @property
    def bytes(self) -> int:
        """Memory of K and V, room for rows to come included."""
        return sum(each.nbytes for each in self.tensors)

    def make_room(self, rows: int) -> None:
        """Room for so many more rows in every layer, made at once."""
        for layer, length in enumerate(self.lengths):
            if length + rows > self._k[layer].shape[0]:
                self._resize(layer, length + rows)

    def k(self, layer: int) -> Tensor:
        """Live rotated keys [length, Hkv, d], a view."""
        self.wait_ready(layer)
        return self._k[layer][: self.lengths[layer]]

    def v(self, layer: int) -> Tensor:
        """Live values [length, Hkv, d], a view."""
        self.wait_ready(layer)
        return self._v[layer][: self.lengths[layer]]

    def positions(self, layer: int) -> Tensor:
        """Live positions [length] int64, a view."""
        return self._positions[layer][: self.lengths[layer]]

    def buffers(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer with all their room [capacity, Hkv, d]: live rows in front, room for `rows` more behind
        them. They are where the rows lie until the cache grows."""
        self.wait_ready(layer)
        if self.lengths[layer] + rows > self._k[layer].shape[0]:
            self._grow(layer, self.lengths[layer] + rows)
        return self._k[layer], self._v[layer]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """K and V of all layers, to be held on to; nothing is waited for."""
        return (*self._k, *self._v)

    def reserve(self, layer: int, positions: Tensor) -> Tensor:
        """Append rows at `positions` [m], content undefined until written; returns their slots [m]."""
        start = self.lengths[layer]
        stop = start + positions.shape[0]
        if stop > self._k[layer].shape[0]:
            self._grow(layer, stop)
        self._positions[layer].numpy()[start:stop] = positions.numpy()  # a tenth of the time that torch takes
        self.lengths[layer] = stop
        return torch.arange(start, stop)

    def put(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Append rows k (rotated), v [m, Hkv, d] at `positions` [m]; returns their slots [m]."""
        self.wait_ready(layer)
        slots = self.reserve(layer, positions)
        start, stop = self.lengths[layer] - positions.shape[0], self.lengths[layer]
        self._k[layer][start:stop] = k
        self._v[layer][start:stop] = v
        return slots

    def extend(self, other: ContextCache) -> None:
        """Append all rows of a cache of the same shape on the same devices, in a few launches for all layers."""
        moves: dict[torch.device, list[tuple[Tensor, Tensor]]] = {device: [] for device in self.devices}
        for layer, device in enumerate(self.devices):
            self.wait_ready(layer)
            slots = self.reserve(layer, other.positions(layer))
            here = slice(self.lengths[layer] - slots.shape[0], self.lengths[layer])
            moves[device] += [(self._k[layer][here], other.k(layer)), (self._v[layer][here], other.v(layer))]
        for pairs in moves.values():
            to, rows = zip(*pairs, strict=True)
            torch._foreach_copy_(list(to), list(rows))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Overwrite live rows `slots` [m] with k (rotated), v [m, Hkv, d]."""
        self.wait_ready(layer)
        slots = slots.to(self.devices[layer])
        self._k[layer][slots] = k
        self._v[layer][slots] = v

    def fill(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """As `write`; slots [m] on the CPU. Where they follow one another, as a rule, nothing is looked up by index."""
        self.wait_ready(layer)
        start, count = int(slots[0]), slots.shape[0]
        if torch.equal(slots, torch.arange(start, start + count)):
            self._k[layer][start : start + count] = k
            self._v[layer][start : start + count] = v
        else:
            self.write(layer, slots, k, v)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop the rows put after `lengths` was read off."""
        for layer in range(self.shape.layers):
            self.wait_ready(layer)
        self.lengths = [min(new, old) for new, old in zip(lengths, self.lengths, strict=True)]

    def _grow(self, layer: int, rows: int) -> None:
        """At least twofold, so that rows which come one by one are seldom moved."""
        self._resize(layer, max(rows, 2 * self._k[layer].shape[0]))

    def _resize(self, layer: int, rows: int) -> None:
        self.wait_ready(layer)
        length = self.lengths[layer]
        with torch.inference_mode(False):  # whoever grows it, rows are put into it by others as well
            for store in (self._k, self._v, self._positions):
                old = store[layer]
                store[layer] = old.new_empty(rows, *old.shape[1:])
                if length:
                    store[layer][:length] = old[:length]
