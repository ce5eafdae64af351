"""Interfaces that the decode policies share. `prefill.py` has those of the prefill policies.

A policy is a set of parameters. It starts a state, and the state belongs to one request. The state observes the
queries of the question, then it is the attention of the following passes.

    policy.start()               create the state of one request, a `DecodeState`
    QueryObserver                the attention of a pass whose last rows the state observes
    state.observe(layer, ...)    learn from the queries of rows that have attended, and from the keys
    state.step(layer, ...)       attend with one more token and read the keys that it needs

This module sees tensors only: no I/O, no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ragkv.kernels.attention import attend
from ragkv.sparse.prefill import PrefillState, SparsePrefill


@dataclass(frozen=True)
class KeyCount:
    """How many keys one token read in one layer.

    Attributes:
        layer: Layer number.
        read: Keys read [H] int64. H is the number of kv heads, or of query heads if each selects its own keys.
        present: Keys in the cache.
    """

    layer: int
    read: Tensor
    present: int


class BlockFetcher(Protocol):
    """Blocks of one request's context that are not in its cache. Each is known by a key and loaded on demand."""

    def keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return what is not in the cache yet: a key [Hkv, A, d] with RoPE per block, and block sizes [A] int64."""
        ...

    def fetch(self, layer: int, which: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Append blocks to the cache. From then on, `keys` no longer lists them.

        Args:
            layer: Layer number.
            which: Block numbers, as indices into what `keys` returns.

        Returns:
            The rows k, v [m, Hkv, d] of the blocks, one block after the other.
        """
        ...


@dataclass(frozen=True)
class DecodePolicy(ABC):
    """A decode policy. A request may set its fields.

    Attributes:
        above: Contexts with at most this many keys per layer are read densely.
    """

    above: int = field(default=0, kw_only=True)

    def why_dense(self, keys: float) -> str:
        """Return why a context of `keys` keys per layer is read densely; "" where it is read sparsely.

        Args:
            keys: Keys per layer, including those of the question.
        """
        return "" if keys > self.above else f"the context has {keys:.0f} keys a layer, above={self.above} asks for more"

    @abstractmethod
    def start(self) -> DecodeState:
        """Create a fresh state."""


class DecodeState(ABC):
    """The attention of one request from its question on. The state is per layer; layers may hold different rows.

    A call is a decode step if it has one row, whose own key is the only new key since the last call and comes after all
    others. Every other call (a question, a first call) attends densely and is observed. A query therefore never meets
    state that knows later keys, and every step sees the rows that were appended before it.

    Attributes:
        name: Name of the policy.
        query_rows: How many of a question's last rows the state learns from.
        wants_offloaded: Whether the state uses `offloaded`.
        offloaded: Blocks outside the cache that the state may fetch.
        fetched: Blocks fetched into the cache so far, over all layers.
        read_all: Why a step may read every key, for the report.
        key_counts: One count per step and layer, in order.
    """

    name = ""
    query_rows = 1
    read_all = "what it reads at least covers the context"
    wants_offloaded = False

    def __init__(self) -> None:
        self.key_counts: list[KeyCount] = []
        self.offloaded: BlockFetcher | None = None
        self.fetched = 0
        self._seen: dict[int, tuple[int, int]] = {}

    def use_prefill(self, prefill: PrefillState) -> None:  # noqa: B027
        """Learn which state chose the keys of the question's pass, where a prefill policy did. Ignored by default."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> Tensor:
        """Attend like `attend`. Between calls, rows may only be appended.

        Raises:
            ValueError: The cache holds fewer rows than at the last call.
        """
        seen, latest = self._seen.get(layer, (0, -1))
        if seen and q.shape[0] == 1 and latest < int(q_pos[0]) and k_pos[seen:].tolist() == q_pos.tolist():
            self._record_rows(layer, k_pos)
            out, read = self.step(layer, q[0], k, v, k_pos, scale=scale)
            self.key_counts.append(KeyCount(layer, read, self._seen[layer][0]))
            return out[None]
        out = attend(q, k, v, q_pos, k_pos, scale=scale)
        self.observe(layer, q, k, v, q_pos, k_pos, scale=scale)
        return out

    def observe(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> None:
        """Record rows that have attended, by whatever attention, and learn from them.

        The rows q [T, Hq, d] at q_pos [T] are in order and are the last of the context: no key of k has a later
        position than the last row.
        """
        self._record_rows(layer, k_pos)
        self.learn(layer, q, k, v, q_pos, k_pos, scale=scale)

    def _record_rows(self, layer: int, k_pos: Tensor) -> None:
        """Record how many rows the cache holds and the latest position among them."""
        seen, latest = self._seen.get(layer, (0, -1))
        if k_pos.shape[0] < seen:
            raise ValueError(f"layer {layer} held {seen} rows and now holds {k_pos.shape[0]}; start a new state")
        new = k_pos[seen:]
        self._seen[layer] = k_pos.shape[0], max(latest, int(new.max())) if len(new) else latest

    def _fetch(self, layer: int, offloaded: BlockFetcher, which: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Append blocks to the cache behind the row of this step. Returns the rows of the blocks."""
        k, v = offloaded.fetch(layer, which)
        rows, latest = self._seen[layer]
        self._seen[layer] = rows + k.shape[0], latest
        self.fetched += len(which)
        return k, v

    @abstractmethod
    def learn(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> None:
        """Update the state from rows that have attended. See `observe`."""

    @abstractmethod
    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend with one token q [Hq, d], whose own key is the last of k.

        Returns:
            The output [Hq, d], and the numbers of keys read, as `KeyCount.read`.
        """

    @property
    def has_selected(self) -> bool:
        """Whether the state has chosen which keys a step reads at least once."""
        return bool(self.key_counts)

    @property
    def keys_read(self) -> int:
        """Keys that all steps have read, over layers and over kv heads (or query heads; see `KeyCount`)."""
        by_device: dict[torch.device, list[Tensor]] = {}  # layers may be on several devices
        for count in self.key_counts:
            by_device.setdefault(count.read.device, []).append(count.read)
        return sum(int(torch.stack(counts).sum()) for counts in by_device.values())

    @property
    def keys_present(self) -> int:
        """Keys that dense attention would have read."""
        return sum(count.present * count.read.shape[0] for count in self.key_counts)


class QueryObserver:
    """The attention of the pass that reads a question.

    Rows attend as without an observer. Then `state` observes the rows from position `start` on. Repaired rows of the
    same pass come before `start` and do not belong to the question.
    """

    def __init__(self, state: DecodeState, prefill: SparsePrefill | None, start: int):
        """Observe for `state`.

        Args:
            state: Observes the rows.
            prefill: The attention of the rows; None means dense.
            start: Position of the question's first row.
        """
        self.state, self.prefill, self.start = state, prefill, start

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> Tensor:
        """Attend like `attend`, then let the state observe the question's rows."""
        if self.prefill is None:
            out = attend(q, k, v, q_pos, k_pos, scale=scale)
        else:
            out = self.prefill(layer, q, k, v, q_pos, k_pos, scale=scale)
        first = int((q_pos < self.start).sum())
        self.state.observe(layer, q[first:], k, v, q_pos[first:], k_pos, scale=scale)
        return out


def decode_state(policy: DecodePolicy | None, keys: float, prefill: SparsePrefill | None = None) -> DecodeState | None:
    """Create the state for a context of `keys` keys per layer; None means that decoding is dense.

    Args:
        policy: The decode policy.
        keys: Keys per layer, including those of the question.
        prefill: The attention of the question's pass; None is dense.
    """
    if policy is None or policy.why_dense(keys):
        return None
    state = policy.start()
    if prefill is not None:
        state.use_prefill(prefill.state)
    return state


def observe_queries(
    prefill: SparsePrefill | None, state: DecodeState | None, start: int
) -> SparsePrefill | QueryObserver | None:
    """Create the attention of a pass whose rows from position `start` on `state` observes, if there is a state."""
    return prefill if state is None else QueryObserver(state, prefill, start)


def last_rows(state: DecodeState | None) -> int:
    """Return how many last rows of a question have to reach the attention of the last layer."""
    return 1 if state is None else state.query_rows
