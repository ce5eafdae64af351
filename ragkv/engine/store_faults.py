"""Faults of the KV store: counted by kind, logged, and part of the engine's health.

A fault never fails an answer, so without a word it would go unnoticed: answers only become slower. Every kind
(`StoreError.code`) is logged as a warning, at most once in LOG_SECONDS, with how often it occurred. The line holds the
error with paths and addresses. Reports and health hold the code alone, because tenants read them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from math import inf

from ragkv.errors import EntryCorrupt, StoreError, StoreFull, StoreUnavailable
from ragkv.store.base import KVStore
from ragkv.types import Key

LOG_SECONDS = 60.0
"""Least time between two lines about one kind of fault."""
RECENT_SECONDS = 60.0
"""How long a damaged entry counts for the health. It is replaced at once, but where one is, there may be more."""
NO_ENTRY = Key("0" * 64)
"""A key that no entry has: deleting it shows whether the store takes changes, and changes nothing."""
_SEE_LOG = "the log of the service has the details"

logger = logging.getLogger(__name__)


class StoreFaults:
    """The faults of one store since the start. Not thread-safe.

    Attributes:
        counts: Faults by kind: entries that could not be read, and writes and deletions that were refused.
        refused: Writes and deletions that were refused.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refused = 0
        self._logged: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}
        self._latest: dict[str, str] = {}  # as text: a traceback would keep the request with its cache alive
        self._refusing = ""
        self._damaged_at = -inf

    def unreadable(self, error: StoreError) -> None:
        """Record an entry that could not be read, so that its chunk was encoded again."""
        self._record(error)

    def refusal(self, error: StoreError) -> None:
        """Record a write or a deletion that the store refused."""
        self.refused += 1
        self._record(error)
        if error.code in (StoreFull.code, StoreUnavailable.code):
            self._refusing = error.code

    def stored(self) -> None:
        """Record a write that succeeded: the store has room again."""
        self._refusing = ""

    def written(self, fault: StoreError | None) -> None:
        """Record what came of a write: why the store refused it, or None."""
        if fault is None:
            self.stored()
        else:
            self.refusal(fault)

    def log_due(self) -> None:
        """Log the kinds of faults that occurred since their last line, unless that line is too recent."""
        now = time.monotonic()
        for kind, latest in self._latest.items():
            new = self.counts[kind] - self._logged[kind]
            if new and now - self._logged_at.get(kind, -inf) >= LOG_SECONDS:
                total = self.counts[kind]
                logger.warning("KV store: %s, %d new, %d since the start; the latest: %s", kind, new, total, latest)
                self._logged[kind], self._logged_at[kind] = total, now

    def health(self, store: KVStore) -> str:
        """Return the state of the store, without paths and addresses: `ok`, or what is wrong.

        Args:
            store: Is asked whether it answers, and, after it refused a change, whether it takes changes again. Only a
                write that succeeds shows that a full store has room.
        """
        self.log_due()
        try:
            store.ping()
            if self._refusing == StoreUnavailable.code:
                store.delete(NO_ENTRY)
                self._refusing = ""
        except StoreError as error:
            return f"{error.code}: the store does not answer or refuses changes; {_SEE_LOG}"
        if self._refusing:
            return f"{self._refusing}: the latest write was refused, {self.refused} since the start; {_SEE_LOG}"
        if time.monotonic() - self._damaged_at < RECENT_SECONDS:
            damaged = EntryCorrupt.code
            return f"{damaged}: {self.counts[damaged]} damaged entries since the start, one lately; {_SEE_LOG}"
        return "ok"

    def _record(self, error: StoreError) -> None:
        if error.code == EntryCorrupt.code:
            self._damaged_at = time.monotonic()
        self.counts[error.code] += 1
        self._latest[error.code] = str(error)
        self.log_due()
