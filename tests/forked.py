"""Programs forked from a server that has imported the libraries already.

A start of `ragkv` spends about five seconds of CPU time on imports. The tests start it dozens of times. So one server
process per pytest worker (multiprocessing's forkserver) imports the libraries once, and every program is a fork of it:
a process of its own, with its own working directory, environment, output and exit code.

What a program reads from its environment while it imports, such as HF_HUB_OFFLINE, comes from the server: tests about
that start a real process.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preloaded"])


@dataclass(frozen=True)
class ProgramOptions:
    """One program.

    Attributes:
        arguments: of `ragkv`; or those of an interpreter, from "-c" or "-m" on.
        folder: its working directory.
        environment: all of it.
        out: file that standard output is appended to.
        err: likewise for standard error. May be a named pipe.
    """

    arguments: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    out: Path
    err: Path


class ForkedProgram:
    """A running program, with the part of Popen's interface that tests use."""

    def __init__(self, options: ProgramOptions):
        # Signals are at their defaults in the fork; the server ignores SIGINT.
        self._process = _context.Process(target=_main, args=(options,))
        self._process.start()
        self.stderr: TextIO | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the program runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the program has ended."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("ragkv", timeout or 0)
        return self.returncode

    def close(self) -> None:
        """Kill the program and free what belongs to it."""
        self.kill()
        self.wait()
        self._process.close()
        if self.stderr is not None:
            self.stderr.close()


def run_forked(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run one `ragkv` command to its end."""
    with tempfile.TemporaryDirectory(prefix="ragkv-forked-") as own:
        out, err = Path(own) / "out", Path(own) / "err"
        program = ForkedProgram(ProgramOptions(tuple(arguments), folder, dict(environment), out, err))
        try:
            code = program.wait(timeout)
        finally:
            program.close()
        return subprocess.CompletedProcess(list(arguments), code, out.read_text(), err.read_text())


@contextmanager
def forked(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], out: Path
) -> Iterator[ForkedProgram]:
    """Start a program whose `stderr` is read as it comes; killed at the end."""
    with tempfile.TemporaryDirectory(prefix="ragkv-forked-") as own:
        pipe = Path(own) / "err"
        os.mkfifo(pipe)
        program = ForkedProgram(ProgramOptions(tuple(arguments), folder, dict(environment), out, pipe))
        try:
            program.stderr = pipe.open()  # waits until the program has opened it, too
            yield program
        finally:
            program.close()


def _main(options: ProgramOptions) -> None:
    """Become the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that a shell started with & ignores it
    os.chdir(options.folder)
    os.environ.clear()
    os.environ.update(options.environment)
    for target, path in ((1, options.out), (2, options.err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, target)
        os.close(file)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # open as long as the program runs
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    if options.arguments[:1] == ("-c",):
        sys.argv = ["-c", *options.arguments[2:]]
        exec(compile(options.arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        return
    if options.arguments[:1] == ("-m",):
        sys.argv = list(options.arguments[1:])
        runpy.run_module(options.arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = ["ragkv", *options.arguments]
    from ragkv.cli import main

    main()
