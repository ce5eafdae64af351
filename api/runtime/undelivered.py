"""What the answers that are on their way to their clients were read from, so that none is delivered too late.

An answer may be outdated before its client has it: one of its documents is deleted or replaced while it is decoded, or
while a slow client reads it. Every text is checked for that right before it is sent (answer_stream.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Set
from weakref import WeakSet

from ragkv.catalog import Catalog
from ragkv.errors import RagkvError

logger = logging.getLogger("ragkv.api")


class AnswerOrigin:
    """What one answer was read from.

    Attributes:
        collection: Its collection, by the internal name.
        rows: Rows of the chunks that it may tell of; empty until the question is prefilled.
        outdated: Whether one of these chunks is gone.
    """

    def __init__(self) -> None:
        self.collection, self.rows, self.outdated = "", frozenset[int](), False


class UndeliveredAnswers:
    """The origins of all answers that somebody waits for or still reads. Thread-safe.

    It forgets an origin with the last reference to it.
    """

    def __init__(self, catalog: Catalog):
        """Start empty; catalog: knows which chunks are there."""
        self._catalog = catalog
        self._lock = threading.Lock()
        self._origins = WeakSet[AnswerOrigin]()

    def add(self, origin: AnswerOrigin, collection: str, rows: frozenset[int]) -> None:
        """Note what an answer is read from, in place of what was noted before. It may be outdated at once."""
        origin.collection, origin.rows, origin.outdated = collection, rows, False
        with self._lock:
            self._origins.add(origin)
        self._check(collection, [origin])

    def check(self, collections: Set[str]) -> None:
        """Mark the answers that are outdated. collections: those that have changed."""
        with self._lock:
            origins = [origin for origin in self._origins if origin.collection in collections]
        for collection in {origin.collection for origin in origins}:
            self._check(collection, [origin for origin in origins if origin.collection == collection])

    def _check(self, collection: str, origins: list[AnswerOrigin]) -> None:
        rows = frozenset[int]().union(*(origin.rows for origin in origins))
        try:
            standing = self._catalog.standing(collection, rows)
        except RagkvError as error:  # what cannot be checked is not delivered
            logger.warning("answers from %r are given up: %s", collection, error)
            standing = set()
        for origin in origins:
            if not origin.rows <= standing:
                origin.outdated = True
