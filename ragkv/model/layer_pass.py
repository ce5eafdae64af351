"""One pass of one request through the model, described as data: which rows enter, what they write, which go on.

    rows enter layer 0           tokens [T] at positions [T]
    each layer                   project the rows present -> q, k, v
      write                      some rows put their k, v into the cache (new rows, or over stored ones: repair)
      leave                      only rows that a later layer needs attend and go on: rows thin out from layer to layer
    after the last layer         logits of the rows that are left

SamKV's rules 1 and 2 (section 3.3) are a choice of `write` and `leave`; plain prefill and decoding are another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ragkv.model.kv_cache import ContextCache
from ragkv.types import Blend


class Attention(Protocol):
    """How the rows of a pass attend, where it is not densely: `kernels.attention.attend`, told the layer."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> Tensor:
        """q [T, Hq, d] over the cache's k, v [n, Hkv, d], all with RoPE; returns [T, Hq, d]."""
        ...


@dataclass(frozen=True)
class Step:
    """What one layer does with the rows that reach it.

    write  [W] indices among the rows present whose K, V are written; None: all of them, in order
    slots  [W] cache slots they are written to
    blend  how many of them, counted from the front, meet a stored row and go through the pass's `blend`
    leave  [O] indices among the rows present that attend and go on; None: all of them
    """

    write: Tensor | None
    slots: Tensor
    blend: int = 0
    leave: Tensor | None = None


@dataclass
class Capture:
    """Filled by a pass, one entry per layer: pre-RoPE q [T_l, Hq, d], and pre-RoPE k, v [T_l, Hkv, d] if asked.
    entered: hidden states [T_l, hidden size] that entered the last layer that was run; another pass can go on there."""

    keys_too: bool = False
    entered: Tensor | None = None
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)

    def add(self, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """A layer's."""
        self.entered = hidden
        self.q.append(q)
        if self.keys_too:
            self.k.append(k)
            self.v.append(v)


@dataclass(frozen=True)
class Pass:
    """tokens, positions [T] int64 (CPU) · steps: one per layer that is run · depth: the layer to stop before; a pass
    that stops early gives no logits and does not attend in its last layer (its rows' queries are then captured and
    nothing else needs them) · start, hidden: rows enter this layer as these hidden states [T, hidden size], not as
    tokens · attention: sparse; None: dense."""

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


def write_rows(p: Pass, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
    """Put a layer's rows k (rotated), v [T, Hkv, d] into the pass's cache, blended with what they replace where told
    so."""
    if step.write is not None:
        rows = step.write.to(k.device)
        k, v = k[rows], v[rows]
    if step.blend and p.blend is not None:
        old = step.slots[: step.blend].to(k.device)
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
    """A plain pass: the tokens stand at positions start.. and are appended to the cache in every layer.

    outputs: how many of the last rows give logits, all where there are fewer; 0 stops after writing the last layer's
    K, V.
    """
    positions = torch.arange(start, start + len(tokens))
    last = torch.arange(max(0, len(tokens) - outputs), len(tokens))
    depth_run = cache.shape.layers if depth is None else depth
    steps = []
    for layer in range(depth_run):
        slots = cache.reserve(layer, positions)
        steps.append(Step(write=None, slots=slots, leave=last if layer == cache.shape.layers - 1 else None))
    ids = torch.tensor(tokens, dtype=torch.int64)
    return Pass(ids, positions, cache, steps, capture=capture, depth=depth, attention=attention)
