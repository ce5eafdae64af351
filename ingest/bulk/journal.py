"""The journal of a bulk ingest: which documents are in work, and the outcomes of those that are done.

It is an actor of Ray beside the command. When a worker dies, Ray gives its share to a worker again, which asks the
journal first: what is done keeps its outcome, and a document that was in work is ingested alone, so that a next death
is blamed on no other. A document whose worker has died MOST_ATTEMPTS times is refused.

The journal lives as long as the command. Only the catalogue says what is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MOST_ATTEMPTS = 3
"""How often a worker may die with a document."""


@dataclass(frozen=True)
class BulkOutcome:
    """What became of a document.

    Attributes:
        document_id: Its id; "" if its file was refused before it had one.
        status: `added`, `replaced`, `unchanged`, or `failed`.
        chunks: Chunks of the version that is now in the catalogue.
        tokens: Tokens of these chunks.
        error: Why it failed.
    """

    document_id: str
    status: str
    chunks: int = 0
    tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class JournalEntry:
    """What the journal knows of a document.

    Attributes:
        attempts: How often a worker began with it.
        outcome: What became of it; None while it is not done.
    """

    attempts: int = 0
    outcome: BulkOutcome | None = None


class IngestJournal:
    """The entries of one run."""

    def __init__(self) -> None:
        """Start empty."""
        self._entries = dict[str, JournalEntry]()
        self._workers = dict[int, int]()
        self._notices = dict[str, None]()
        self._starts = 0

    def start(self, worker: int) -> int:
        """Record the start of a worker, the id of its process. Returns how many started since a document was done."""
        self._workers.setdefault(worker, 0)
        self._starts += 1
        return self._starts

    def entries(self, ids: Iterable[str]) -> list[JournalEntry]:
        """Return the entries of documents."""
        return [self._entries.get(id, JournalEntry()) for id in ids]

    def attempt(self, ids: Iterable[str]) -> None:
        """Record that a worker begins with documents."""
        for id in ids:
            entry = self._entries.get(id, JournalEntry())
            self._entries[id] = JournalEntry(entry.attempts + 1, entry.outcome)

    def end(self, outcome: BulkOutcome, worker: int, encoded: int) -> None:
        """Record an outcome, and how many chunks the worker has encoded since its start."""
        entry = self._entries.get(outcome.document_id, JournalEntry())
        self._entries[outcome.document_id] = JournalEntry(entry.attempts, outcome)
        self._workers[worker] = encoded
        self._starts = 0

    def notice(self, line: str) -> None:
        """Keep a line that the user should see."""
        self._notices.setdefault(line)

    def notices(self) -> list[str]:
        """Return these lines, each once."""
        return list(self._notices)

    def workers(self) -> Mapping[int, int]:
        """Return how many chunks each worker has encoded, by the id of its process."""
        return dict(self._workers)
