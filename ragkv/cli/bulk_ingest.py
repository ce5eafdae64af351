"""`ragkv ingest --ray`: many documents, by several workers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from typing import TYPE_CHECKING

from ragkv.cli.common import err, fail, progress, tell
from ragkv.cli.documents import allowance, document_ids
from ragkv.cli.ingest_output import IngestOutput

if TYPE_CHECKING:
    from ragkv.config import Settings
    from ragkv.engine.engine import Engine
    from ragkv.ingest.bulk.listing import SourceListing
    from ragkv.ingest.engine_contract import IngestEmbedder


def ingest_bulk(
    settings: Settings, locations: Sequence[str], collection: str, workers: int, output: IngestOutput
) -> int:
    """Ingest the documents of all locations with Ray. Returns the exit code."""
    from ragkv.ingest.bulk.cluster import check_settings
    from ragkv.ingest.bulk.journal import BulkOutcome
    from ragkv.ingest.bulk.listing import list_files
    from ragkv.ingest.bulk.run import BulkIngest, ingest_with_ray

    check_settings(settings)
    allowed = allowance(settings)
    totals = (0, 0)
    # Ray prints what it has to say about dead workers to standard output, which belongs to the outcomes.
    with ExitStack() as stack, redirect_stdout(sys.stderr), progress() as report:
        report("listing files", 0, 1)
        listing = list_files(locations, stack, stack.enter_context(document_ids(settings, collection)))
        if listing.empty:
            return fail(f"nothing to ingest in {', '.join(locations)}", 1)
        report("starting the workers", 0, 1)
        estimate = Estimate(listing)
        for outcome in ingest_with_ray(BulkIngest(settings, open_engine, listing, collection, allowed, workers, tell)):
            if not isinstance(outcome, BulkOutcome):
                totals = (outcome.workers, outcome.encoded)
            elif outcome.error:
                output.refuse(outcome.error, outcome.document_id)
            else:
                output.show(outcome.document_id, outcome.status, outcome.chunks, outcome.tokens)
            report(estimate.line(output.done), output.done, max(estimate.total, output.done))
    if totals[1]:
        err().print(f"{totals[0]} workers encoded {totals[1]} chunks", style="dim")
    return output.end(*totals)


class Estimate:
    """How long the rest of an ingest is likely to take."""

    def __init__(self, listing: SourceListing):
        """Take what is ingested."""
        self.total = listing.documents or 0
        self._about = "" if listing.exact else "about "
        self._first: tuple[float, int] | None = None

    def line(self, done: int) -> str:
        """Return how far it is. The speed is that since the first outcome, so that the start does not count."""
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done)
        seconds, more = now - self._first[0], done - self._first[1]
        of = f"{done} of {self._about}{max(self.total, done)} documents" if self.total else f"{done} documents"
        if seconds < 1 or not more:
            return of
        rate = more / seconds
        left = f", {_duration((self.total - done) / rate)} left" if self.total > done else ""
        return f"{of}, {rate:.1f}/s{left}"


def open_engine(settings: Settings, notify: Callable[[str], None]) -> WorkerEngine:
    """Open the engine of a worker."""
    from ragkv.engine.engine import Engine

    return WorkerEngine(Engine.open(settings, notify, asks=False))


class WorkerEngine:
    """An engine that answers no questions, so its index need not follow the catalogue."""

    def __init__(self, engine: Engine):
        """Take the engine."""
        self._engine, self.retriever = engine, _EmbedderAlone(engine.retriever.embedder)
        self.model, self.catalog, self.quota = engine.model, engine.catalog, engine.quota
        self.fingerprint, self.chunk_tokens, self.group_tokens = (
            engine.fingerprint,
            engine.chunk_tokens,
            engine.group_tokens,
        )
        self.split_seconds = engine.split_seconds
        self.key, self.encode_and_store_all, self.evict = engine.key, engine.encode_and_store_all, engine.evict
        self.is_writing, self.finish_writes = engine.is_writing, engine.finish_writes

    @property
    def encoded(self) -> int:
        """Chunks that it has encoded."""
        return self._engine.chunks.encoded


class _EmbedderAlone:
    """Stands for the retriever."""

    def __init__(self, embedder: IngestEmbedder):
        self.embedder, self.views = embedder, _NoViews()


class _NoViews:
    """Stands for the indexes of the collections."""

    def refresh(self, collection: str) -> None:
        """Do nothing."""

    def changed(self, collection: str) -> None:
        """Do nothing."""

    def save(self) -> None:
        """Do nothing."""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
