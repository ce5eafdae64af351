"""What the sparse policies share: a policy is parameters, a request's state decides what is read, layer by layer.

Prefill: the state chooses lists of keys.
    policy.start()               state of one request, or of one conversation
    state.select(layer, …)       which keys the new rows of this layer read; None: all of them
    Sparse                       the attention of a pass that asks the state first

Decoding: the state looks on while the question is read, and is the attention of the passes that follow.
    decoder.start()              state of one request, a `Decoding`
    Observed                     the attention of a pass whose last rows the state looks at
    state.observe(layer, …)      rows have been read: learn from their queries and from the keys
    state.step(layer, …)         one more token: read what it needs

Tensors only: no I/O, no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ragkv.kernels.attention import attend
from ragkv.kernels.block_index import BlockSparseIndex
from ragkv.kernels.block_sparse import attend_block_sparse


class PrefillState(Protocol):
    """State of one request: chooses what is read, layer by layer, in order."""

    def select(
        self, layer: int, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, end: int, scale: float
    ) -> BlockSparseIndex | None:
        """Which keys the rows q [T, Hq, d] at q_pos [T] read of k [n, Hkv, d] at k_pos [n], both with RoPE; None: all.

        Rows stand at consecutive positions, and their own keys are among k. end: the position behind the input's last
        token, of which these rows may be a part.
        """
        ...


class PrefillPolicy(Protocol):
    """A prefill policy. Frozen; its fields are what a request may set."""

    def applies(self, tokens: int) -> bool:
        """Whether an input of so many tokens is read sparsely at all."""
        ...

    def start(self) -> PrefillState:
        """Fresh state."""
        ...


class SparsePrefill:
    """The attention of a pass under a policy. State of one request.

    end: as in `Choice.select` · read, whole: query-key pairs that were computed, and that dense attention would have
    computed, over all layers and attention heads so far · chosen: whether the choice listed anything, or left all
    layers dense.
    """

    def __init__(self, choice: PrefillState, end: int):
        self.choice, self.end = choice, end
        self.whole, self.chosen = 0, False
        self._read: list[Tensor] = []
        self._seen: tuple[Tensor, Tensor, int] | None = None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> Tensor:
        """As `attend`, over what the choice lists. Rows that are few or not consecutive are read densely."""
        whole = q.shape[1] * self._pairs(q_pos, k_pos)
        self.whole += whole
        lists = None
        if q.shape[0] > 1 and bool((q_pos[1:] - q_pos[:-1] == 1).all()):
            lists = self.choice.select(layer, q, k, q_pos, k_pos, end=self.end, scale=scale)
        if lists is None:
            self._read.append(torch.tensor(whole))
            return attend(q, k, v, q_pos, k_pos, scale=scale)
        self.chosen = True
        self._read.append(indexed_pairs(lists, q))
        return attend_block_sparse(q, k, v, q_pos, k_pos, lists, scale=scale)[0]

    def _pairs(self, q_pos: Tensor, k_pos: Tensor) -> int:
        """As `pairs`; layers that hold the same positions are counted once."""
        if self._seen is None or not (torch.equal(self._seen[0], q_pos) and torch.equal(self._seen[1], k_pos)):
            self._seen = q_pos, k_pos.clone(), pairs(q_pos, k_pos)
        return self._seen[2]

    @property
    def read(self) -> int:
        """See the class."""
        return sum(int(each) for each in self._read)


@dataclass(frozen=True)
class KeysRead:
    """One token in one layer: keys that each list of attention heads read [H] int64, out of those present.

    H: kv heads, or query heads where each has keys of its own.
    """

    layer: int
    read: Tensor
    present: int


class BlockFetcher(Protocol):
    """Blocks of the context that are not in the cache, of one request: known by a key each, loaded when asked for."""

    def keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """What is not there yet: a key [Hkv, A, d] with RoPE for each block, and its tokens [A] int64."""
        ...

    def fetch(self, layer: int, which: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Append blocks, numbered as in `keys`, to the cache; returns their rows k, v [m, Hkv, d], block after block.
        From then on they are not elsewhere."""
        ...


@dataclass(frozen=True)
class DecodePolicy(ABC):
    """A decode policy. Its fields are what a request may set.

    above: contexts of no more keys a layer are read densely.
    """

    above: int = field(default=0, kw_only=True)

    def applies(self, keys: float) -> bool:
        """Whether a context of so many keys, the question's among them, is read sparsely at all."""
        return keys > self.above

    @abstractmethod
    def start(self) -> DecodeState:
        """Fresh state."""


class DecodeState(ABC):
    """The attention of one request from its question on. Its state is per layer, and layers need not hold the same
    rows.

    A call with one row, whose own key is the only one that came since the last call and stands behind all others, is a
    step of decoding. Every other call (a question, a first call) attends densely and is observed. So a query never
    meets state that knows keys behind it, and rows that come later are seen by every step.

    readings: of every step, in order · rows: how many of a question's last rows `observe` learns from · reaches:
    whether it wants to be given what is `elsewhere` · pulled: blocks of it that came into the cache, over layers.
    """

    rows = 1
    wants_offloaded = False

    def __init__(self) -> None:
        self.steps_read: list[KeysRead] = []
        self.offloaded: BlockFetcher | None = None
        self.fetched = 0
        self._seen: dict[int, tuple[int, int]] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> Tensor:
        """As `attend`. Between calls rows may only be appended; ValueError where there are fewer than before."""
        seen, latest = self._seen.get(layer, (0, -1))
        if seen and q.shape[0] == 1 and latest < int(q_pos[0]) and k_pos[seen:].tolist() == q_pos.tolist():
            self._see(layer, k_pos)
            out, read = self.step(layer, q[0], k, v, k_pos, scale=scale)
            self.steps_read.append(KeysRead(layer, read, self._seen[layer][0]))
            return out[None]
        out = attend(q, k, v, q_pos, k_pos, scale=scale)
        self.observe_rows(layer, q, k, v, q_pos, k_pos, scale=scale)
        return out

    def observe_rows(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> None:
        """Rows q [T, Hq, d] at q_pos [T] have been read, by whatever attention. They are in order, and are the last of
        the context: no key of k stands behind the last of them."""
        self._see(layer, k_pos)
        self.observe(layer, q, k, v, q_pos, k_pos, scale=scale)

    def _see(self, layer: int, k_pos: Tensor) -> None:
        seen, latest = self._seen.get(layer, (0, -1))
        if k_pos.shape[0] < seen:
            raise ValueError(f"layer {layer} held {seen} rows and now holds {k_pos.shape[0]}; start a new state")
        came = k_pos[seen:]
        self._seen[layer] = k_pos.shape[0], max(latest, int(came.max())) if len(came) else latest

    def _fetch(self, layer: int, offloaded: BlockFetcher, which: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Have blocks appended to the cache behind the row of this step; returns their rows."""
        k, v = offloaded.fetch(layer, which)
        rows, latest = self._seen[layer]
        self._seen[layer] = rows + k.shape[0], latest
        self.fetched += len(which)
        return k, v

    @abstractmethod
    def observe(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> None:
        """Learn from rows that were read."""

    @abstractmethod
    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend with q [Hq, d], whose own key is the last of k. Returns out [Hq, d] and `Reading.read`."""

    @property
    def read(self) -> int:
        """Keys that all steps have read, over layers and lists of attention heads."""
        on: dict[torch.device, list[Tensor]] = {}  # layers may lie on several
        for each in self.steps_read:
            on.setdefault(each.read.device, []).append(each.read)
        return sum(int(torch.stack(read).sum()) for read in on.values())

    @property
    def present(self) -> int:
        """Keys that dense attention would have read."""
        return sum(each.present * each.read.shape[0] for each in self.steps_read)


class QueryObserver:
    """The attention of the pass that reads a question: its rows are read as ever, then `state` looks at those from
    position `start` on. Repaired rows of the same pass stand before it and are nobody's question."""

    def __init__(self, state: DecodeState, prefill: SparsePrefill | None, start: int):
        """reading: how the rows are read, None: densely."""
        self.state, self.prefill, self.start = state, prefill, start

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> Tensor:
        """As `attend`."""
        if self.prefill is None:
            out = attend(q, k, v, q_pos, k_pos, scale=scale)
        else:
            out = self.prefill(layer, q, k, v, q_pos, k_pos, scale=scale)
        first = int((q_pos < self.start).sum())
        self.state.observe_rows(layer, q[first:], k, v, q_pos[first:], k_pos, scale=scale)
        return out


def prefill_attention(policy: PrefillPolicy | None, end: int) -> SparsePrefill | None:
    """How an input of `end` tokens is read; None: densely."""
    return SparsePrefill(policy.start(), end) if policy is not None and policy.applies(end) else None


def decode_state(decoder: DecodePolicy | None, keys: float) -> DecodeState | None:
    """State for a context of so many keys a layer; None where decoding is dense."""
    return decoder.start() if decoder is not None and decoder.applies(keys) else None


def observe_queries(
    sparse: SparsePrefill | None, state: DecodeState | None, start: int
) -> SparsePrefill | QueryObserver | None:
    """The attention of a pass whose rows from position `start` on a decode policy looks at, if there is one."""
    return sparse if state is None else QueryObserver(state, sparse, start)


def last_rows(state: DecodeState | None) -> int:
    """Last rows of a question that have to reach the attention of the last layer."""
    return 1 if state is None else state.rows


def wide(dtype: torch.dtype) -> torch.dtype:
    """What scores and partial results are computed in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def pairs(q_pos: Tensor, k_pos: Tensor) -> int:
    """Query-key pairs that causality allows, of one attention head."""
    return int(torch.searchsorted(k_pos.sort().values, q_pos, right=True).sum())


def indexed_pairs(index: BlockSparseIndex, q: Tensor) -> Tensor:
    """Query-key pairs that are computed for q, over all attention heads, whole tiles against whole blocks: what lies
    beyond causality inside a listed block is computed, too."""
    rows = torch.full((index.counts.shape[1],), index.tile)
    rows[0] -= index.offset
    rows[-1] -= rows.sum() - q.shape[0]
    keys = index.counts.long() * index.block
    if index.column_counts is not None:
        keys = keys + index.column_counts
    return (keys * rows.to(q.device)).sum() * (q.shape[1] // index.counts.shape[0])
