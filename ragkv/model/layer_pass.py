"""One pass of one request through the model, described as data.

    rows enter layer 0           tokens [T] at positions [T]
    each layer                   project the rows present -> q, k, v
      write                      some rows write their k, v to the cache: new rows, or stored rows that are repaired
      leave                      only rows that a later layer needs attend and go on, so later layers have fewer rows
    after the last layer         logits of the rows that are left

SamKV's rules 1 and 2 (section 3.3) are one choice of `write` and `leave`; plain prefill and decoding are another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ragkv.kernels.attention import index_to_device
from ragkv.model.kv_cache import ContextCache
from ragkv.model.recurrence import Composition
from ragkv.types import Blend


class Attention(Protocol):
    """Sparse attention of a pass: `kernels.attention.attend` with the layer as first argument."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> Tensor:
        """Compute attention [T, Hq, d] of q [T, Hq, d] over the cache's k, v [n, Hkv, d], all with RoPE applied."""
        ...


@dataclass(frozen=True)
class Step:
    """What one layer does with the rows that reach it.

    Attributes:
        write: [W]. Indices, among the rows present, of those whose K, V are written; None for all, in order.
        slots: [W]. Cache slots they are written to.
        blend: number of written rows, from the front, that are blended with the stored row by the pass's `blend`.
        leave: [O]. Indices, among the rows present, of those that attend and go on; None for all.
    """

    write: Tensor | None
    slots: Tensor
    blend: int = 0
    leave: Tensor | None = None


@dataclass
class Capture:
    """Tensors that a pass records, one entry per layer.

    Attributes:
        keys_too: whether to record k and v as well.
        entered: [T_l, hidden]. Hidden states that entered the last layer that was run. Another pass can continue there.
        q: pre-RoPE queries [T_l, Hq, d] of each layer.
        k: pre-RoPE keys [T_l, Hkv, d] of each layer, where recorded.
        v: values [T_l, Hkv, d] of each layer, where recorded.
    """

    keys_too: bool = False
    entered: Tensor | None = None
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)

    def add(self, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Record the tensors of a layer."""
        self.entered = hidden
        self.q.append(q)
        if self.keys_too:
            self.k.append(k)
            self.v.append(v)


@dataclass(frozen=True)
class Pass:
    """One pass of one request.

    Attributes:
        tokens: [T] int64 (CPU).
        positions: [T] int64 (CPU).
        cache: the cache to write to and attend to.
        steps: one for each layer that is run.
        blend: blends new and stored keys and values where a step asks for it.
        capture: records q, and k and v if asked.
        depth: the layer to stop before; None runs all. A pass that stops early gives no logits and does not attend in
            its last layer, because only the captured queries are needed.
        start: the layer that rows enter.
        hidden: [T, hidden]. Hidden states of the rows that enter layer `start`; None embeds the tokens.
        attention: sparse attention; None for dense attention.
        composition: states that go on over the inputs of the pass, beside those of its cache.
        decodes: whether it is a plain pass (`append`) of tokens of an answer with logits for all of them, which a CPU
            may multiply with rounded weights.
    """

    tokens: Tensor
    positions: Tensor
    cache: ContextCache
    steps: Sequence[Step]
    blend: Blend | None = None
    capture: Capture | None = None
    depth: int | None = None
    start: int = 0
    hidden: Tensor | None = None
    attention: Attention | None = None
    composition: Composition | None = None
    decodes: bool = False


def write_rows(p: Pass, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
    """Write a layer's rows k (rotated), v [T, Hkv, d] to the pass's cache, blended with stored rows where the step
    asks."""
    if step.write is not None:
        rows = index_to_device(step.write, k.device)
        k, v = k[rows], v[rows]
    if step.blend and p.blend is not None:
        old = index_to_device(step.slots[: step.blend], k.device)
        k = torch.cat([p.blend(k[: step.blend], p.cache.k(layer)[old]), k[step.blend :]])
        v = torch.cat([p.blend(v[: step.blend], p.cache.v(layer)[old]), v[step.blend :]])
    p.cache.write(layer, step.slots, k, v)


def append(
    cache: ContextCache,
    tokens: Sequence[int],
    start: int,
    *,
    outputs: int = 1,
    capture: Capture | None = None,
    depth: int | None = None,
    attention: Attention | None = None,
) -> Pass:
    """Make a plain pass that appends tokens to the cache in every layer.

    Args:
        cache: the cache.
        tokens: the tokens.
        start: position of the first token.
        outputs: number of the last rows that give logits, at most all. With 0 the pass ends when K, V of the last layer
            are written.
        capture: as in `Pass`.
        depth: as in `Pass`.
        attention: as in `Pass`.
    """
    positions = torch.arange(start, start + len(tokens))
    last = torch.arange(max(0, len(tokens) - outputs), len(tokens))
    depth_run = cache.shape.layers if depth is None else depth
    alike: dict[int, list[int]] = {}  # by length: a decoded token has the same slot in most layers
    for layer in range(depth_run):
        alike.setdefault(cache.lengths[layer], []).append(layer)
    slots = {
        layer: to for layers in alike.values() for to in [cache.reserve_alike(layers, positions)] for layer in layers
    }
    ends = cache.shape.layers - 1
    steps = [Step(None, slots[layer], leave=last if layer == ends else None) for layer in range(depth_run)]
    ids = torch.tensor(tokens, dtype=torch.int64)
    return Pass(ids, positions, cache, steps, capture=capture, depth=depth, attention=attention)
