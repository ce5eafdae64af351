"""A trap: a server that nobody has a reason to call."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


class Trap:
    """See the module. url: of something on it."""

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/trap"

    def called(self) -> bool:
        """Whether somebody connected since the last look; the connection waits to be accepted meanwhile."""
        try:
            self._listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@contextmanager
def set_trap() -> Iterator[Trap]:
    """One on a free port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield Trap(listener)
