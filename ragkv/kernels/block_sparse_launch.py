"""What one program of a block-sparse launch does, and how many share a list (triton_block_sparse.py)."""

from __future__ import annotations

from dataclasses import dataclass

import triton

PROGRAMS = 256
"""Programs that a launch should have: two for each multiprocessor of a GPU."""
SMALL_PROGRAM_QUERIES = 1024
"""Queries up to which small programs are faster, because there would be too few large ones."""
MIN_BATCHES, MAX_SPLITS = 2, 32
"""Where a list is shared: the smallest number of key batches (of `KEYS` keys) of a program, and the largest number of
programs that share the list."""


@dataclass(frozen=True)
class LaunchShape:
    """Work of one program.

    Attributes:
        rows: queries of each query head.
        fold: query heads that read the same keys.
        keys: keys that are read at a time.
        warps: warps of the program.
        stages: pipeline stages of the loop.
    """

    rows: int
    fold: int
    keys: int
    warps: int
    stages: int


def launch_shape(count: int, rows: int, group: int, block: int) -> LaunchShape:
    """Choose the work of a program for `count` queries in tiles of `rows`; `group` query heads read the same keys."""
    # Measured on an H200: 64 rows of two query heads that share 128 keys at a time, or 32 of four; else 16 of four.
    if 16 <= rows <= 32 and group % 4 == 0 and block <= 64:
        small = count <= SMALL_PROGRAM_QUERIES or rows < 32
        return LaunchShape(16, 4, 64, 4, 3) if small else LaunchShape(32, 4, 128, 8, 2)
    rows = min(64, triton.next_power_of_2(rows))
    fold = min(group & -group, max(2, 16 // rows))
    rows = max(rows, 16 // fold)
    keys, warps = (128, 8) if rows * fold > 64 else (64, 4)
    return LaunchShape(rows, fold, max(keys, block), warps, 2)


def count_splits(programs: int, batches: int) -> int:
    """Choose how many programs, a power of two, share a list.

    Args:
        programs: number of programs without sharing.
        batches: key batches of the longest list.
    """
    splits = min(PROGRAMS // max(1, programs), batches // MIN_BATCHES, MAX_SPLITS)
    return 1 << max(0, splits.bit_length() - 1)
