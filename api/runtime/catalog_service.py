"""The catalogue for the HTTP routes. They read and remove documents without waiting for the engine.

When a document is deleted or replaced, answers that were read from it go: those that are recorded, and those that are
on their way (`drop_outdated`).

Only the engine deletes KV, so the keys of unreferenced KV wait here until its thread takes them. Keys that still wait
when the process ends are orphans, which `ragkv gc` removes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from functools import partial

import anyio

from ragkv.api.runtime.answer_history import AnswerHistory, RecordedAnswer, every
from ragkv.api.runtime.kv_estimates import KVEstimates
from ragkv.api.runtime.tenants import Tenant
from ragkv.api.runtime.undelivered import UndeliveredAnswers
from ragkv.catalog import ID_ORDER, CollectionInfo, DocumentInfo, DocumentOrder
from ragkv.config import IngestSettings
from ragkv.engine.chunk_encoder import EVICTED_AT_ONCE
from ragkv.engine.engine import Engine
from ragkv.errors import Busy, CatalogCorrupt, NotFound, QuotaExceeded, RagkvError
from ragkv.ingest.jobs import Jobs
from ragkv.ingest.loader import checked
from ragkv.ingest.page_pictures import PagePicture, draw_page
from ragkv.ingest.pipeline import content_hash, reader_of
from ragkv.ingest.sandbox import allowance_of
from ragkv.model.wrapper import without_wrapper
from ragkv.types import Chunk, Document, Filter, HourPrice, Key

logger = logging.getLogger("ragkv.api")

PARSERS = 2
"""Uploaded files that are parsed at a time. Further ones wait; other requests do not."""
WATCHERS = 64
"""Most clients that follow a job at a time."""
EXAMPLES = 4
"""Examples of questions that are offered for a collection."""
_EXAMPLES = 64 * EXAMPLES
"""Most examples of all collections."""


class CatalogService:
    """Reads and removes documents, collections and recorded answers. Thread-safe.

    Attributes:
        kv: What the KV of documents takes and saves.
        max_document_bytes: Longest document.
        parsing: Limits the threads that parse files.
        drawing: Limits those that draw pages.
        allowed: What parsing one file may take.
        watchers: Clients that follow a job.
        undelivered: The answers that somebody waits for.
    """

    def __init__(self, engine: Engine, jobs: Jobs, history: AnswerHistory):
        self.kv = KVEstimates(engine)
        limits = engine.settings.part(IngestSettings)
        self.max_document_bytes = limits.max_document_bytes
        self.parsing = anyio.CapacityLimiter(PARSERS)
        self.allowed = allowance_of(limits)
        self.drawing = anyio.CapacityLimiter(PARSERS)
        self._catalog, self._jobs, self._history = engine.catalog, jobs, history
        self._examples = AnswerHistory(_EXAMPLES)
        self._prompt = engine.model.prompt
        self._reader = partial(reader_of, engine)
        self._unreferenced: deque[Key] = deque()
        self.watchers = 0
        self.undelivered = UndeliveredAnswers(engine.catalog)

    @property
    def damage(self) -> CatalogCorrupt | None:
        """See Catalog.damage."""
        return self._catalog.damage

    def unchanged(self, document: Document) -> DocumentInfo | None:
        """Return the stored document if it has this content and nothing newer waits; None if it has to be ingested.

        Raises:
            InvalidDocument: The document cannot be ingested.
            TooLarge: It is longer than allowed.
        """
        document = checked(document, self.max_document_bytes)
        digest = content_hash(document)
        if self._jobs.waits(document.collection, document.id):
            return None
        found = self._catalog.find(document.collection, document.id)
        return (
            found
            if found and (found.content_hash, found.reader) == (digest, self._reader(document.collection))
            else None
        )

    def find(self, collection: str, document_id: str) -> DocumentInfo | None:
        """See Catalog.find."""
        return self._catalog.find(collection, document_id)

    def record_hour_price(self, price: HourPrice | None) -> None:
        """See Catalog.record_hour_price."""
        self._catalog.record_hour_price(price)

    def original(self, collection: str, document_id: str) -> Document:
        """See Catalog.original."""
        return self._catalog.original(collection, document_id)

    def document_from(self, collection: str, path: str) -> str | None:
        """See Catalog.document_from."""
        return self._catalog.document_from(collection, path)

    def page(
        self,
        collection: str,
        after: tuple[str | float, str] | None,
        limit: int,
        conditions: Filter | None = None,
        order: DocumentOrder = ID_ORDER,
    ) -> list[DocumentInfo]:
        """See Catalog.page."""
        return self._catalog.page(collection, after, limit, conditions, order)

    def read_again(self, collection: str, document_ids: Sequence[str]) -> list[Document]:
        """Let these documents be ingested again; return them as they are stored. Those that are gone are left out."""
        found = []
        for document_id in document_ids:
            try:
                info, document = self._catalog.info_and_original(collection, document_id)
            except NotFound:
                continue
            found.append(replace(document, source=info.source))
        self._catalog.read_again(collection, [document.id for document in found])
        return found

    def chunk_page(self, collection: str, document_id: str, after: int, limit: int) -> tuple[DocumentInfo, list[Chunk]]:
        """See Catalog.chunk_page."""
        return self._catalog.chunk_page(collection, document_id, after, limit)

    def whole(self, collection: str, document_id: str) -> tuple[DocumentInfo, str]:
        """Return a document and its text. Raises NotFound."""
        info, document = self._catalog.info_and_original(collection, document_id)
        return info, document.text

    def picture(self, collection: str, document_id: str, number: int, passage: tuple[int, int]) -> PagePicture | None:
        """See `draw_page`. Returns None where there is no such document, or no longer when its page is drawn."""
        try:
            info, document = self._catalog.with_file(collection, document_id)
        except NotFound:
            return None
        picture = draw_page(document, number, passage, self.allowed)
        now = self._catalog.find(collection, document_id)
        return picture if now is not None and now.content_hash == info.content_hash else None

    def collections(self, prefix: str) -> list[CollectionInfo]:
        """See Catalog.collections."""
        return self._catalog.collections(prefix)

    def check_room(self, tenant: Tenant, limit: int) -> None:
        """Check that a tenant may add documents. Documents that wait already are not counted.

        Args:
            tenant: Whose documents they are.
            limit: Most bytes of KV and kept files of all its documents; 0 for no limit.

        Raises:
            QuotaExceeded: The tenant has used up the limit.
        """
        if not limit:
            return
        owned = self._catalog.collections(f"{tenant.name}:" if tenant.name else "")
        used = sum(self.kv.token_bytes * each.tokens + each.file_bytes for each in owned)
        if used >= limit:
            raise QuotaExceeded(
                f"all documents together hold {used} bytes of KV and files, the limit is {limit}; remove some first"
            )

    def remove(self, collection: str, document_id: str) -> None:
        """Remove a document, whether it is stored, waits, is being ingested or has failed. Raises NotFound."""
        was_queued = self._jobs.withdraw(collection, document_id)  # first, so that no job brings it back afterwards
        try:
            self._unreferenced.extend(self._catalog.remove(collection, document_id))
        except NotFound:
            if not was_queued:
                raise
        self.drop_outdated({collection})

    def remove_collection(self, collection: str) -> None:
        """Remove all documents and conversations of a collection, and what waits for it. Raises NotFound."""
        was_queued = self._jobs.abandon(collection)
        try:
            self._unreferenced.extend(self._catalog.clear(collection))
        except NotFound:
            if not was_queued:
                raise
        self.drop_outdated({collection})

    def drop_outdated(self, collections: Set[str]) -> None:
        """Give up the answers on their way, and forget the recorded ones, that were read from a chunk which is gone.

        Args:
            collections: The collections that have changed.
        """
        self.undelivered.check(collections)
        for history in (self._history, self._examples):
            history.remove(self._outdated(history.of(collections)).__contains__)

    def answers(
        self, tenant: str, limit: int, before: float, which: Callable[[RecordedAnswer], bool] = every
    ) -> list[RecordedAnswer]:
        """Return the tenant's answers that were given before that moment, newest first.

        Answers from documents that another process deleted or replaced are dropped now. For `which` see
        `AnswerHistory.page`.
        """
        while outdated := self._outdated(found := self._history.page(tenant, limit, before, which)):
            self._history.remove(outdated.__contains__)
        return found

    def answer(self, tenant: str, id: str) -> RecordedAnswer:
        """Return the tenant's answer to this request. Raises NotFound."""
        found = self._history.find(tenant, id)
        if found is not None and (outdated := self._outdated([found])):
            self._history.remove(outdated.__contains__)
        elif found is not None:
            return found
        raise NotFound(f"no answer {id!r} is remembered")

    def keep_example(self, example: RecordedAnswer) -> None:
        """Keep a question that a page may offer, with the answer that the service has given to it."""
        self._examples.record(example)

    def examples(self, collection: str) -> list[RecordedAnswer]:
        """Return the examples of a collection, at most EXAMPLES, that its documents still answer."""
        found = self._examples.of({collection})
        if outdated := self._outdated(found):
            self._examples.remove(outdated.__contains__)
        return [each for each in found if each not in outdated][:EXAMPLES]

    def chunks(self, recorded: RecordedAnswer) -> list[Chunk | None]:
        """Return each chunk of an answer's map; None for one that is not stored now."""
        chunks = recorded.map.chunks
        stored = self._catalog.chunks(recorded.collection, [chunk.row for chunk in chunks])
        return [stored.get(chunk.row) for chunk in chunks]

    def texts(self, recorded: RecordedAnswer) -> list[list[str] | None]:
        """Return the text of each block of each chunk of an answer's map; None for a chunk that is not stored now."""
        block, texts = recorded.map.block, list[list[str] | None]()
        for chunk, shown in zip(self.chunks(recorded), recorded.map.chunks, strict=True):
            tokens = chunk.tokens if chunk else ()
            if len(tokens) != shown.tokens:  # a prefill in full has no wrapper tokens
                tokens = without_wrapper(tokens)
            texts.append(self._prompt.blocks(tokens, block) if chunk else None)
        return texts

    def _outdated(self, answers: Iterable[RecordedAnswer]) -> set[RecordedAnswer]:
        """Return the answers from a document that was deleted or replaced since."""
        by_collection: dict[str, list[RecordedAnswer]] = {}
        for answer in answers:
            by_collection.setdefault(answer.collection, []).append(answer)
        outdated = set[RecordedAnswer]()
        for collection, recorded in by_collection.items():
            rows = frozenset[int]().union(*(each.rows for each in recorded))
            standing = self._catalog.standing(collection, rows)
            outdated |= {each for each in recorded if not each.rows <= standing}
        return outdated

    def evict_unreferenced(self, engine: Engine) -> None:
        """Evict some of the KV that nothing refers to any more. Only the engine's thread may call this."""
        keys = [self._unreferenced.popleft() for _ in range(min(EVICTED_AT_ONCE, len(self._unreferenced)))]
        if not keys:
            return
        try:
            engine.evict(keys)
        except RagkvError as error:  # the KV stays as an orphan
            logger.warning("the KV of %d chunks is not deleted: %s", len(keys), error)

    @property
    def has_unreferenced(self) -> bool:
        """Whether keys of unreferenced KV wait."""
        return bool(self._unreferenced)

    def watch(self) -> None:
        """Count a client that begins to follow a job. Raises Busy when too many do."""
        if self.watchers >= WATCHERS:
            raise Busy(self.watchers, 10)
        self.watchers += 1

    def leave(self) -> None:
        """Count a client that stops following a job."""
        self.watchers -= 1


def not_found(document_id: str, collection: str) -> NotFound:
    """Return the error that says that the collection, as the tenant knows it, has no such document."""
    return NotFound(f"collection {collection!r} has no document {document_id!r}")
