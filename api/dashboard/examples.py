"""Examples of questions for an empty start: the service has asked them itself, and knows that it answers them.

Rules make questions from passages of the collection, each with its answer. The engine answers them while it has
nothing else to do. A question is offered where the answer is the expected one, a passage holds it, and the
confidence, if the model was measured, is one that the page calls likely. Metrics, history and quotas do not have these
answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from anyio import to_thread

from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.api.runtime.catalog_service import EXAMPLES, CatalogService
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.undelivered import AnswerOrigin
from ragkv.catalog import CollectionInfo
from ragkv.engine.kv_map import KVMap
from ragkv.engine.occurrences import words_of
from ragkv.errors import NotFound, RagkvError
from ragkv.evaluation.questions import plain_questions
from ragkv.passages import is_unknown
from ragkv.report import LIKELY, Answer
from ragkv.types import AskOptions

DOCUMENTS = 24
"""Documents whose first passages questions are made from."""
READ = 2000
"""Characters of a passage that are read: the rules take a time that is quadratic in a word that never ends."""
TRIED = 16
"""Most questions that are tried for a collection."""
KNOWN = 64
"""Collections whose examples are remembered."""
_PAUSE = 0.5
"""Seconds between two looks whether the engine has something else to do."""

logger = logging.getLogger("ragkv.api")


class ExampleFinder:
    """Finds examples for the collections that pages show. Belongs to the event loop of the service."""

    def __init__(self, engine_thread: EngineThread):
        self._engine_thread = engine_thread
        self._tried: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._searches: dict[str, asyncio.Task[None]] = {}

    def searching(self, collection: str) -> bool:
        """Whether more examples may be found soon."""
        return collection in self._searches

    async def questions(self, info: CollectionInfo) -> list[str]:
        """Return the examples that are known now. Where there are few, a search begins, once for each state.

        Args:
            info: The collection as it is now, by its internal name.
        """
        state = (info.documents, info.tokens)
        found = await to_thread.run_sync(self._service.examples, info.name)
        known = len(found) >= EXAMPLES or self._tried.get(info.name) == state
        if not known and not self.searching(info.name) and self._idle:
            self._tried[info.name] = state
            self._tried.move_to_end(info.name)
            while len(self._tried) > KNOWN:
                self._tried.popitem(last=False)
            self._searches[info.name] = asyncio.create_task(self._search(info.name))
        return [each.answer.question for each in found]

    @property
    def _idle(self) -> bool:
        """Whether nobody asks and no document is ingested."""
        health = self._engine_thread.health()
        ingests = health.get("documents_waiting") or health.get("jobs_running")
        return not (health["waiting"] or health["running"] or ingests)

    @property
    def _service(self) -> CatalogService:
        return self._engine_thread.catalog_service

    async def _search(self, collection: str) -> None:
        try:
            passages = await to_thread.run_sync(passages_of, self._service, collection)
            for question, expected in await to_thread.run_sync(plain_questions, passages, TRIED):
                if len(await to_thread.run_sync(self._service.examples, collection)) >= EXAMPLES:
                    return
                await self._try(collection, question, expected)
        except RagkvError as error:  # the service stops, or the engine begins anew
            logger.info("no further examples are searched: %s", error)
        finally:
            del self._searches[collection]

    async def _try(self, collection: str, question: str, expected: str) -> None:
        """Ask a question when the engine has nothing else to do, and keep it if the answer is right."""
        while not self._idle:
            await asyncio.sleep(_PAUSE)
        origin = AnswerOrigin()
        future = self._engine_thread.ask(question, AskOptions(collection), origin=origin, rehearsed=True)
        answer = await asyncio.wrap_future(future)
        if convincing(answer, expected):
            self._service.keep_example(
                RecordedAnswer(question, "", collection, "", answer, KVMap(1, 0, ()), 0.0, origin.rows)
            )


def convincing(answer: Answer, expected: str) -> bool:
    """Whether an answer is the expected one, a passage holds it, and the model is sure of it, if it was measured."""
    report = answer.report
    if is_unknown(answer.answer) or report.rule or not any(each.marks for each in answer.citations):
        return False
    given, wanted = words_of(answer.answer), words_of(expected)
    same = bool(given and wanted) and (given <= wanted or wanted <= given)
    return same and (report.confidence is None or report.confidence >= LIKELY)


def passages_of(service: CatalogService, collection: str) -> list[tuple[str, str]]:
    """Return title and text, or its beginning, of the first passage of some documents."""
    found = []
    for info in service.page(collection, None, DOCUMENTS):
        try:
            _, chunks = service.chunk_page(collection, info.id, -1, 1)
        except NotFound:  # it was deleted meanwhile
            continue
        found += [(info.title, chunk.text[:READ]) for chunk in chunks]
    return found
