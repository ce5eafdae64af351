"""What splitting one document may take. What parsing its file may take is kept by its process (sandbox.py)."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from typing import TypeVar

from ragkv.errors import TooLarge
from ragkv.ingest.progress import IngestStep
from ragkv.types import Document

T = TypeVar("T")

_SHARE = 2**20


def split_seconds(document: Document, seconds: float) -> float:
    """Return the processor time for the text of a document. seconds: for each MiB of it, rounded up."""
    return seconds * max(1, math.ceil(len(document.text.encode()) / _SHARE))


def within(steps: Generator[IngestStep, None, T], document: Document, seconds: float) -> Generator[IngestStep, None, T]:
    """Drive the steps that split a document as long as its budget lasts.

    Only time of the processor counts, and only that of the steps: other work between them costs a document nothing.

    Args:
        steps: The steps. Each does a bounded piece of the work.
        document: The document.
        seconds: For each MiB of its text, rounded up.

    Raises:
        TooLarge: The steps took longer.
    """
    most, spent = split_seconds(document, seconds), 0.0
    while True:
        started = time.thread_time()
        try:
            step = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        spent += time.thread_time() - started
        if spent > most:
            steps.close()
            raise TooLarge(
                f"document {document.id!r}: splitting its text took longer than {most:g} s of processor time "
                f"({seconds:g} s for each MiB, parse_seconds)"
            )
        yield step
