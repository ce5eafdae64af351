"""The program as a user runs it: `ragkv` in a process of its own, and its service."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ragkv.cli.samples import samples_folder
from tests.forked import forked, run_forked
from tests.start_records import with_records

ROOT = str(Path(__file__).resolve().parent.parent)
SERVE = ("serve", "--port", "0")
LIGHT = [path for path in sorted(samples_folder().glob("*.md")) if path.name[:2] in ("01", "02")]


def ragkv(
    *arguments: object, cwd: Path, new_interpreter: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, in a fork (tests/forked.py) or in an interpreter that is started for it."""
    words, given = [*map(str, arguments)], {**os.environ, "PYTHONPATH": ROOT, **environment}
    if words[0] == "ingest":
        with_records(Path(given.get("RAGKV_DATA", cwd / "data")))
    if not new_interpreter:
        return run_forked(words, cwd, given, timeout=110)
    command = [sys.executable, "-m", "ragkv.cli", *words]
    return subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, timeout=110, check=False)


@contextmanager
def served(
    cwd: Path, program: Sequence[str] = SERVE, new_interpreter: bool = False, **environment: str
) -> Iterator[tuple[Any, httpx.Client]]:
    """Run `ragkv serve` on a free port; yields the process and a client. It is killed with SIGKILL at the end.

    Standard output, the log, is appended to the file `log`. The service has one thread: two that share a busy core wait
    for each other far longer than they work.

    Args:
        program: arguments of `ragkv`; or those of an interpreter, from "-c" or "-m" on.
        new_interpreter: start an interpreter, which imports everything itself, instead of a fork (tests/forked.py).
    """
    given = {**os.environ, "PYTHONPATH": ROOT, "RAGKV_THREADS": "1", **environment}
    with_records(Path(given.get("RAGKV_DATA", cwd / "data")))
    start: Any = _started if new_interpreter else forked
    with start(program, cwd, given, cwd / "log") as process:
        while "serving at" not in (line := process.stderr.readline()):
            assert line, "the service ended before it served"
        with httpx.Client(base_url=line.split()[-1], timeout=100) as client:
            yield process, client


@contextmanager
def _started(
    program: Sequence[str], cwd: Path, environment: dict[str, str], out: Path
) -> Iterator[subprocess.Popen[str]]:
    interpreter = [sys.executable] if program[0] in ("-c", "-m") else [sys.executable, "-m", "ragkv.cli"]
    command = [*interpreter, *program]
    with (
        out.open("a") as log,
        subprocess.Popen(command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def told_in_words(done: subprocess.CompletedProcess[str]) -> bool:
    """Every fault is a line of its own, and none is a traceback."""
    return "Traceback" not in done.stderr and "ragkv: " in done.stderr
