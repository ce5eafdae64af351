"""Parse untrusted files in a process of their own, which has limits and can be killed.

    service                                         child
    parse: python -m ragkv.ingest.formats FORMAT …,  →    confine: set limits on itself that cannot be raised again
           the file as its standard input           read the file, write a reply to standard output, end
    read the reply, up to a number of bytes
    kill the child and all that it started

The child gets no environment, so no secrets. Its memory and time are limited, and it can start no process and write no
file. However large a file becomes when it is unpacked, the service holds no more than the reply. A child whose parent
dies is ended by its own alarm. Root may start processes in spite of the limits, so run the service as an ordinary user.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import BinaryIO

from ragkv.config import IngestSettings
from ragkv.errors import InvalidDocument, MissingPackage, TooLarge
from ragkv.ingest.formats.base import Parsed

FORMATS = {
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".pdf": "pdf",
    ".docx": "docx",
    ".pptx": "pptx",
    ".xlsx": "xlsx",
    ".epub": "epub",
    ".eml": "eml",
    ".csv": "csv",
    ".tsv": "csv",
}
"""Suffix → module of ingest/formats."""
OCR_SECONDS = 12.0
"""What a PDF may take for each page that OCR may read: a full page takes ten seconds on a busy core."""
_PIECE = 65536
_OCR_PACKAGES = {"rapidocr": "rapidocr>=3.10,<3.11", "onnxruntime": "onnxruntime>=1.23,<1.29"}
"""Module → requirement, as in pyproject.toml."""
_OCR_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"}
"""A confined process can start no threads. Versions of onnxruntime after those of pyproject.toml can report home."""


@dataclass(frozen=True)
class Allowance:
    """What parsing one document may take.

    Attributes:
        seconds: Wall-clock time.
        memory: Bytes of address space.
        ocr_pages: Most pages of a PDF that are read by OCR; 0: no OCR.
        ocr_seconds: Wall-clock time of a PDF instead of `seconds`, with OCR.
    """

    seconds: float = 30.0
    memory: int = 2**30
    ocr_pages: int = 0
    ocr_seconds: float = 600.0


USUAL = Allowance()


def allowance_of(settings: IngestSettings) -> Allowance:
    """Return what the settings allow. Raises MissingPackage where they want OCR and its packages are not installed."""
    if not settings.ocr:
        return Allowance(settings.parse_seconds, settings.parse_bytes)
    missing = [name for name in _OCR_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        wanted = " ".join(f"'{requirement}'" for requirement in _OCR_PACKAGES.values())
        raise MissingPackage(
            f"RAGKV_OCR needs {' and '.join(missing)}, not installed here: pip install {wanted}, which are the extra "
            "ragkv[ocr], or leave it unset"
        )
    return Allowance(settings.parse_seconds, settings.parse_bytes, settings.ocr_pages, OCR_SECONDS * settings.ocr_pages)


def parse(file: BinaryIO, suffix: str, limit: int, allowed: Allowance = USUAL) -> Parsed:
    """Parse a file in a child process.

    Args:
        file: The file, at its beginning, on disk or in memory.
        suffix: One of FORMATS.
        limit: Most bytes of the file, and of its text.
        allowed: What the child may take.

    Raises:
        InvalidDocument: The file cannot be parsed. The message does not name the file.
        TooLarge: The file or its text is too long. The message does not name the file.
        OSError: No process can be started.
    """
    ocr = allowed.ocr_pages if FORMATS[suffix] == "pdf" else 0
    seconds, setting = (allowed.ocr_seconds, "ocr_pages") if ocr else (allowed.seconds, "parse_seconds")
    arguments = [FORMATS[suffix], str(limit), repr(seconds), str(allowed.memory), str(ocr)]
    most = 2 * limit + 65536  # in JSON a line end, a quote or a backslash has two bytes
    return decode_reply(
        run("ragkv.ingest.formats", arguments, file, most, seconds, setting, _OCR_ENVIRONMENT if ocr else {})
    )


def decode_reply(reply: bytes) -> Parsed:
    """Decode the reply of the child. It is not trusted, for a file may have taken the child over. Raises as `parse`."""
    try:
        content = json.loads(reply)
        kind = content["kind"]
        if kind == "parsed":
            text = _text(content["text"])
            return Parsed(_text(content["title"]), text, dict(content["metadata"]), _pages(content["pages"], text))
        fault = {"invalid": InvalidDocument, "large": TooLarge}[kind]
        message = _text(content["words"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InvalidDocument("its parser crashed in the middle of its reply; the file is damaged") from None
    raise fault(message)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _pages(value: object, text: str) -> tuple[tuple[int, int], ...]:
    """Check that the pages begin inside the text, in order. Raises TypeError and ValueError."""
    pages: list[tuple[int, int]] = []
    if not isinstance(value, list):
        raise TypeError("no pages")
    for offset, number in value:
        low, least = pages[-1] if pages else (-1, 0)
        if type(offset) is not int or type(number) is not int or not (low < offset < len(text) and least < number):
            raise ValueError("no pages")
        pages.append((offset, number))
    return tuple(pages)


def run(
    module: str,
    arguments: Sequence[str],
    file: BinaryIO,
    most: int,
    seconds: float,
    setting: str = "parse_seconds",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Run `python -m module arguments…` with `file` as its standard input and return what it writes.

    Nothing that it started outlives this call.

    Args:
        module: The module to run.
        arguments: Its arguments.
        file: Its standard input.
        most: Most bytes of its output.
        seconds: Most wall-clock time.
        setting: Name of the setting that says so.
        environment: All of its environment but where Python finds modules.

    Raises:
        InvalidDocument: The child took too long, or died.
        TooLarge: The child wrote more than `most` bytes.
        OSError: No process can be started.
    """
    command = [sys.executable, "-P", "-s", "-m", module, *arguments]
    # The child finds the libraries that this process finds, and learns nothing else of it.
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    with _on_disk(file) as stdin:
        deadline = time.monotonic() + seconds
        process = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/",
            env={**environment, "PYTHONPATH": paths}, start_new_session=True, bufsize=0,
        )  # fmt: skip
    try:
        assert process.stdout is not None  # stdout=PIPE
        reply = _read(process.stdout.fileno(), most, deadline)
    finally:
        _end(process)
    if reply is None:
        raise InvalidDocument(f"reading it took longer than {seconds:g} s ({setting})")
    if len(reply) > most:
        raise TooLarge(f"what was read of it has over {most} bytes")
    if process.returncode == -signal.SIGABRT:  # how PDFium ends where an allocation fails
        raise InvalidDocument("its parser gave up, most likely for want of memory (parse_bytes)")
    if not reply:
        raise InvalidDocument(f"its parser crashed ({_ending(process.returncode)}); the file is damaged")
    return reply


def _read(pipe: int, most: int, deadline: float) -> bytes | None:
    """Read up to most + 1 bytes until the pipe ends; returns None if it has not ended at the deadline."""
    reply = bytearray()
    ready = select.poll()  # select.select cannot wait for file numbers over 1023
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
    """Kill the child and all that it started. Its id cannot be reused before the child is waited for."""
    if process.stdout:
        process.stdout.close()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(code: int) -> str:
    return signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"code {code}"


@contextmanager
def _on_disk(file: BinaryIO) -> Iterator[BinaryIO]:
    """Yield a file that a process can be given. A file in memory is copied into an unnamed temporary one."""
    if not isinstance(file, io.BytesIO):
        yield file
        return
    with tempfile.TemporaryFile() as copy:
        copy.write(file.getbuffer())
        copy.seek(0)
        yield copy
