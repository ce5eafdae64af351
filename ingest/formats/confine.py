"""What the process that reads a document takes from itself before it looks at it."""

from __future__ import annotations

import math
import resource
import signal

OPEN_FILES = 32
"""Files that it may hold open."""


def confine(seconds: float, memory: int) -> None:
    """Limit this process, for good. memory: bytes of address space.

    It can write no file and start no process, and it ends a second after `seconds`, whether its parent lives or not.
    What it needs it has to have imported.
    """
    seconds = math.ceil(seconds) + 1
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: seconds,  # who takes over a parser can turn off an alarm, but not this
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
