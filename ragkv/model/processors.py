"""The processors that this process may use, which may be fewer than the machine has.

Three things limit them: the affinity of the process, a quota of its control group (a container with `cpus: 1.5`), and
what other processes take. More threads than processors wait for each other: each layer of the model ends when its last
thread does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

CGROUPS = Path("/sys/fs/cgroup")


def usable_processors(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many processors the process may keep busy, at least 1."""
    # macOS has no affinity.
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(cgroups, membership)
    return max(1, affinity if quota is None else min(affinity, int(quota)))


def cpu_quota(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the quota of the process's control group in processors, or None if it has none.

    A group has the tightest quota of its own and of those above it. Version 2 writes `cpu.max`, version 1
    `cpu.cfs_quota_us` and `cpu.cfs_period_us`.

    Args:
        cgroups: Where the control groups are mounted.
        membership: The groups of the process: lines `number:controllers:/path`.
    """
    quotas = [quota for folder in _folders(cgroups, membership) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def set_threads(threads: int) -> None:
    """Set the threads of torch: the number given, or for 0 torch's own, but no more than `usable_processors`."""
    torch.set_num_threads(threads or min(torch.get_num_threads(), usable_processors()))


def _folders(cgroups: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of the process's group and those above it.

    Inside a container the path of the group may be that of the host, where its folders do not exist; the mounted root
    is then the group itself.
    """
    lines = []
    with suppress(OSError):
        lines = membership.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root in (cgroups, cgroups / "cpu", cgroups / "cpu,cpuacct", cgroups / "unified"):
            folder = root / path.strip("/")
            yield from (folder, *(above for above in folder.parents if above.is_relative_to(root)))


def _quota(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    return None
