"""The context cache: the stitched, sparse KV that one request attends to.

Each layer has its own number of rows, and every row has an explicit position.

    layer l:  k, v [capacity, Hkv, d]  rotated at their stitched position
              positions [capacity] int64 (CPU)
              rows [0, lengths[l]) are live, in the order in which they were added; only positions matter
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.kernels.attention import index_to_device
from ragkv.model.pinned import pinned_tensors
from ragkv.model.recurrence import States
from ragkv.types import Shape


class PendingCopy(Protocol):
    """Rows that another stream is writing, such as a CUDA event recorded behind the copy."""

    def wait(self) -> None:
        """Make the current stream wait for the copy. The host does not wait."""
        ...


class ContextCache:
    """KV of one request. Not thread-safe.

    Rows of a layer may still be pending (`record_event`). Every method that reads or writes rows calls `wait_ready`
    first. Callers that keep the tensors of `buffers` must call it themselves.

    Attributes:
        shape: the model's shape.
        dtype: dtype of K and V.
        devices: device of each layer.
        lengths: number of live rows of each layer.
        states: of the layers without attention, behind the last row; None in a model that has none, and before it.
    """

    def __init__(
        self,
        shape: Shape,
        capacity: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | Sequence[torch.device] = "cpu",
    ):
        """Allocate an empty cache.

        Args:
            shape: the model's shape.
            capacity: rows to allocate, for all layers or for each. The cache grows beyond it.
            dtype: dtype of K and V.
            device: device of all layers, or of each.
        """
        sizes = [capacity] * shape.layers if isinstance(capacity, int) else list(capacity)
        self.shape, self.dtype = shape, dtype
        if isinstance(device, (torch.device, str)):
            device = [torch.device(device)] * shape.layers
        self.devices = tuple(device)
        # Layers without room share one tensor: a session starts so, and every question with one.
        empty = {at: torch.empty(0, shape.kv_heads, shape.head_dim, dtype=dtype, device=at) for at in {*self.devices}}
        self._k, self._v = ([empty[at] for at in self.devices] for _ in range(2))
        self._positions = [torch.empty(0, dtype=torch.int64)] * shape.layers
        self.lengths = [0] * shape.layers
        self.states: States | None = None
        self._pending: list[PendingCopy | None] = [None] * shape.layers
        self._addresses: NDArray[np.int64] | None = None
        self._numbers: list[NDArray[np.int64]] | None = None  # views of positions
        for layer, size in enumerate(sizes):
            if size:
                self._resize(layer, size)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: its tensors have other addresses."""
        return {**self.__dict__, "_addresses": None, "_numbers": None}

    def record_event(self, layer: int, copy: PendingCopy) -> None:
        """Register a pending copy into the layer. It must complete after all copies that were registered before."""
        self._pending[layer] = copy

    def wait_ready(self, layer: int) -> None:
        """Make the current stream wait for the layer's pending copy, if any. Other layers of it are ready, too."""
        copy = self._pending[layer]
        if copy is not None:
            copy.wait()
            self._pending = [None if each is copy else each for each in self._pending]

    @property
    def pending(self) -> bool:
        """Whether any layer has a pending copy."""
        return any(each is not None for each in self._pending)

    @property
    def device(self) -> torch.device:
        """Device of the first layer."""
        return self.devices[0]

    @property
    def bytes(self) -> int:
        """Allocated bytes of K and V, unused capacity included, and of states."""
        states = [each for state in self.states or () for each in (state.tail, state.recurrent) if each is not None]
        return sum(each.nbytes for each in (*self.tensors, *states))

    def make_room(self, rows: int) -> None:
        """Grow every layer, where needed, to hold `rows` more rows."""
        for layer, length in enumerate(self.lengths):
            if length + rows > self._k[layer].shape[0]:
                self._resize(layer, length + rows)

    def k(self, layer: int) -> Tensor:
        """Return live rotated keys [length, Hkv, d], a view."""
        self.wait_ready(layer)
        return self._k[layer][: self.lengths[layer]]

    def v(self, layer: int) -> Tensor:
        """Return live values [length, Hkv, d], a view."""
        self.wait_ready(layer)
        return self._v[layer][: self.lengths[layer]]

    def positions(self, layer: int) -> Tensor:
        """Return live positions [length] int64, a view."""
        return self._positions[layer][: self.lengths[layer]]

    @property
    def alike(self) -> bool:
        """Whether all layers have rows at the same positions, in the same order."""
        layers = zip(self._positions, self.lengths, strict=True)
        return len({positions.numpy()[:length].tobytes() for positions, length in layers}) == 1

    def buffers(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return K and V of a layer with their capacity [capacity, Hkv, d], grown to hold `rows` more rows.

        Live rows come first. The tensors are valid until the cache grows.
        """
        self.wait_ready(layer)
        if self.lengths[layer] + rows > self._k[layer].shape[0]:
            self._grow(layer, self.lengths[layer] + rows)
        return self._k[layer], self._v[layer]

    def addresses(self, rows: int) -> NDArray[np.int64]:
        """Return the addresses of K and of V of each layer [2, L], grown for `rows` more rows; valid until it grows."""
        for layer, length in enumerate(self.lengths):
            if self._pending[layer] is not None:
                self.wait_ready(layer)
            if length + rows > self._positions[layer].shape[0]:
                self._grow(layer, length + rows)
        if self._addresses is None:
            self._addresses = np.array([[each.data_ptr() for each in store] for store in (self._k, self._v)])
        return self._addresses

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """K and V of all layers, to keep them alive. This does not wait for pending copies."""
        return (*self._k, *self._v)

    def reserve(self, layer: int, positions: Tensor) -> Tensor:
        """Append rows at `positions` [m] whose content is undefined until written, and return their slots [m]."""
        return torch.arange(*self._append(layer, positions.numpy()))

    def reserve_alike(self, layers: Sequence[int], positions: Tensor) -> Tensor:
        """Do what `reserve` does in layers of the same length, which is quicker than one by one."""
        numbers = positions.numpy()
        (rows,) = {self._append(layer, numbers) for layer in layers}
        return torch.arange(*rows)

    def _append(self, layer: int, positions: NDArray[np.int64]) -> tuple[int, int]:
        """Append rows at `positions` [m]; return the first slot and the one behind the last."""
        start, stop = self.lengths[layer], self.lengths[layer] + positions.shape[0]
        if stop > self._k[layer].shape[0]:
            self._grow(layer, stop)
        self._positions[layer].numpy()[start:stop] = positions  # ten times faster than a torch copy
        self.lengths[layer] = stop
        return start, stop

    def append_row(self, position: int) -> None:
        """Append a row at `position` to every layer; it must have room. Its content is undefined until written."""
        self._numbers = self._numbers or [positions.numpy() for positions in self._positions]
        for numbers, length in zip(self._numbers, self.lengths, strict=True):
            numbers[length] = position
        self.lengths = [length + 1 for length in self.lengths]

    def put(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Append rows k (rotated), v [m, Hkv, d] at `positions` [m] and return their slots [m]."""
        self.wait_ready(layer)
        slots = self.reserve(layer, positions)
        start, stop = self.lengths[layer] - positions.shape[0], self.lengths[layer]
        self._k[layer][start:stop] = k
        self._v[layer][start:stop] = v
        return slots

    def extend(self, other: ContextCache) -> None:
        """Append all rows of a cache of the same shape on the same devices, with a few launches for all layers.

        Its states, if it has any, take the place of those that are here.
        """
        self.states = other.states or self.states
        moves: dict[torch.device, list[tuple[Tensor, Tensor]]] = {device: [] for device in self.devices}
        for layer, device in enumerate(self.devices):
            self.wait_ready(layer)
            new = slice(*self._append(layer, other.positions(layer).numpy()))
            moves[device] += [(self._k[layer][new], other.k(layer)), (self._v[layer][new], other.v(layer))]
        for pairs in moves.values():
            to, rows = zip(*pairs, strict=True)
            torch._foreach_copy_(list(to), list(rows))

    def copy_of(self, start: int, stop: int) -> ContextCache:
        """Return a new cache with copies of the rows `start` to `stop` of every layer."""
        copied = ContextCache(self.shape, stop - start, self.dtype, self.devices)
        for layer in range(self.shape.layers):
            rows = slice(start, stop)
            copied.put(layer, self.k(layer)[rows], self.v(layer)[rows], self.positions(layer)[rows])
        return copied

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Overwrite live rows `slots` [m] with k (rotated), v [m, Hkv, d]."""
        self.wait_ready(layer)
        slots = index_to_device(slots, self.devices[layer])
        self._k[layer][slots] = k
        self._v[layer][slots] = v

    def fill(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Overwrite live rows as `write` does, with slots [m] on the CPU. Consecutive ones, as most are, are faster."""
        self.wait_ready(layer)
        start, count = int(slots[0]), slots.shape[0]
        if torch.equal(slots, torch.arange(start, start + count)):
            self._k[layer][start : start + count] = k
            self._v[layer][start : start + count] = v
        else:
            self.write(layer, slots, k, v)

    def move(self, devices: Sequence[torch.device]) -> None:
        """Move all rows to other devices, one a layer. The capacity stays.

        Rows that move from a GPU to the CPU get page-locked memory, which a GPU reads by address.
        """
        for layer in range(self.shape.layers):
            self.wait_ready(layer)
        moved = [layer for layer, device in enumerate(devices) if device != self.devices[layer]]
        pinned = [layer for layer in moved if self.devices[layer].type == "cuda" and devices[layer].type == "cpu"]
        with torch.inference_mode(False):  # as in `_resize`
            memory = iter(pinned_tensors([self._k[layer].shape for layer in pinned for _ in ("k", "v")], self.dtype))
            for layer in moved:
                for store in (self._k, self._v):
                    old, length = store[layer], self.lengths[layer]
                    new = next(memory) if layer in pinned else old.new_empty(old.shape, device=devices[layer])
                    new[:length] = old[:length]
                    store[layer] = new
        self.devices, self._addresses = tuple(devices), None

    def keep(self, rows: Sequence[Tensor], room: int) -> None:
        """Drop all rows of each layer but some, and the memory of the others.

        Args:
            rows: indices [m] (CPU) of the rows that stay, ascending. Layers may share a tensor.
            room: further rows for which there will be room.
        """
        indices: dict[tuple[int, torch.device], Tensor] = {}
        with torch.inference_mode(False):  # as in `_resize`
            for layer, (some, device) in enumerate(zip(rows, self.devices, strict=True)):
                self.wait_ready(layer)
                if (id(some), device) not in indices:
                    indices[id(some), device] = index_to_device(some, device)
                count = some.shape[0]
                for store in (self._k, self._v):
                    new = store[layer].new_empty(count + room, *store[layer].shape[1:])
                    torch.index_select(store[layer], 0, indices[id(some), device], out=new[:count])
                    store[layer] = new
                positions = self._positions[layer].new_empty(count + room)
                positions[:count] = self._positions[layer][some]
                self._positions[layer], self.lengths[layer] = positions, count
        self._addresses = self._numbers = None

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop all rows of each layer behind the first `lengths[layer]`."""
        for layer in range(self.shape.layers):
            self.wait_ready(layer)
        self.lengths = [min(new, old) for new, old in zip(lengths, self.lengths, strict=True)]

    def _grow(self, layer: int, rows: int) -> None:
        """Grow at least twofold, so that appending single rows rarely copies."""
        self._resize(layer, max(rows, 2 * self._k[layer].shape[0]))

    def _resize(self, layer: int, rows: int) -> None:
        self.wait_ready(layer)
        length, self._addresses, self._numbers = self.lengths[layer], None, None
        with torch.inference_mode(False):  # callers outside inference mode write to these tensors, too
            for store in (self._k, self._v, self._positions):
                old = store[layer]
                store[layer] = old.new_empty(rows, *old.shape[1:])
                if length:
                    store[layer][:length] = old[:length]
