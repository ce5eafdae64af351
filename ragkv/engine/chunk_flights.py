"""Single flight: of all processes that miss a chunk at the same time one encodes it, and the others wait for its entry.

A process that misses a chunk takes its lease in the store (`Leases`), encodes the chunk and stores it, which ends the
lease. A process that finds the lease taken asks again every POLL_SECONDS, until the entry is there or the lease is
free. It waits for a bounded time and then encodes the chunk itself. While a chunk is encoded its lease is renewed, so
the lease of a process that died ends after LEASE_SECONDS. If the store does not answer, everybody encodes. So a lease
costs time at most, never an answer.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, get_args

from ragkv.errors import StoreError
from ragkv.store.base import KVStore, LeaseState
from ragkv.types import Key

LEASE_SECONDS = 5.0
"""Life of a lease that is not renewed. It is renewed three times in this time."""
POLL_SECONDS = 0.005
"""How often a lease that another process has is asked for."""
WAIT_FACTOR = 4.0
"""A chunk is waited for this many times as long as encoding it takes here."""
LEAST_WAIT = 1.0
"""Shortest bound of a wait in seconds: what was measured on an idle machine says little about small chunks."""

FlightResult = Literal["led", "joined", "expired", "alone"]
"""How a missing chunk was obtained: encoded under its lease; read, because another process encoded it; encoded, because
the wait for another process was over; encoded without a lease, because the store has none or
an ingest did not wait."""
FLIGHT_RESULTS: tuple[FlightResult, ...] = get_args(FlightResult)


class ChunkFlights:
    """The leases of one engine. The engine's thread uses it; another thread renews.

    Attributes:
        counts: Missing chunks since the start, by `FlightResult`. All but `joined` were encoded here.
    """

    def __init__(self, store: KVStore):
        """Set up without a lease. store: has the leases."""
        self.counts: Counter[FlightResult] = Counter()
        self._store = store
        self._ask_again: dict[Key, float] = {}
        self._owners: dict[Key, str] = {}
        self._changed = threading.Condition()
        self._renewing: threading.Thread | None = None
        self._closed = False

    @property
    def results(self) -> dict[str, int]:
        """Missing chunks since the start, by every `FlightResult`."""
        return {result: self.counts[result] for result in FLIGHT_RESULTS}

    def patience(self, encoding_seconds: float) -> float:
        """Return how many seconds a chunk is waited for that takes so many seconds to encode."""
        return max(LEAST_WAIT, WAIT_FACTOR * encoding_seconds)

    def take(self, key: Key) -> LeaseState | None:
        """Take the lease of a missing chunk, see `Leases.take`; None when the store has no leases.

        Questions of one process share what the store said last, so that many of them do not ask more often than one.
        """
        now = time.monotonic()
        if self._ask_again.get(key, 0.0) > now:
            return "held"
        owner = secrets.token_hex(16)
        try:
            state = self._store.leases.take(key, owner, LEASE_SECONDS)
        except StoreError:
            return None
        self._ask_again = {other: at for other, at in self._ask_again.items() if at > now}
        if state == "held":
            self._ask_again[key] = now + POLL_SECONDS
        elif state == "taken":
            self._keep(key, owner)
        return state

    def landed(self, key: Key) -> None:
        """Forget the lease of a chunk that was stored, which has ended it."""
        with self._changed:
            self._owners.pop(key, None)

    def release(self, key: Key) -> None:
        """End the lease of a chunk, if this process has it and could not store the chunk."""
        with self._changed:
            owner = self._owners.pop(key, None)
        if owner is not None:
            with suppress(StoreError):
                self._store.leases.release(key, owner)

    def close(self) -> None:
        """End the thread that renews."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._renewing is not None:
            self._renewing.join()

    def _keep(self, key: Key, owner: str) -> None:
        """Renew a lease from now on."""
        with self._changed:
            self._owners[key] = owner
            if self._renewing is None:
                self._renewing = threading.Thread(target=self._renew, name="ragkv-leases", daemon=True)
                self._renewing.start()
            self._changed.notify()

    def _renew(self) -> None:
        while self._wait(lambda: bool(self._owners), None):
            if self._wait(lambda: False, LEASE_SECONDS / 3):
                with self._changed:
                    owners = dict(self._owners)
                for key, owner in owners.items():
                    with suppress(StoreError):
                        self._store.leases.renew(key, owner, LEASE_SECONDS)

    def _wait(self, until: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until something is the case, or for some seconds. Returns whether the flights are still open."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or until(), seconds)
            return not self._closed
