"""What clients see when documents are added, replaced and deleted while questions are answered."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragkv.catalog import Catalog, database
from ragkv.engine.engine import Engine
from ragkv.ingest.jobs import Jobs
from ragkv.ingest.pipeline import ingest, remove
from ragkv.model.decoder import DecoderModel
from ragkv.retrieval import Embedder
from ragkv.retrieval.embedder import _packaged_folder
from ragkv.types import Chunk, Document
from tests.api.conftest import BRIDGE, HARBOUR, Service, serving, settings
from tests.interrupted import Interrupted
from tests.libraries import open_engine


@pytest.fixture
def beside(service: Service, model: DecoderModel, embedder: Embedder) -> Iterator[Engine]:
    """An engine of another process on the data folder of the service, as `ragkv rm` opens one."""
    data = service.engine_thread.submit(lambda engine: engine.settings.data).result(30)
    with open_engine(data, model, embedder, chunk_tokens=128) as engine:
        yield engine


@contextmanager
def held(service: Service) -> Iterator[None]:
    """Keep the engine busy while the context is open."""
    release, started = threading.Event(), threading.Event()
    busy = service.engine_thread.submit(lambda engine: started.set() or release.wait(60))
    started.wait(60)
    try:
        yield
    finally:
        release.set()
    busy.result(60)


def ask(
    service: Service, collection: str, question: str = "Who keeps the lamp of Tarn?", **more: Any
) -> httpx.Response:
    return service.post("/v1/answers", {"question": question, "collection": collection, "max_tokens": 8, **more})


def retrieved(response: httpx.Response) -> list[tuple[str, str]]:
    """Return (document, title) of every chunk that was read; an answer `unknown` cites none of them."""
    assert response.status_code == 200, response.text
    return [(chunk["document_id"], chunk["title"]) for chunk in response.json()["report"]["chunks"]]


def stored(service: Service) -> tuple[set[str], set[str]]:
    """Return the keys that chunks refer to, and the keys in the store."""
    return service.engine_thread.submit(lambda engine: (set(engine.catalog.keys()), set(engine.store.keys()))).result(
        30
    )


def tale(title: str, keeper: str, chapters: int) -> dict[str, str]:
    """Build a document with one chunk per chapter; the first chunk names the keeper of the lamp."""
    gales = "In the autumn of that year gales came in from the west and the boats stayed in the harbour for {n} days."
    rest = "\n\n".join(" ".join(gales.format(n=10 * i + j) for j in range(3)) for i in range(chapters))
    return {"id": "lamp", "title": title, "text": f"The lamp of Tarn is kept by {keeper}.\n\n{rest}"}


def test_a_document_sent_twice_at_once_is_one_job(service: Service) -> None:
    document = {**BRIDGE, "collection": "twice"}
    with held(service), ThreadPoolExecutor(8) as pool:
        posts = list(pool.map(lambda _: service.post("/v1/documents", document), range(8)))
    assert {post.status_code for post in posts} == {202}
    (job_id,) = {post.json()["job_id"] for post in posts}
    assert service.job(job_id)["status"] == "completed"
    assert retrieved(ask(service, "twice")) == [("bridge", "Mell")]


def test_every_answer_during_a_replacement_cites_one_whole_version(service: Service) -> None:
    keepers = {"Lamp, first": "Ada Brook", "Lamp, second": "Otto Lindqvist"}
    sizes = {"Lamp, first": 3, "Lamp, second": 6}
    first, second = ({**tale(title, keepers[title], sizes[title]), "collection": "swap"} for title in keepers)
    service.post("/v1/documents?wait=true", first)
    seen: list[tuple[str, int]] = []
    job_id = service.post("/v1/documents", second).json()["job_id"]
    finished = False
    while not finished:
        finished = service.client.get(f"/v1/jobs/{job_id}").json()["finished"] is not None
        response = ask(service, "swap", top_k=64)
        (title,) = {title for _, title in retrieved(response)}
        seen.append((title, len(retrieved(response))))
        assert response.json()["answer"] == keepers[title]
    assert seen[0][0] == "Lamp, first", "while the new version is read the old one answers"
    assert seen[-1][0] == "Lamp, second", "once the job is done, the new one does"
    assert {size == sizes[title] for title, size in seen} == {True}
    assert [title for title, _ in seen] == sorted(title for title, _ in seen), "never back to the old one"
    referenced, kept = stored(service)
    assert referenced == kept, "the KV of the old version is gone"


def test_a_version_swapped_by_another_process_in_the_middle_of_a_search_is_found(
    service: Service, beside: Engine
) -> None:
    old, new = (Document("lamp", f"Lamp {n}", f"Keeper {n} keeps the lamp.", {}, "raced") for n in (1, 2))
    service.post("/v1/documents?wait=true", {"id": "lamp", "title": old.title, "text": old.text, "collection": "raced"})

    def race(engine: Engine) -> None:
        chunks, left = engine.catalog.chunks, [new]

        def swap_first(*arguments: Any) -> dict[int, Chunk]:
            if left:
                ingest(beside, left.pop())
            return chunks(*arguments)

        engine.catalog.chunks = swap_first  # type: ignore[method-assign]

    service.engine_thread.submit(race).result(30)
    try:
        assert retrieved(ask(service, "raced")) == [("lamp", "Lamp 2")]
    finally:
        service.engine_thread.submit(lambda engine: engine.catalog.__dict__.pop("chunks")).result(30)


def test_a_document_deleted_during_a_question_is_never_cited_afterwards(service: Service, beside: Engine) -> None:
    for document in (HARBOUR, BRIDGE):
        service.post("/v1/documents?wait=true", {**document, "collection": "deleted"})
    before = retrieved(ask(service, "deleted"))

    def interrupt(engine: Engine) -> tuple[Interrupted, Callable[[], None]]:
        real = engine.store
        store = Interrupted(engine, 2, lambda: remove(beside, "deleted", "harbour"))

        def restore() -> None:
            engine.store = engine.tiers.store = real

        return store, restore

    interrupted, restore = service.engine_thread.submit(interrupt).result(30)
    try:
        assert ("harbour", "Tarn") in before
        assert retrieved(ask(service, "deleted")) == [("bridge", "Mell")], "it began again"
        assert interrupted.happened
        assert retrieved(ask(service, "deleted")) == [("bridge", "Mell")]
    finally:
        restore()
    referenced, kept = stored(service)
    assert referenced == kept
    remove(beside, "deleted", "bridge")
    assert ask(service, "deleted").status_code == 404


def test_a_document_deleted_during_ingest_is_cancelled_and_leaves_nothing(service: Service, beside: Engine) -> None:
    job_id = service.post("/v1/documents", {**tale("Lamp", "Ada Brook", 40), "collection": "gone"}).json()["job_id"]
    while service.client.get(f"/v1/jobs/{job_id}").json()["stage"] != "encode":
        pass
    assert Jobs(beside.catalog, 1).withdraw("gone", "lamp")
    job = service.job(job_id)
    assert (job["status"], job["documents"][0]["status"]) == ("cancelled", "cancelled")
    assert ask(service, "gone").status_code == 404
    # The chunk being encoded is still stored. It is deleted when the engine thread is free again.
    until = time.monotonic() + 20
    while (found := stored(service))[0] != found[1] and time.monotonic() < until:
        time.sleep(0.05)
    assert found[0] == found[1]


def test_a_document_that_failed_can_be_deleted_once(service: Service, beside: Engine) -> None:
    failed = service.post("/v1/documents?wait=true", {"id": "blank", "text": " ", "collection": "failed"}).json()
    assert failed["code"] == "invalid_document"
    assert Jobs(beside.catalog, 1).withdraw("failed", "blank")
    assert not Jobs(beside.catalog, 1).withdraw("failed", "blank")
    assert not Jobs(beside.catalog, 1).withdraw("elsewhere", "blank")
    assert service.job(failed["job_id"])["status"] == "failed", "what happened stays on record"


def test_another_embedder_changes_nothing_for_who_asks(tmp_path: Path, model: DecoderModel, embedder: Embedder) -> None:
    (tmp_path / "other-embedder").symlink_to(_packaged_folder())
    with open_engine(tmp_path / "data", model, embedder, chunk_tokens=128) as engine:
        ingest(engine, Document("harbour", "Tarn", HARBOUR["text"]))
    with serving(settings(tmp_path / "data", embedder=str(tmp_path / "other-embedder"))) as service:
        answered = ask(service, "default")
        assert answered.status_code == 200
        assert answered.json()["report"]["ratios"]["cache_hit"] == 1.0, "the KV is not the embedder's business"
        assert service.post("/v1/documents?wait=true", BRIDGE).json()["status"] == "completed"
        catalog = service.engine_thread.submit(lambda engine: engine.catalog).result(30)
        deadline = time.monotonic() + 30
        while catalog.reembedding() is not None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = service.post("/v1/search", {"query": "Who painted the bridge of Mell?"}).json()
        assert (found["report"]["embedder"], found["report"]["by_vector"]) == ("other-embedder", 2)
    assert Catalog.open(tmp_path / "data" / "catalog.sqlite").embedder().name == "other-embedder"


def test_a_part_that_does_not_answer_says_when_to_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    with serving(settings(tmp_path)) as service:
        other = sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        refused = service.post("/v1/documents", HARBOUR)
        assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
        assert int(refused.headers["Retry-After"]) > 0
        other.close()
        assert service.post("/v1/documents?wait=true", HARBOUR).json()["status"] == "completed"
