"""Layers with a state instead of keys: linear attention (Gated DeltaNet, Mamba-2) and short convolutions.

Hybrid models put many of these between few layers with attention. Such a layer needs one state of what it has read,
not a row a token: the last inputs of its convolution, and where it has one the state of its recurrence. It runs by its
own forward, which asks a cache for the state it begins with and tells it the one it leaves.

Nothing is changed in place: a pass that fails half-way, or that only asks, leaves the states as they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragkv.errors import ModelUnsupported


@dataclass(frozen=True)
class RecurrentState:
    """The state of one layer.

    Attributes:
        tail: [1, channels, n]. The last inputs of its convolution; None before the first token.
        recurrent: [1, heads, …]. State of its recurrence; None before the first token, and where there is none.
    """

    tail: Tensor | None = None
    recurrent: Tensor | None = None


States = tuple[RecurrentState, ...]
"""The states of all layers that have one, in their order."""


@dataclass
class Composition:
    """States that go on over what enters the layers during a pass, beside the pass's own states.

    What a layer does with its state over some inputs is its transition. A pass applies those of its inputs to these
    states; its own rows do not depend on them. Several passes, one after another, compose their transitions.

    Attributes:
        states: of all layers that have one; a pass replaces them when its forward has ended.
    """

    states: States


class _CallCache:
    """What a layer of transformers takes for its cache during one call."""

    def __init__(self, state: RecurrentState):
        self.tail, self.recurrent = state.tail, state.recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        _one(state_idx)
        return self.tail

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a copy: kernels for single tokens write into the state."""
        _one(state_idx)
        self.recurrent = None if self.recurrent is None else self.recurrent.clone()
        return self.recurrent

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Take new inputs; return all that the convolution reads."""
        _one(state_idx)
        if conv_kernel_size is None:
            raise ModelUnsupported("its convolution does not tell its size")
        whole = conv_states if self.tail is None else torch.cat([self.tail, conv_states], -1)
        short = max(0, conv_kernel_size - whole.shape[-1])
        self.tail = torch.nn.functional.pad(whole[..., -conv_kernel_size:], (short, 0)).clone()
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        _one(state_idx)
        self.recurrent = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True: else a single token would be written into the state in place."""
        return True

    # What earlier releases of transformers read in place of these methods.
    record_past = True

    @property
    def layers(self) -> Mapping[int, _CallCache]:
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> Mapping[int, Tensor | None]:
        return {0: self.tail}

    @property
    def recurrent_states(self) -> Mapping[int, Tensor | None]:
        return {0: self.get_recurrent_state(0)}

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.tail is not None or self.recurrent is not None


def _one(state_idx: int) -> None:
    if state_idx:
        raise ModelUnsupported("it keeps several states")


class RecurrentLayer:
    """A layer with a state, which runs by its own forward.

    Attributes:
        device: where it computes.
    """

    def __init__(self, block: Any, given: Mapping[str, Any]):
        """Wrap a layer of transformers; given: what the model passes to it by name, apart from cache and positions."""
        self._block, self._given = block, {**given, "attention_mask": None, "position_embeddings": None}
        self.device = next(block.parameters()).device

    def __call__(self, hidden: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """Run the layer on rows [T, hidden] that follow each other; return its rows and the state behind them."""
        if not hidden.shape[0]:
            return hidden, state
        cache = _CallCache(state)
        found = self._block(hidden[None].to(self.device), **{**self._given, "past_key_values": cache})
        rows: Tensor = found[0] if isinstance(found, tuple) else found
        return rows[0], RecurrentState(cache.tail, cache.recurrent)


@dataclass(frozen=True)
class StateForm:
    """What the states of a model are, for whoever stores them.

    Attributes:
        sizes: sizes of every tensor, layer by layer: the convolution's, then the recurrence's where there is one.
        recurrent: whether each layer has a recurrence.
        dtype: the model's; states are rounded to it when they are stored.
    """

    sizes: tuple[tuple[int, ...], ...] = ()
    recurrent: tuple[bool, ...] = ()
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        """Bytes of all states as stored; 0 for a model without."""
        return sum(int(torch.Size(size).numel()) for size in self.sizes) * self.dtype.itemsize

    def flat(self, states: States) -> tuple[Tensor, ...]:
        """Return the tensors of states, rounded to the model's dtype."""
        given = [each for state in states for each in (state.tail, state.recurrent) if each is not None]
        return tuple(each.detach().to(self.dtype).contiguous() for each in given)

    def states(self, tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> States:
        """Return the states that tensors are of, each on the device of its layer."""
        left, made = list(tensors), list[RecurrentState]()
        for recurrent, device in zip(self.recurrent, devices, strict=True):
            tail = left.pop(0).to(device)
            made.append(RecurrentState(tail, left.pop(0).to(device) if recurrent else None))
        return tuple(made)

    def unpacked(self, raw: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors in their stored bytes [bytes] uint8, one after another."""
        numbers = raw.view(self.dtype)
        parts = numbers.split([int(torch.Size(size).numel()) for size in self.sizes])
        return tuple(part.view(size) for part, size in zip(parts, self.sizes, strict=True))


def state_form(states: States, dtype: torch.dtype) -> StateForm:
    """Return the form of states as a pass left them."""
    if any(state.tail is None for state in states):
        raise ModelUnsupported("a layer without attention has no convolution, so its state is not understood")
    tensors = [each for state in states for each in (state.tail, state.recurrent) if each is not None]
    sizes = tuple(tuple(each.shape) for each in tensors)
    return StateForm(sizes, tuple(state.recurrent is not None for state in states), dtype)
