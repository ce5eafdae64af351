"""The Redis protocol over real sockets, with any split of the bytes, invalid bytes and delays."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.store.redis_wire import Reply, RespConnection, ServerRefusal, pack_commands

WORDS = st.one_of(st.text(max_size=20), st.integers(), st.binary(max_size=200))
COMMANDS = st.lists(st.lists(WORDS, min_size=1, max_size=5).map(tuple), max_size=20)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def answered(*parts: bytes, pause: float = 0.0, close: bool = False) -> Iterator[RespConnection]:
    """Yield a connection whose other end sends these parts, one after another."""
    here, there = socket.socketpair()

    def send() -> None:
        try:
            for part in parts:
                there.sendall(part)
                time.sleep(pause)
            if close:
                there.close()
        except OSError:
            pass  # the test has closed the connection

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield RespConnection(here, 1.0)
    finally:
        here.close()
        thread.join()
        there.close()


def on_the_wire(command: Sequence[str | int | bytes]) -> bytes:
    words = [word if isinstance(word, bytes) else str(word).encode() for word in command]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


@given(COMMANDS)
def test_commands_are_encoded_as_redis_expects_them(commands: list[tuple[str | int | bytes, ...]]) -> None:
    assert b"".join(bytes(piece) for piece in pack_commands(commands)) == b"".join(map(on_the_wire, commands))


def test_a_large_value_is_sent_without_a_copy_and_small_ones_are_one_packet() -> None:
    large = bytearray(3 * 2**20)
    pieces = list(pack_commands([("SET", "a", b"small"), ("SET", "b", memoryview(large)), ("SET", "c", b"small")]))
    assert [len(piece) for piece in pieces if isinstance(piece, memoryview)] == [len(large)]
    assert [piece.obj is large for piece in pieces if isinstance(piece, memoryview)] == [True]
    assert len(pieces) == 3


@pytest.mark.parametrize(
    ("sent", "reply"),
    [
        (b"+OK\r\n", b"OK"),
        (b"+\r\n", b""),
        (b":-12\r\n", -12),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"$4\r\n\r\n$1\r\n", b"\r\n$1"),
        (b"*0\r\n", []),
        (b"*3\r\n$1\r\na\r\n*2\r\n:1\r\n$-1\r\n-ERR no\r\n", [b"a", [1, None], ServerRefusal("ERR no")]),
        (b"-WRONGTYPE Operation against\r\n", ServerRefusal("WRONGTYPE Operation against")),
    ],
)
def test_every_type_of_reply_is_read_completely(sent: bytes, reply: Reply) -> None:
    for parts in ([sent], [sent[at : at + 1] for at in range(len(sent))]):
        with answered(*parts, b":7\r\n") as wire:
            assert wire.reply(soon()) == reply
            assert wire.reply(soon()) == 7
            assert wire.is_idle()


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=4), st.lists(st.integers(1, 150_000), max_size=6))
def test_values_arrive_in_the_buffer_however_they_are_split(sizes: list[int], cuts: list[int]) -> None:
    values = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    sent = b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values)
    parts = []
    for cut in cuts:
        parts.append(sent[:cut])
        sent = sent[cut:]
    out = memoryview(bytearray(sum(sizes)))
    with answered(*parts, sent) as wire:
        start = 0
        for size in sizes:
            assert wire.fill(out[start : start + size], soon()) == size
            start += size
        assert wire.is_idle()
    assert out == b"".join(values)


@pytest.mark.parametrize(("sent", "size"), [(b"$3\r\n", 3), (b"$-1\r\n", -1), (b"$5\r\n", 5)])
def test_a_value_of_another_size_is_not_read_and_its_size_is_returned(sent: bytes, size: int) -> None:
    out = bytearray(b"1234")
    with answered(sent + b"abcde\r\n") as wire:
        assert wire.fill(memoryview(out), soon()) == size
    assert out == b"1234"


NOISE = [
    b"HTTP/1.1 400 Bad Request\r\n",
    b"$x\r\n",
    b":1.5\r\n",
    b"$-2\r\n",
    b"*-7\r\n",
    b"$99999999999\r\n",
    b"\r\n",
    b"+" + b"o" * 100_000 + b"\r\n",
    b"$2\r\nabcd\r\n",
    b"*1\r\n" * 5000 + b":1\r\n",
]


@pytest.mark.parametrize("noise", NOISE)
def test_invalid_bytes_are_a_connection_error(noise: bytes) -> None:
    with answered(noise) as wire, pytest.raises(ConnectionError):
        wire.reply(soon())


@pytest.mark.parametrize("noise", [b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n", b":2\r\n", b"*2\r\n", b"$2\r\nabcd\r\n"])
def test_invalid_bytes_instead_of_a_value_are_a_connection_error(noise: bytes) -> None:
    with answered(noise) as wire, pytest.raises(ConnectionError):
        wire.fill(memoryview(bytearray(2)), soon())


@pytest.mark.parametrize("sent", [b"", b"$10", b"$10\r\nabc", b"$3\r\nabc", b"*2\r\n:1\r\n"])
def test_an_early_end_is_a_connection_error(sent: bytes) -> None:
    with answered(sent, close=True) as wire, pytest.raises(ConnectionError):
        wire.reply(soon())
    size = 10 if b"10" in sent else 3
    with answered(sent, close=True) as wire, pytest.raises(ConnectionError):
        wire.fill(memoryview(bytearray(size)), soon())


@pytest.mark.parametrize("sent", [b"$200\r\n" + b"x" * 200 + b"\r\n", b"+" + b"x" * 200, b"*90\r\n" + b":1\r\n" * 90])
def test_a_slow_reply_ends_at_the_deadline(sent: bytes) -> None:
    with answered(*(sent[at : at + 1] for at in range(100)), pause=0.05) as wire:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            wire.reply(soon(0.2))
        assert 0.2 <= time.monotonic() - began < 3, "everything comes within five seconds"


def test_a_slow_value_ends_at_the_deadline() -> None:
    with answered(b"$100000\r\n", *[b"x" * 700] * 100, pause=0.05) as wire:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            wire.fill(memoryview(bytearray(100_000)), soon(0.2))
        assert 0.2 <= time.monotonic() - began < 3, "everything comes within five seconds"


def test_an_unexpected_reply_is_noticed() -> None:
    with answered(b":1\r\n:2\r\n") as wire:
        assert wire.reply(soon()) == 1
        assert not wire.is_idle()


def test_a_listener_that_reads_nothing_ends_the_send_at_the_deadline() -> None:
    with answered() as wire:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            wire.send([("SET", "a", bytes(64 * 2**20))], soon(0.2))
        assert time.monotonic() - began < 0.9, "one write may take a second"
