"""The limits that a parser process sets on itself before it looks at a file."""

from __future__ import annotations

import math
import resource
import signal

OPEN_FILES = 32
"""Most open files."""


def confine(seconds: float, memory: int) -> None:
    """Limit this process for good.

    It can then write no file and start no process. It ends about a second after `seconds`, whether its parent lives or
    not. All modules that it needs must be imported before.

    Args:
        seconds: Wall-clock time and CPU time.
        memory: Bytes of address space.
    """
    seconds = math.ceil(seconds) + 1
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: seconds,  # code that took over a parser can turn off the alarm, but not this
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for what, most in limits.items():
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    signal.alarm(seconds)
