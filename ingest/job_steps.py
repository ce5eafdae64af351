"""The steps of a document in a job, with a checkpoint after each that stops the work or records its progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator

from ragkv.catalog import Catalog
from ragkv.ingest import job_table
from ragkv.ingest.engine_contract import IngestEngine
from ragkv.ingest.leases import JobPlace
from ragkv.ingest.outcomes import IngestOutcome
from ragkv.ingest.pipeline import ingest_steps
from ragkv.ingest.progress import IngestStep, Paused
from ragkv.types import Document

REPORT_SECONDS = 0.25
"""Least time between two writes of a job's progress."""


class CancelledDocument(Exception):
    """The running document is no longer wanted."""


class Checkpoint:
    """Called between two steps of a document: stops the work where it must stop, and records the progress.

    Attributes:
        started: When the document was started, on the monotonic clock.
    """

    def __init__(self, catalog: Catalog, held: tuple[JobPlace, str], pausing: threading.Event):
        """Take the catalogue, the document and who holds its lease, and what is set when the work is to stop."""
        self._catalog, self._pausing = catalog, pausing
        self._place, self._worker = held
        self._stage = ""
        self.started = self._stage_started = self._written = time.monotonic()

    def check_wanted(self) -> None:
        """Raise CancelledDocument when the document is no longer wanted, Paused when another process has it."""
        with self._catalog.read() as transaction:
            found = job_table.is_wanted(transaction, self._place, self._worker)
        if found == "taken":
            raise Paused
        if found == "cancelled":
            raise CancelledDocument

    def __call__(self, step: IngestStep) -> None:
        """Raise CancelledDocument or Paused, else record the step."""
        self.check_wanted()
        if self._pausing.is_set():
            raise Paused
        now = time.monotonic()
        entered = step.stage != self._stage
        if entered:
            self._stage, self._stage_started = step.stage, now
        # Each write waits for the disk. A small document is encoded before anybody could see its other stages.
        if (entered and step.stage == "encode") or now - self._written >= REPORT_SECONDS:
            self._written = now
            with self._catalog.write(alone=False, durable=False) as transaction:
                job_table.record_progress(transaction, self._place, step, self._seconds_left(step))

    def _seconds_left(self, step: IngestStep) -> float | None:
        """Estimate the rest of the document, nearly all of which is encoding; None before any chunk is encoded."""
        if step.stage != "encode" or not step.done:
            return None
        return (step.total - step.done) * (time.monotonic() - self._stage_started) / step.done


def checked_steps(
    engine: IngestEngine, document: Document, checkpoint: Checkpoint
) -> Generator[IngestStep, None, IngestOutcome]:
    """Yield the steps of an ingest up to the commit, with a checkpoint after each.

    What stops the work here is thrown into the ingest, which decides whether its KV is kept.
    """
    steps = ingest_steps(engine, document, checkpoint.check_wanted)
    try:
        step = next(steps)
        while True:
            try:
                if step.stage != "index":  # at `index` the document is committed, and it is too late to stop
                    yield step
                    checkpoint(step)
            except BaseException as stop:
                step = steps.throw(stop)
            else:
                step = next(steps)
    except StopIteration as end:
        outcome: IngestOutcome = end.value
        return outcome
