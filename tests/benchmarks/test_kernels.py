"""Rooflines of kernels: their bounds, and the error without a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import KernelParams, KernelRow, KernelWork, bound, grid, measure
from benchmarks.roofline import Speeds
from benchmarks.shapes import SHAPES
from ragkv.errors import InputError

AT = Speeds(copy=4e12, link=5e10, products=8e14)


@pytest.mark.parametrize(
    ("work", "least", "by"),
    [
        (KernelWork(2e6), 1.0, "launch"),
        (KernelWork(4e7), 10.0, "memory"),
        (KernelWork(4e7, link=5e6), 100.0, "link"),
        (KernelWork(4e7, flops=1.6e10), 20.0, "arithmetic"),
    ],
)
def test_the_slowest_part_is_the_bound(work: KernelWork, least: float, by: str) -> None:
    assert bound(work, AT, 1.0) == (pytest.approx(least), by)


def test_a_row_shows_its_share() -> None:
    row = KernelRow("carry", "145 blocks, exact, from host", 20.0, 15.0, "link", 0.75, None)
    assert grid([row]).rows == (("carry", "145 blocks, exact, from host", "link", "20.0", "15.0", "75%", "–"),)


def test_without_a_gpu_nothing_is_measured() -> None:
    with pytest.raises(InputError, match="--device cuda"):
        measure(SHAPES["tiny"], KernelParams(), "cpu", lambda *_: None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_kernel_is_timed_and_agrees_with_its_reference() -> None:
    _, rows = measure(SHAPES["tiny"], KernelParams(4096, 256, 300, 300, 16), "cuda", lambda *_: None)
    assert {row.kernel for row in rows} == {"add_norm", "gated", "turn", "attend", "place", "attend_lists", "carry"}
    assert all(row.us > 0 and 0 < row.share <= 1.5 for row in rows)
    assert all(row.error is None or row.error < 1e-2 for row in rows)
