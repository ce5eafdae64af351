"""Interfaces that the prefill policies share.

A policy is a set of parameters. It starts a state, and the state belongs to one request, or to one conversation. The
state selects keys for the new rows, layer by layer.

    policy.why_dense(...)        whether rows over so many keys are read sparsely at all, and why not
    policy.start()               create the state of one request, or of one conversation
    state.select(layer, ...)     select the keys that the new rows of this layer read; None means all
    SparsePrefill                the attention of passes that ask the state first

This module sees tensors only: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ragkv.kernels.attention import attend, copy_to_device
from ragkv.kernels.block_index import BlockSparseIndex
from ragkv.kernels.block_sparse import attend_block_sparse
from ragkv.sparse.pairs import VisiblePairs, causal_pairs, indexed_pairs


class PrefillState(Protocol):
    """State of one request during prefill.

    Attributes:
        name: Name of the policy.
        read_all: Why the state may select every key, for the report.
    """

    @property
    def name(self) -> str: ...

    @property
    def read_all(self) -> str: ...

    @property
    def bytes(self) -> int:
        """Bytes that the state keeps from one turn of a conversation to the next."""
        ...

    def select(
        self, layer: int, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, end: int | None, scale: float
    ) -> BlockSparseIndex | None:
        """Select the keys that the rows of one layer read. Layers are passed in order.

        Args:
            layer: Layer number.
            q: Queries [T, Hq, d] with RoPE, at ascending positions. Repaired rows are scattered over the context.
            k: Keys [n, Hkv, d] with RoPE. The keys of the rows are among them.
            q_pos: Positions [T] of the rows.
            k_pos: Positions [n] of the keys.
            end: Position behind the last token of a long input, whose end may be read densely. The rows may be only a
                part of the input. None for rows over a stitched context: all of them select.
            scale: Softmax scale.

        Returns:
            The selected keys, or None for all keys.
        """
        ...


class PrefillPolicy(Protocol):
    """A prefill policy. It is frozen, and a request may set its fields."""

    def why_dense(self, rows: int, keys: int) -> str:
        """Return why `rows` new rows that attend to `keys` keys are read densely; "" where they are read sparsely."""
        ...

    def start(self) -> PrefillState:
        """Create a fresh state."""
        ...


@dataclass(frozen=True)
class PassPositions:
    """What is known of the positions of a pass. Layers with the same positions share it.

    Attributes:
        visible: Counts the pairs that an index reads. It has the positions, on the CPU.
        pairs: Pairs of one attention head that causality allows.
        ascending: Whether the rows are at ascending positions.
    """

    visible: VisiblePairs
    pairs: int
    ascending: bool
    _copies: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def on_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions [T] of the rows and [n] of the keys for attention on a device.

        They are int64 on the CPU. Elsewhere they are int32 and copied once, without the host waiting for it.
        """
        positions = self.visible.q_pos, self.visible.k_pos
        if device.type == "cpu":
            return positions
        if device not in self._copies:
            q_at, k_at = copy_to_device([each.int() for each in positions], device)
            self._copies[device] = q_at, k_at
        return self._copies[device]


class SparsePrefill:
    """The attention of the passes of one request, or turn, under a prefill policy.

    Attributes:
        state: Selects the keys.
        end: As in `PrefillState.select`.
        dense_pairs: Query-key pairs that dense attention would have computed so far, over all layers and attention
            heads.
        selected: Whether the state has selected keys at least once. False means that every layer was dense.
    """

    def __init__(self, state: PrefillState, end: int | None):
        self.state, self.end = state, end
        self.dense_pairs, self.selected = 0, False
        self._computed: list[Tensor] = []
        self._read: list[Tensor] = []
        self._positions: PassPositions | None = None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> Tensor:
        """Attend like `attend`, but to the selected keys only.

        A single row, or rows that are not at ascending positions, attend densely.
        """
        positions = self._positions_of(q_pos, k_pos)
        dense = q.shape[1] * positions.pairs
        index = None
        if q.shape[0] > 1 and positions.ascending:
            index = self.state.select(layer, q, k, q_pos, k_pos, end=self.end, scale=scale)
        if index is None:
            self.count_dense(dense)
            return attend(q, k, v, q_pos, k_pos, scale=scale)
        self.selected = True
        self.dense_pairs += dense
        self._computed.append(indexed_pairs(index, q))
        self._read.append(positions.visible.read(index, q.shape[1]))
        return attend_block_sparse(q, k, v, *positions.on_device(q.device), index, scale=scale)[0]

    def count_dense(self, pairs: int) -> None:
        """Count the query-key pairs of a pass that attends densely, over all layers and attention heads."""
        self.dense_pairs += pairs
        self._computed.append(torch.tensor(pairs))
        self._read.append(torch.tensor(pairs))

    def _positions_of(self, q_pos: Tensor, k_pos: Tensor) -> PassPositions:
        """Return what is known of the positions; it is computed where they are not those of the layer before."""
        if self._positions is None or not self._positions.visible.matches(q_pos, k_pos):
            ascending = bool((q_pos[1:] > q_pos[:-1]).all())
            self._positions = PassPositions(VisiblePairs(q_pos, k_pos.clone()), causal_pairs(q_pos, k_pos), ascending)
        return self._positions

    @property
    def computed_pairs(self) -> int:
        """Query-key pairs that were computed so far, over all layers and attention heads.

        Whole tiles count, with the pairs in them that causality hides.
        """
        return sum(int(pairs) for pairs in self._computed)

    @property
    def pairs_read(self) -> int:
        """Query-key pairs that were read so far, of the `dense_pairs` that dense attention reads."""
        return sum(int(pairs) for pairs in self._read)


def prefill_attention(policy: PrefillPolicy | None, end: int) -> SparsePrefill | None:
    """Create the attention for an input of `end` tokens; None means dense."""
    return None if policy is None or policy.why_dense(end, end) else SparsePrefill(policy.start(), end)
