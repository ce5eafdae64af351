"""Page-locked memory for many tensors at once.

PyTorch allocates page-locked memory in powers of two: a tensor of 65 MiB takes 128. Tensors are therefore packed into
few allocations that are full, or nearly so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pinned_tensors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Allocate page-locked tensors, in order."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    made, rest = list[Tensor](), iter(zip(shapes, sizes, strict=True))
    for capacity, count in packed([size * dtype.itemsize for size in sizes]):
        memory, start = torch.empty(capacity // dtype.itemsize, dtype=dtype, pin_memory=True), 0
        for _, (shape, size) in zip(range(count), rest, strict=False):
            made.append(memory[start : start + size].view(shape))
            start += size
    return made


def packed(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Divide sizes, in order, among allocations of a power of two.

    Returns:
        The bytes of each allocation and how many of the sizes it holds.
    """
    found, at = list[tuple[int, int]](), 0
    while at < len(sizes):
        left = sum(sizes[at:])
        capacity = 1 << max(0, left.bit_length() - 1)  # the largest that can be full
        if sizes[at] > capacity:
            capacity *= 2
        count = used = 0
        while at < len(sizes) and used + sizes[at] <= capacity:
            used, at, count = used + sizes[at], at + 1, count + 1
        found.append((capacity, count))
    return found
