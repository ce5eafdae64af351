"""Rotary position embeddings: one form for all models, and what maps each model's own form to it.

Stored keys, stitching and the GPU's kernels rotate the two halves of a whole head: pair i is (i, i + d/2). Models that
rotate neighbours, a part of a head, or nothing, are brought to this form by one fixed order of the dimensions of their
queries and keys. Products of queries and keys do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROTARIES = ("rotary_emb", "pos_emb")
"""What decoders call the module that computes cos and sin. It is None where keys do not turn."""


@dataclass(frozen=True)
class Rotary:
    """cos and sin [T, d] of given positions, scaled as the model scales them."""

    cos: Tensor
    sin: Tensor

    def __getitem__(self, rows: Tensor) -> Rotary:
        """Select rows."""
        return Rotary(self.cos[rows], self.sin[rows])

    def before(self, end: int) -> Rotary:
        """Return the first rows, as views."""
        return Rotary(self.cos[:end], self.sin[:end])

    def to(self, device: torch.device) -> Rotary:
        """Return the same on a device."""
        return Rotary(self.cos.to(device), self.sin.to(device))


@dataclass(frozen=True)
class Rotation:
    """How the positions of a layer's tokens turn its queries and keys.

    Attributes:
        arguments: what the model's rotary module is called with behind the positions, such as a type of layers.
        order: the model's dimension at each place of our form; None where they are the same.
        table: the entry of the module's cos and sin at each place, -1 where nothing turns; None where they are the
            same.
        grids: sizes in front of the positions that the module takes; several where images have positions of their own.
    """

    arguments: tuple[Any, ...] = ()
    order: tuple[int, ...] | None = None
    table: tuple[int, ...] | None = None
    grids: tuple[int, ...] = (1,)

    def form(self, cos: Tensor, sin: Tensor) -> Rotary:
        """Bring cos and sin [T, n], as the model's module returns them, to our form [T, d]."""
        if self.table is None:
            return Rotary(cos, sin)
        index = torch.tensor(self.table, device=cos.device) % (cos.shape[-1] + 1)  # -1 is the column that is added
        still = cos.new_ones(cos.shape[0], 1)
        return Rotary(torch.cat([cos, still], 1)[:, index], torch.cat([sin, still - 1], 1)[:, index])


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply RoPE to x [..., T, heads, d] in the operation order of transformers, so that results are bit-equal."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * rotary.cos.unsqueeze(-2)) + (rotated * rotary.sin.unsqueeze(-2))


def rotate_together(
    q: Sequence[Tensor], k: Sequence[Tensor], rotary: Sequence[Rotary]
) -> tuple[list[Tensor], list[Tensor]]:
    """Rotate the q and k of several requests at once: a few rows each take as long as all of them."""
    if len(rotary) == 1:
        return [rotate(q[0], rotary[0])], [rotate(k[0], rotary[0])]
    sizes = [each.shape[0] for each in q]
    every = Rotary(torch.cat([each.cos for each in rotary]), torch.cat([each.sin for each in rotary]))
    return list(rotate(torch.cat(list(q)), every).split(sizes)), list(rotate(torch.cat(list(k)), every).split(sizes))


def rotary_name(body: Any) -> str:
    """Return what a decoder calls the module that computes cos and sin; "" where it has none that is known."""
    return next((name for name in ROTARIES if hasattr(body, name)), "")
