"""Holdings: the catalogue for routes. They look and remove without the engine, so neither of the two waits. An answer
that is remembered goes with the documents it stands on.

KV that nobody needs any more is the engine's to delete: its keys wait here until the worker takes them. What the end of
the process leaves of them is an orphan, which `ragkv gc` removes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

import anyio

from api.runtime.answer_history import AnswerHistory, RecordedAnswer
from ingest.jobs import Jobs
from ingest.loader import checked
from ingest.pipeline import content_hash, reader_of
from ingest.sandbox import Allowance
from ragkv.catalog import CollectionInfo, DocumentInfo
from ragkv.engine.engine import Engine
from ragkv.errors import Busy, NotFound
from ragkv.types import Document, Filter, Key

PARSERS = 2
"""Uploads whose files are read at a time; others wait, and no other request waits for them."""
WATCHERS = 64
"""Clients that follow a job at a time."""


class CatalogService:
    """Thread-safe. token_bytes: of KV of one token, as the model computes it · parsing: for threads that read files ·
    allowed: what each file may take · watchers: clients that follow a job."""

    def __init__(self, engine: Engine, jobs: Jobs, history: AnswerHistory):
        self.token_bytes = engine.model.token_bytes
        self.max_document_bytes = engine.settings.max_document_bytes
        self.parsing = anyio.CapacityLimiter(PARSERS)
        self.allowed = Allowance(engine.settings.parse_seconds, engine.settings.parse_bytes)
        self._catalog, self._jobs, self._history = engine.catalog, jobs, history
        self._prompt = engine.model.prompt
        self._reader = reader_of(engine)
        self._unreferenced: deque[Key] = deque()
        self.watchers = 0

    def unchanged(self, document: Document) -> DocumentInfo | None:
        """The document, where it is there with this very content and nothing newer waits; None where it has to be read.

        Raises InvalidDocument, TooLarge.
        """
        digest = content_hash(checked(document, self.max_document_bytes))
        if self._jobs.waits(document.collection, document.id):
            return None
        found = self._catalog.find(document.collection, document.id)
        return found if found and (found.content_hash, found.reader) == (digest, self._reader) else None

    def page(self, collection: str, after: str, limit: int, wanted: Filter | None) -> list[DocumentInfo]:
        """See Catalog.page."""
        return self._catalog.page(collection, after, limit, wanted)

    def whole(self, collection: str, document_id: str) -> tuple[DocumentInfo, str]:
        """The document and its text. Raises NotFound."""
        info, document = self._catalog.info_and_original(collection, document_id)
        return info, document.text

    def collections(self, prefix: str) -> list[CollectionInfo]:
        """See Catalog.collections."""
        return self._catalog.collections(prefix)

    def remove(self, collection: str, document_id: str) -> None:
        """Forget a document, whether it is there, waits, is being read or has failed. Raises NotFound."""
        waited = self._jobs.withdraw(collection, document_id)  # first, so that no job brings it back afterwards
        try:
            self._unreferenced.extend(self._catalog.remove(collection, document_id))
        except NotFound:
            if not waited:
                raise
        self._history.forget(lambda each: each.collection == collection and document_id in each.documents)

    def remove_collection(self, collection: str) -> None:
        """Forget all documents and conversations of a collection, and what waits for it. Raises NotFound."""
        waited = self._jobs.abandon(collection)
        try:
            self._unreferenced.extend(self._catalog.clear(collection))
        except NotFound:
            if not waited:
                raise
        self._history.forget(lambda each: each.collection == collection)

    def answers(self, tenant: str, limit: int, before: float) -> list[RecordedAnswer]:
        """The tenant's answers that were given before that moment, newest first. One that stands on a document which
        somebody removed behind our back is forgotten now."""
        while gone := self._gone(found := self._history.page(tenant, limit, before)):
            self._history.forget(gone.__contains__)
        return found

    def answer(self, tenant: str, id: str) -> RecordedAnswer:
        """The tenant's answer to this request. Raises NotFound."""
        found = self._history.find(tenant, id)
        if found is not None and (gone := self._gone([found])):
            self._history.forget(gone.__contains__)
        elif found is not None:
            return found
        raise NotFound(f"no answer {id!r} is remembered")

    def texts(self, answered: RecordedAnswer) -> list[list[str] | None]:
        """What the blocks of each chunk of an answer's map say; None for a chunk that is not there any more."""
        chunks = answered.map.chunks
        there = self._catalog.chunks(answered.collection, [chunk.row for chunk in chunks])
        found = [there.get(chunk.row) for chunk in chunks]
        return [self._prompt.blocks(chunk.tokens, answered.map.block) if chunk else None for chunk in found]

    def _gone(self, answers: Iterable[RecordedAnswer]) -> set[RecordedAnswer]:
        """Those that stand on a document which is not there any more, or another one of its name."""
        of: dict[str, list[RecordedAnswer]] = {}
        for each in answers:
            of.setdefault(each.collection, []).append(each)
        gone = set()
        for collection, these in of.items():
            came = self._catalog.creation_times(collection, frozenset().union(*(each.documents for each in these)))
            gone |= {each for each in these if any(came.get(id, inf) > each.asked for id in each.documents)}
        return gone

    def take_unreferenced(self, limit: int) -> list[Key]:
        """Keys whose KV nobody needs; handed out once."""
        return [self._unreferenced.popleft() for _ in range(min(limit, len(self._unreferenced)))]

    @property
    def has_unreferenced(self) -> bool:
        """Whether there are such keys."""
        return bool(self._unreferenced)

    def watch(self) -> None:
        """A client begins to follow a job. Raises Busy when too many do."""
        if self.watchers >= WATCHERS:
            raise Busy(self.watchers, 10)
        self.watchers += 1

    def leave(self) -> None:
        """It has gone."""
        self.watchers -= 1
