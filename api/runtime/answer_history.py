"""History: the latest answers, in memory, for whoever wants to see what they were read from. A restart forgets them.

Bounded by their number: the oldest make room. An answer is found by the id of its request, which the client may have
chosen; where a tenant uses one twice the later answer takes the place of the earlier.

An answer may quote what it was read from, so it goes with its documents, its collection or its conversation. Whoever
removes one of these says so here (`forget`), and what another process removed is looked for whenever answers are shown
(holdings.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from ragkv.engine.kv_map import KVMap
from ragkv.report import Answer


@dataclass(frozen=True, eq=False)
class RecordedAnswer:
    """One answer. id: of its request · tenant: whose it is · collection: as it is called inside · conversation: empty
    for none · when: it was answered, Unix seconds; no two of a history have the same · full_ms: to the first token, as
    full recompute is estimated to take for it."""

    id: str
    tenant: str
    collection: str
    conversation: str
    answer: Answer
    map: KVMap
    full_ms: float
    when: float = 0.0

    @property
    def asked(self) -> float:
        """When reading it began, Unix seconds."""
        return self.when - self.answer.report.timings_ms.total / 1000

    @property
    def documents(self) -> frozenset[str]:
        """Ids of the documents it stands on: those it cites, and in a conversation those of its earlier turns."""
        return frozenset(chunk.document_id for chunk in self.map.chunks)


class AnswerHistory:
    """Thread-safe. limit: answers it keeps."""

    def __init__(self, limit: int):
        self.limit = limit
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[str, str], RecordedAnswer] = OrderedDict()
        self._latest = 0.0

    def record(self, answered: RecordedAnswer) -> None:
        """Keep an answer that was given now; the oldest goes where there are too many."""
        key = (answered.tenant, answered.id)
        with self._lock:
            self._latest = max(time.time(), math.nextafter(self._latest, math.inf))
            self._answers[key] = replace(answered, when=self._latest)
            self._answers.move_to_end(key)
            while len(self._answers) > self.limit:
                self._answers.popitem(last=False)

    def page(self, tenant: str, limit: int, before: float = math.inf) -> list[RecordedAnswer]:
        """The tenant's answers that were given before that moment, newest first."""
        found: list[RecordedAnswer] = []
        with self._lock:
            for each in reversed(self._answers.values()):
                if len(found) == limit:
                    break
                if each.tenant == tenant and each.when < before:
                    found.append(each)
        return found

    def find(self, tenant: str, id: str) -> RecordedAnswer | None:
        """The tenant's answer to this request, or None."""
        with self._lock:
            return self._answers.get((tenant, id))

    def forget(self, gone: Callable[[RecordedAnswer], bool]) -> None:
        """Drop the answers of which this is true."""
        with self._lock:
            for key in [key for key, each in self._answers.items() if gone(each)]:
                del self._answers[key]
