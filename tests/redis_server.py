"""A real redis-server for tests: its own port, its own folder, stopped by its process."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 10.0


@dataclass(frozen=True)
class RedisServer:
    """url: redis://127.0.0.1:port · process: to be frozen or killed with signals · folder: its working folder."""

    url: str
    port: int
    process: subprocess.Popen[bytes]
    folder: Path


@contextmanager
def redis_server(*arguments: str, port: int | None = None, config: Path | None = None) -> Iterator[RedisServer]:
    """Start redis-server without persistence, wait until it answers, kill it at the end, whatever state it is in.

    `arguments` go to its command line; `port` takes up the place of a server that went away; `config` is a
    file of settings.
    """
    binary = shutil.which("redis-server")
    if binary is None:
        raise RuntimeError("these tests need redis-server: install it (Debian: apt-get install redis-server)")
    with tempfile.TemporaryDirectory(prefix="ragkv-redis-") as folder:
        process, taken = _start([binary, *([str(config)] if config else [])], arguments, port, Path(folder))
        try:
            yield RedisServer(f"redis://127.0.0.1:{taken}", taken, process, Path(folder))
        finally:
            process.kill()
            process.wait()


def _start(
    program: list[str], arguments: tuple[str, ...], port: int | None, folder: Path
) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(5):  # Another program may take a port between finding it free and using it.
        chosen = port or free_port()
        command = [*program, "--port", str(chosen), "--bind", "127.0.0.1", "--dir", str(folder)]
        command += ["--save", "", "--appendonly", "no", "--logfile", str(folder / "log"), *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if _answers(chosen) and process.poll() is None:
                return process, chosen
            time.sleep(0.01)
        process.kill()
        process.wait()
    raise RuntimeError(f"redis-server does not start: {(folder / 'log').read_text()[-2000:]}")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    """Whether something that speaks Redis listens: PONG, or that a password is wanted."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as line:
            line.sendall(b"PING\r\n")
            return line.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False
