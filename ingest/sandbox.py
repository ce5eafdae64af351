"""Parsers read what strangers wrote, so they run in a process of their own: it can be killed, and takes only so much.

    service                                         child
    parse: python -m ingest.formats FORMAT …,  →    confine: limits on itself, never to be raised
           the file as its standard input           read the file, write a reply to standard output, end
    read the reply, so many bytes at most
    kill the child and all that it started

The child gets no environment, so no secrets; it may take so much memory and time, start no process and write no file.
Whatever a file grows to when it is unpacked, the service holds the reply and no more. A child whose parent dies ends
by its own alarm. Root may start processes all the same: run the service as an ordinary user.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from ingest.formats.base import Parsed
from ragkv.errors import InvalidDocument, TooLarge

FORMATS = {".html": "html", ".htm": "html", ".pdf": "pdf", ".docx": "docx", ".csv": "csv", ".tsv": "csv"}
"""Suffix → module of ingest/formats."""
_PIECE = 65536


@dataclass(frozen=True)
class Allowance:
    """What reading one document may take. seconds: of the clock · memory: bytes of address space."""

    seconds: float = 30.0
    memory: int = 2**30


USUAL = Allowance()


def parse(file: BinaryIO, suffix: str, limit: int, allowed: Allowance = USUAL) -> Parsed:
    """Title and text of a file at its beginning, on disk or in memory. suffix: one of FORMATS.

    limit: bytes of the file, and of its text. Raises InvalidDocument and TooLarge without the file's name, OSError
    where no process can be started.
    """
    arguments = [FORMATS[suffix], str(limit), repr(allowed.seconds), str(allowed.memory)]
    most = 2 * limit + 65536  # in JSON a line end, a quote or a backslash has two bytes
    return understood(run("ingest.formats", arguments, file, most, allowed.seconds))


def understood(reply: bytes) -> Parsed:
    """What the process has to say. Nothing of it is believed: a file may have taken it over. Raises as `parse` does."""
    try:
        told = json.loads(reply)
        kind = told["kind"]
        if kind == "parsed":
            return Parsed(_text(told["title"]), _text(told["text"]), dict(told["metadata"]))
        fault = {"invalid": InvalidDocument, "large": TooLarge}[kind]
        words = _text(told["words"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InvalidDocument("its parser crashed in the middle of its reply; the file is damaged") from None
    raise fault(words)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def run(module: str, arguments: Sequence[str], file: BinaryIO, most: int, seconds: float) -> bytes:
    """What `python -m module arguments…` writes when it reads `file` as its standard input; nothing of it lives on.

    Raises InvalidDocument for a child that takes longer or dies, TooLarge for one that writes more than `most` bytes,
    OSError where none can be started.
    """
    command = [sys.executable, "-P", "-s", "-m", module, *arguments]
    # The child finds the libraries that this process has found, and knows nothing else of it.
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    with _on_disk(file) as stdin:
        deadline = time.monotonic() + seconds
        process = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/",
            env={"PYTHONPATH": paths}, start_new_session=True, bufsize=0,
        )  # fmt: skip
    try:
        assert process.stdout is not None  # stdout=PIPE
        reply = _read(process.stdout.fileno(), most, deadline)
    finally:
        _end(process)
    if reply is None:
        raise InvalidDocument(f"reading it took longer than {seconds:g} s (parse_seconds)")
    if len(reply) > most:
        raise TooLarge(f"what was read of it has over {most} bytes")
    if not reply:
        raise InvalidDocument(f"its parser crashed ({_ending(process.returncode)}); the file is damaged")
    return reply


def _read(pipe: int, most: int, deadline: float) -> bytes | None:
    """All that comes, but for what is over most + 1 bytes; None when the end has not come in time."""
    reply = bytearray()
    ready = select.poll()  # select.select knows no file numbers over 1023
    ready.register(pipe, select.POLLIN)
    while len(reply) <= most:
        left = deadline - time.monotonic()
        if left <= 0 or not ready.poll(1000 * left):
            return None
        piece = os.read(pipe, min(_PIECE, most + 1 - len(reply)))
        if not piece:
            break
        reply += piece
    return bytes(reply)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and all that it started. It is not waited for before: until then its number is nobody else's."""
    if process.stdout:
        process.stdout.close()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(code: int) -> str:
    return signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"code {code}"


@contextmanager
def _on_disk(file: BinaryIO) -> Iterator[BinaryIO]:
    """The file as one that a process can be given: what is in memory goes into a temporary one without a name."""
    if not isinstance(file, io.BytesIO):
        yield file
        return
    with tempfile.TemporaryFile() as copy:
        copy.write(file.getbuffer())
        copy.seek(0)
        yield copy
