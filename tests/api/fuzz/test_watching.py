"""What watches the service notices what it is there for, and nothing else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.api.fuzz.fuzzed import LONGEST, Watcher
from tests.api.fuzz.wire import Request, send

WELL = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
ASKS = Request("question", b"GET / HTTP/1.1\r\n\r\n")


@contextmanager
def answering(*answers: bytes, delay: float = 0.0) -> Iterator[int]:
    """A server that gives these answers, the last one again and again, on connections that it closes after an empty
    one; delay: seconds before the second answer. Yields its port."""

    def serve() -> None:
        at = 0
        while True:
            try:
                connection, _ = listener.accept()
                while connection.recv(65536):
                    time.sleep(delay if at == 1 else 0)
                    answer = answers[min(at, len(answers) - 1)]
                    connection.sendall(answer)
                    at += 1
                    if answer != WELL:
                        break
                connection.close()
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("sent", "status", "fault"),
    [
        (WELL, 200, ""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + WELL, 200, ""),
        (b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n", 500, ""),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 200, ""),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, ""),
        (b"", 0, "the connection ended without an answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-le", 200, "the answer broke off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", 200, "the answer broke off"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n", 200, "the answer broke off"),
    ],
)
def test_an_answer_that_is_missing_or_broken_off_is_told(sent: bytes, status: int, fault: str) -> None:
    with answering(sent) as port:
        answer = send(port, ASKS)
    assert (answer.status, answer.fault) == (status, fault)


def test_no_answer_is_owed_to_a_request_that_is_cut() -> None:
    with answering(b"") as port:
        assert send(port, Request("cut", b"GET / HTTP/1.1\r\n", cut=True)).fault == ""


def test_a_wait_for_health_is_measured_while_it_lasts() -> None:
    with answering(WELL, delay=0.6) as port:
        watcher = Watcher(port)
        time.sleep(0.3)
        assert watcher.longest() > LONGEST
        watcher.reset()
        watcher.longest()
        assert watcher.status == b"200"
        watcher.close()
