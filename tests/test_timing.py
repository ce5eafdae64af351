"""The stopwatch: what it booked, when, and what that adds up to."""

from __future__ import annotations

import time

import pytest
import torch

from ragkv.timing import StepTimer


def test_a_step_is_booked_with_its_start_and_end_also_where_it_fails():
    before = time.perf_counter()
    watch = StepTimer()
    time.sleep(0.01)
    with watch.step("plan"):
        time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), watch.step("load"):
        raise ZeroDivisionError
    plan, load = watch.intervals
    assert (plan.name, load.name) == ("plan", "load")
    assert 10 <= plan.start <= plan.end - 20 <= load.start - 20
    assert before <= watch.started <= before + 1
    assert load.end <= watch.total()


def test_the_same_name_adds_up_and_one_that_never_ran_is_nothing():
    watch = StepTimer()
    watch.book("load", 1.0, 2.5)
    watch.book("plan", 2.5, 4.0)
    watch.book("load", 4.0, 4.5)
    assert (watch.elapsed("load"), watch.elapsed("plan"), watch.elapsed("repair")) == (2.0, 1.5, 0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_step_is_as_long_as_its_work_is_and_nobody_waits_for_it():
    watch = StepTimer("cuda")
    x = torch.randn(8192, 8192, device="cuda")
    begun = time.perf_counter()
    with watch.step("prefill"):
        for _ in range(20):
            x @ x
    queued = 1000 * (time.perf_counter() - begun)
    assert watch.elapsed("prefill") > 2 * queued
    assert watch.intervals[0].end <= watch.total()
