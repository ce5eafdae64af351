"""What `ragkv bench store` compares with: a redis-server of its own, and simple readers of single values.

None of these readers verifies anything.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis

from ragkv.errors import ConfigError

START_SECONDS = 10.0

Load = Callable[[], object]
"""Reads everything once; may return the values."""


@contextmanager
def own_server(folder: Path) -> Iterator[str | None]:
    """Start a redis-server without persistence on a free loopback port, and stop it at the end.

    Yields its URL, or None if redis-server is not installed. Raises ConfigError if it does not start.
    """
    binary = shutil.which("redis-server")
    if binary is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([binary, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        _wait(process, port)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def each(client: redis.Redis, names: Sequence[str]) -> Load:
    """Read with one GET per value."""
    return lambda: [client.get(name) for name in names]


def at_once(client: redis.Redis, names: Sequence[str]) -> Load:
    """Read with one MGET."""
    return lambda: client.mget(names)


def by_sockets(sockets: Sequence[socket.socket], names: Sequence[str], size: int, out: memoryview) -> Load:
    """GET values of `size` bytes into `out`; each socket has a thread, which takes the next name."""
    commands = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name.encode()) for name in names]

    def load() -> None:
        numbers = iter(range(len(names)))
        lock = threading.Lock()

        def work(line: socket.socket) -> None:
            header = memoryview(bytearray(len(b"$%d\r\n" % size)))
            end = memoryview(bytearray(2))
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                line.sendall(commands[number])
                for part in (header, out[number * size : (number + 1) * size], end):
                    _fill(line, part)

        others = [threading.Thread(target=work, args=(line,)) for line in sockets[1:]]
        for other in others:
            other.start()
        work(sockets[0])
        for other in others:
            other.join()

    return load


def _fill(line: socket.socket, out: memoryview) -> None:
    while out:
        count = line.recv_into(out)
        if count == 0:
            raise ConnectionError("the server closed the connection")
        out = out[count:]


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            with redis.Redis(port=port, socket_timeout=1) as client:
                client.ping()
                return
        except redis.ConnectionError:
            time.sleep(0.01)
    raise ConfigError("the redis-server for the benchmark does not start; start one and name it with --store redis://…")
