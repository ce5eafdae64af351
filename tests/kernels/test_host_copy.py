"""Copies to the host hold what the device had when they began."""

from __future__ import annotations

import pytest
import torch

from ragkv.kernels.host_copy import begin_host_copies


def test_tensors_on_the_cpu_are_made_contiguous_at_once() -> None:
    x, y = torch.arange(6).view(2, 3), torch.arange(6).view(2, 3).T
    (first, second), wait = begin_host_copies([x, y])
    wait()
    assert first.data_ptr() == x.data_ptr()
    assert second.is_contiguous()
    assert torch.equal(second, y)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_are_copied_while_the_others_stay() -> None:
    here, there = torch.arange(4), torch.arange(2**20, device="cuda").view(1024, 1024).T
    before = there.cpu()
    (first, second), wait = begin_host_copies([here, there])
    del there
    torch.zeros(2**20, dtype=torch.int64, device="cuda")
    wait()
    assert first.data_ptr() == here.data_ptr()
    assert second.is_pinned()
    assert torch.equal(second, before)
