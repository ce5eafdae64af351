"""The program as a user runs it: `ragkv` in a process of its own, and its service."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from ragkv.cli.samples import samples_folder

SERVE = ("-m", "ragkv.cli", "serve", "--port", "0")
LIGHT = [path for path in sorted(samples_folder().glob("*.md")) if path.name[:2] in ("01", "02")]


def ragkv(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    root = str(Path(__file__).resolve().parent.parent)
    return subprocess.run(
        [sys.executable, "-m", "ragkv.cli", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@contextmanager
def served(
    cwd: Path, program: Sequence[str] = SERVE, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """`ragkv serve` on a free port; killed with SIGKILL at the end. program: another one that does that. What it logs
    comes to the end of the file `log`.

    One thread: two that share a busy core wait for each other far longer than they work.
    """
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, *program]
    surroundings = {**os.environ, "PYTHONPATH": root, "RAGKV_THREADS": "1", **environment}
    with (
        (cwd / "log").open("a") as log,
        subprocess.Popen(command, cwd=cwd, env=surroundings, stdout=log, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            while "serving at" not in (line := process.stderr.readline()):
                assert line, "the service ended before it served"
            with httpx.Client(base_url=line.split()[-1], timeout=100) as client:
                yield process, client
        finally:
            process.kill()


def told_in_words(done: subprocess.CompletedProcess[str]) -> bool:
    """Every fault is a line of its own, and none is a traceback."""
    return "Traceback" not in done.stderr and "ragkv: " in done.stderr
