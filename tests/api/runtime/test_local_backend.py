"""The tools by an engine in this process: how an ingest is stopped, what waits for a service, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.api.runtime.local_backend import LocalBackend
from ragkv.api.runtime.tool_backend import ToolRefused
from ragkv.api.schemas.common import QuestionFields
from ragkv.api.schemas.tools import DocumentName, IngestArguments, ListArguments
from ragkv.catalog import Catalog
from ragkv.config import Settings
from ragkv.errors import Expired, NotFound
from ragkv.ingest.jobs import Jobs
from ragkv.types import Document
from tests.api.conftest import settings
from tests.mcp_calls import HARBOUR, QUESTION

LONG = " ".join(f"Boat {n} of Tarn carries {n + 3} nets and {n + 5} lamps." for n in range(400))


@pytest.fixture
def chosen(tmp_path: Path) -> Settings:
    return settings(tmp_path / "data", group_tokens=128)


@pytest.fixture
def backend(chosen: Settings) -> Iterator[LocalBackend]:
    made = LocalBackend(chosen, lambda line: None)
    yield made
    made.close(30)


async def ignore(progress: float, total: float | None, message: str | None) -> None:
    pass


def test_a_long_document_is_reported_in_parts_and_its_ingest_stops_with_the_call(backend: LocalBackend) -> None:
    wanted = IngestArguments.model_validate({"documents": [{"id": "boats", "text": LONG}]})
    parts = list[float]()

    async def use() -> None:
        half_way = asyncio.Event()

        async def note(progress: float, total: float | None, message: str | None) -> None:
            parts.append(progress)
            if 0 < progress < 1:
                half_way.set()

        ingest = asyncio.create_task(backend.ingest(wanted, note))
        await half_way.wait()
        ingest.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ingest
        # The next call has the engine's thread, and finds nothing of the document.
        await backend.ingest(IngestArguments.model_validate({"documents": [HARBOUR]}), ignore)
        listed = await backend.documents(ListArguments())
        assert [each.id for each in listed.documents] == ["sea/harbour"]
        assert (await backend.ask(QuestionFields(question=QUESTION, top_k=1, max_tokens=4))).citations

    asyncio.run(use())
    assert parts == sorted(set(parts))
    assert any(0 < part < 1 for part in parts)


def test_a_question_stops_at_its_deadline_and_with_its_call(backend: LocalBackend) -> None:
    async def use() -> None:
        await backend.ingest(IngestArguments.model_validate({"documents": [HARBOUR]}), ignore)
        late = QuestionFields(question=QUESTION, conversation_id="c", deadline_s=1e-6)
        with pytest.raises(Expired):
            await backend.ask(late)
        asking = asyncio.create_task(backend.ask(QuestionFields(question=QUESTION, max_tokens=4096)))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        answer = await backend.ask(QuestionFields(question=QUESTION, conversation_id="c", max_tokens=4))
        assert answer.report.tokens.history == 0, "the turn that expired is no turn"

    asyncio.run(use())


def test_a_document_that_waits_for_a_service_can_be_deleted(backend: LocalBackend, chosen: Settings) -> None:
    async def use() -> None:
        await backend.collections()  # the engine is open
        catalog = Catalog.open(chosen.data / "catalog.sqlite")
        try:
            jobs = Jobs(catalog, chosen.max_document_bytes)
            job = jobs.submit([Document("later", "Later", "The bridge of Mell is green.")])
            await backend.delete(DocumentName(id="later"))
            assert jobs.get(job).status == "cancelled"
        finally:
            catalog.close()
        with pytest.raises(NotFound, match="collection 'default' has no document 'later'"):
            await backend.delete(DocumentName(id="later"))

    asyncio.run(use())


def test_an_engine_that_cannot_be_opened_fails_every_call_and_the_end_is_quick(tmp_path: Path) -> None:
    told = list[str]()
    broken = LocalBackend(settings(tmp_path / "data", model=str(tmp_path / "nothing")), told.append)

    async def use() -> None:
        for _ in range(2):
            with pytest.raises(ToolRefused, match="nothing"):
                await broken.documents(ListArguments())

    asyncio.run(use())
    broken.close(5)
    assert len(told) == 1
    assert "nothing" in told[0]
