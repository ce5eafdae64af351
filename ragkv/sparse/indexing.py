"""Indexing of long tensors, faster than the general operations of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def true_indices(flags: Tensor) -> Tensor:
    """Return the ascending indices [m] int64 of the true values in flags [n]. It is fast if they are few."""
    if len(flags) % 8 or flags.storage_offset() % 8:
        return flags.nonzero()[:, 0]
    words = flags.view(torch.int64).nonzero()[:, 0]
    found = flags.view(-1, 8).index_select(0, words).flatten().nonzero()[:, 0]
    return (words.index_select(0, found >> 3) << 3) + (found & 7)


def rows_of(flat: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Split ascending flat indices [m] into a matrix [rows, length].

    Rows are found by bisection: dividing every index takes longer than reading the value it points at.

    Returns:
        The row of each index [m], and where the indices of each row start [rows + 1].
    """
    numbers = torch.arange(rows + 1, device=flat.device)
    starts = torch.searchsorted(flat, numbers * length)
    return numbers[:rows].repeat_interleave(starts.diff()), starts


def index_flat(x: Tensor, at: Tensor) -> Tensor:
    """Return x[at] for x [n]. It is four times as fast as indexing."""
    return x.index_select(0, at.flatten()).view(at.shape)
