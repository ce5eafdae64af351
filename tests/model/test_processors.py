"""The model takes the processors that its process may use, and threads that wait do not spin."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ragkv.model.processors import cpu_quota, set_threads, usable_processors

ROOT = str(Path(__file__).resolve().parents[2])
FEW = {"OMP_NUM_THREADS": "2", "PYTHONPATH": ROOT}


@pytest.fixture
def threads() -> Iterator[None]:
    """Put back the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def group(tmp_path: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, content in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(content)
    (tmp_path / "self").write_text(membership)
    return tmp_path / "cgroup", tmp_path / "self"


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/docker/of/the/host\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("4:cpu,cpuacct:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "50000"}, 0.5),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/\n", {"cpu.max": "100000 100000\n"}, None),
        ("", {}, None),
        ("0::/\n", {"cpu.max": "nonsense\n"}, None),
    ],
)
def test_the_tightest_quota_of_a_control_group_counts(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float | None
) -> None:
    assert cpu_quota(*group(tmp_path, membership, files)) == quota


def test_processors_are_bounded_by_affinity_and_quota(tmp_path: Path) -> None:
    there = len(os.sched_getaffinity(0))
    assert usable_processors(*group(tmp_path, "0::/\n", {"cpu.max": "max 100000"})) == there
    assert usable_processors(*group(tmp_path, "0::/\n", {"cpu.max": "10000 100000"})) == 1
    assert usable_processors(*group(tmp_path, "0::/\n", {"cpu.max": f"{there + 3}00000 100000"})) == there


def test_threads_are_those_of_the_setting_or_no_more_than_may_run(threads: None) -> None:
    set_threads(3)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(usable_processors() + 5)
    set_threads(0)
    assert torch.get_num_threads() == usable_processors()


WAITING = r"""
import subprocess, sys, time, torch
torch.set_num_threads(2)
x = torch.ones(400, 400)
spin = "import time; end = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
busy = subprocess.Popen([sys.executable, "-c", spin])
x * x
start = time.process_time()
for _ in range(100):
    x * x
    time.sleep(0.004)
print(time.process_time() - start)
busy.kill()
busy.wait()
"""
"""Prints the CPU time of threads that wait for work most of the time, beside a busy process."""


def run(code: str, **given: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**environment, **FEW, **given}, capture_output=True, text=True, check=True, timeout=100
    )


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="OpenMP spins on several processors only")
def test_beside_a_busy_process_threads_that_wait_leave_the_processors_to_it() -> None:
    sleeping, spinning = (float(run(start + WAITING).stdout) for start in ("import ragkv", ""))
    assert sleeping < spinning / 4


@pytest.mark.parametrize("package", ["ragkv", "api", "ingest"])
def test_every_package_tells_openmp_to_sleep_before_anything_imports_torch(package: str) -> None:
    code = f"import sys, os, {package}; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    assert run(code).stdout.split() == ["passive", "False"]


def test_a_policy_of_the_user_is_kept() -> None:
    code = "import os, ragkv; print(os.environ['OMP_WAIT_POLICY'])"
    assert run(code, OMP_WAIT_POLICY="active").stdout.strip() == "active"
