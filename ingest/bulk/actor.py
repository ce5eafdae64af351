"""A worker of a bulk ingest: an actor of Ray with an engine of its own.

Which engine that is, the caller says (OpenEngine): the engine is not known here, as everywhere in `ingest`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import ray

from ragkv.config import Settings
from ragkv.errors import InputError, RagkvError, StoreUnavailable
from ragkv.ingest.bulk.journal import MOST_ATTEMPTS, BulkOutcome
from ragkv.ingest.bulk.reading import COLUMN, decode_item, texts_of
from ragkv.ingest.engine_contract import IngestEngine
from ragkv.ingest.groups import ingest_all
from ragkv.ingest.outcomes import IngestOutcome
from ragkv.ingest.progress import no_progress
from ragkv.types import Document

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds until a worker tries again, where the catalogue does not answer."""


class BulkEngine(IngestEngine, Protocol):
    """The engine of a worker."""

    @property
    def encoded(self) -> int:
        """Chunks that it has encoded."""
        ...


OpenEngine = Callable[[Settings, Callable[[str], None]], BulkEngine]
"""Opens the engine of a worker with its settings. The function receives lines that a user should see."""


class IngestWorker:
    """Ingests the items that Ray Data hands to it.

    A fault of a document is its outcome. Any other fault ends the run: it is returned as a row, because an exception
    would lose its type on the way.
    """

    def __init__(self, open_engine: OpenEngine, settings: Settings, journal: Any, most_starts: int):
        """Open the engine.

        Args:
            open_engine: Opens it.
            settings: Settings of this worker, with its threads and its device.
            journal: The handle of the IngestJournal.
            most_starts: How many workers may start while no document is done.
        """
        self._journal = journal
        self._fault: RagkvError | None = None
        if ray.get(journal.start.remote(os.getpid())) > most_starts:
            self._fault = RagkvError(
                "the workers die again and again", "look for the reason in /tmp/ray/session_latest/logs; run it again"
            )
            return
        try:
            self._engine = open_engine(settings, journal.notice.remote)
        except RagkvError as error:
            self._fault = error

    def __call__(self, batch: Any) -> dict[str, list[str]]:
        """Ingest a batch of items. Returns an outcome or a fault for each, as JSON."""
        if self._fault is not None:
            return {COLUMN: [encode_fault(self._fault)]}
        try:
            outcomes = list(self._ingest([decode_item(text) for text in texts_of(batch)]))
        except RagkvError as error:
            return {COLUMN: [encode_fault(error)]}
        return {COLUMN: [json.dumps(asdict(outcome)) for outcome in outcomes]}

    def _ingest(self, items: Sequence[Document | str]) -> Iterator[BulkOutcome]:
        yield from (BulkOutcome("", "failed", error=item) for item in items if isinstance(item, str))
        documents = [item for item in items if isinstance(item, Document)]
        entries = ray.get(self._journal.entries.remote([document.id for document in documents]))
        new, suspects = list[Document](), list[Document]()
        for document, entry in zip(documents, entries, strict=True):
            if entry.outcome is not None:
                yield entry.outcome
            elif entry.attempts >= MOST_ATTEMPTS:
                fault = f"document {document.id!r}: the worker died each of the {MOST_ATTEMPTS} times that it read it"
                yield self._ended(BulkOutcome(document.id, "failed", error=fault))
            else:
                (suspects if entry.attempts else new).append(document)
        for together in (new, *([document] for document in suspects)):
            yield from self._ingest_together(together)

    def _ingest_together(self, documents: Sequence[Document]) -> Iterator[BulkOutcome]:
        """Ingest documents; again where the catalogue does not answer for a while. What is stored is not done twice."""
        left = list(documents)
        ray.get(self._journal.attempt.remote([document.id for document in left]))
        for pause in (*PAUSES, None):
            try:
                for document, outcome in ingest_all(self._engine, list(left), no_progress):
                    left.remove(document)
                    yield self._ended(_outcome(document, outcome))
                return
            except StoreUnavailable:
                if pause is None:
                    raise
                time.sleep(pause)

    def _ended(self, outcome: BulkOutcome) -> BulkOutcome:
        self._journal.end.remote(outcome, os.getpid(), self._engine.encoded)
        return outcome


def encode_fault(error: RagkvError) -> str:
    """Return an error that ends the run as it travels to the command."""
    return json.dumps({"fault": type(error).__name__, "message": error.message, "hint": error.hint})


def _outcome(document: Document, outcome: IngestOutcome | InputError) -> BulkOutcome:
    if isinstance(outcome, InputError):
        return BulkOutcome(document.id, "failed", error=str(outcome))
    return BulkOutcome(document.id, outcome.status, outcome.chunks, outcome.tokens)
