"""StepTimer: recorded intervals and their sums."""

from __future__ import annotations

import time

import pytest
import torch

from ragkv.timing import StepTimer


def test_a_step_is_recorded_with_start_and_end_even_if_it_fails():
    before = time.perf_counter()
    timer = StepTimer()
    time.sleep(0.01)
    with timer.step("plan"):
        time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), timer.step("load"):
        raise ZeroDivisionError
    plan, load = timer.intervals
    assert (plan.name, load.name) == ("plan", "load")
    assert 10 <= plan.start <= plan.end - 20 <= load.start - 20
    assert before <= timer.started <= before + 1
    assert load.end <= timer.total()


def test_runs_of_a_step_add_up_and_a_missing_step_is_zero():
    timer = StepTimer()
    timer.record("load", 1.0, 2.5)
    timer.record("plan", 2.5, 4.0)
    timer.record("load", 4.0, 4.5)
    assert (timer.elapsed("load"), timer.elapsed("plan"), timer.elapsed("repair")) == (2.0, 1.5, 0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_step_lasts_as_long_as_its_work_without_waiting():
    timer = StepTimer("cuda")
    x = torch.randn(8192, 8192, device="cuda")
    started = time.perf_counter()
    with timer.step("prefill"):
        for _ in range(20):
            x @ x
    queued = 1000 * (time.perf_counter() - started)
    assert timer.elapsed("prefill") > 2 * queued
    assert timer.intervals[0].end <= timer.total()
