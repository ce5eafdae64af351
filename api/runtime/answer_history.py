"""The latest answers, kept in memory so that clients can see what each was read from. A restart empties the history.

The number of answers is bounded: the oldest make room. An answer is found by the id of its request, which the client
may have chosen. Where a tenant uses an id twice, the later answer replaces the earlier one.

An answer may quote its documents, so it is removed when one of them is deleted or replaced, and with its collection or
its conversation. `CatalogService` asks the catalogue which answers these are: when it announces a change, and whenever
answers are shown.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Literal

from ragkv.api.runtime.request_context import Origin
from ragkv.engine.kv_map import KVMap
from ragkv.report import Answer

Rating = Literal["", "up", "down"]
"""What a user thinks of an answer; "" where nobody has said."""


@dataclass(frozen=True, eq=False)
class RecordedAnswer:
    """One answer and where it came from.

    Attributes:
        id: Id of its request.
        tenant: The tenant that asked.
        collection: Its collection, by the internal name.
        conversation: Its conversation; empty for none.
        answer: The answer.
        map: Which KV blocks it was read from.
        full_ms: Estimated milliseconds to the first token with full recompute.
        rows: Rows of the chunks that it may tell of: those of its context, in a conversation also of earlier turns, and
            those that were retrieved and left out.
        when: When it was answered, in Unix seconds. No two answers of a history have the same.
        origin: Where it was asked: on the dashboard's page, or with the API.
        rating: What its user thinks of it.
    """

    id: str
    tenant: str
    collection: str
    conversation: str
    answer: Answer
    map: KVMap
    full_ms: float
    rows: frozenset[int] = frozenset()
    when: float = 0.0
    origin: Origin = "api"
    rating: Rating = ""

    @property
    def documents(self) -> frozenset[str]:
        """Ids of the documents in its context: the cited ones and, in a conversation, those of earlier turns."""
        return frozenset(chunk.document_id for chunk in self.map.chunks)


def every(recorded: RecordedAnswer) -> bool:
    """Want every answer."""
    return True


class AnswerHistory:
    """The latest answers of all tenants. Thread-safe.

    Attributes:
        limit: Most answers that are kept.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[str, str], RecordedAnswer] = OrderedDict()
        self._latest = 0.0

    def record(self, recorded: RecordedAnswer) -> None:
        """Keep an answer that was given now. The oldest is dropped where there are too many."""
        key = (recorded.tenant, recorded.id)
        with self._lock:
            self._latest = max(time.time(), math.nextafter(self._latest, math.inf))
            self._answers[key] = replace(recorded, when=self._latest)
            self._answers.move_to_end(key)
            while len(self._answers) > self.limit:
                self._answers.popitem(last=False)

    def page(
        self, tenant: str, limit: int, before: float = math.inf, which: Callable[[RecordedAnswer], bool] = every
    ) -> list[RecordedAnswer]:
        """Return the tenant's answers that were given before that moment, newest first.

        Args:
            tenant: Whose answers.
            limit: Most answers.
            before: Unix seconds.
            which: Returns whether an answer is wanted.
        """
        with self._lock:
            newest = reversed(self._answers.values())
            wanted = (each for each in newest if each.tenant == tenant and each.when < before and which(each))
            return list(itertools.islice(wanted, limit))

    def find(self, tenant: str, id: str) -> RecordedAnswer | None:
        """Return the tenant's answer to this request, or None."""
        with self._lock:
            return self._answers.get((tenant, id))

    def rate(self, tenant: str, id: str, rating: Rating) -> RecordedAnswer | None:
        """Keep what a user thinks of an answer; return the answer, or None if it is no longer there."""
        with self._lock:
            found = self._answers.get((tenant, id))
            if found is None:
                return None
            self._answers[(tenant, id)] = rated = replace(found, rating=rating)
            return rated

    def of(self, collections: Set[str]) -> list[RecordedAnswer]:
        """Return all answers from these collections, by their internal names."""
        with self._lock:
            return [each for each in self._answers.values() if each.collection in collections]

    def remove(self, which: Callable[[RecordedAnswer], bool]) -> None:
        """Drop the answers for which `which` is true."""
        with self._lock:
            for key in [key for key, each in self._answers.items() if which(each)]:
                del self._answers[key]
