"""Quotas: a document that does not fit is refused before it costs anything, and stored documents stay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from ragkv.admin.quota import Quota
from ragkv.api.errors import install
from ragkv.errors import QuotaExceeded
from ragkv.ingest.jobs import Jobs
from ragkv.ingest.pipeline import Stage, ingest, reindex, remove
from tests.ingest.reader import FileEngine, make_document, run_next
from tests.quick import quick_engine

pytestmark = pytest.mark.usefixtures("one_thread")
BYTES = 10
"""KV bytes of one token."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FileEngine]:
    """An engine with one document, and a quota of its size plus 100 tokens."""
    opened = FileEngine(tmp_path)
    tokens = ingest(opened, make_document("a")).tokens
    opened.quota = Quota((tokens + 100) * BYTES, BYTES)
    yield opened
    opened.close()


def test_a_document_over_the_quota_is_refused_with_the_numbers_and_costs_nothing(engine: FileEngine) -> None:
    used, stored, encoded = engine.catalog.held("default")[0] * BYTES, engine.stored(), engine.encoded
    stages: list[str] = []
    with pytest.raises(QuotaExceeded) as refused:
        ingest(engine, make_document("b", seed=1), lambda stage, done, total: stages.append(stage))
    numbers = list(map(int, re.findall(r"\d+", str(refused.value))))
    assert numbers[0] == used
    assert numbers[1] > 100 * BYTES
    assert numbers[2] == engine.quota.limit
    assert "remove documents" in str(refused.value)
    assert set(stages) == {"split"}
    assert (engine.stored(), engine.encoded) == (stored, encoded)
    assert [d.id for d in engine.catalog.documents()] == ["a"]


def test_the_other_documents_of_the_job_go_on(engine: FileEngine) -> None:
    jobs = Jobs(engine.catalog, 2**20)
    job = jobs.submit([make_document("b", seed=1), make_document("c", words=20, seed=2)])
    while run_next(jobs, engine):
        pass
    first, second = jobs.get(job).documents
    assert first.error is not None
    assert (first.error.code, second.status) == ("quota_exceeded", "completed")


def test_a_document_fits_up_to_the_last_byte(engine: FileEngine) -> None:
    tokens = ingest(engine, make_document("b", words=30, seed=1)).tokens
    used, _ = engine.catalog.held("default")
    small = replace(make_document("b", words=30, seed=1), id="c")
    engine.quota = Quota((used + tokens) * BYTES - 1, BYTES)
    with pytest.raises(QuotaExceeded):
        ingest(engine, small)
    engine.quota = Quota((used + tokens) * BYTES, BYTES)
    assert ingest(engine, small).status == "added"


def test_removing_a_document_makes_room(engine: FileEngine) -> None:
    with pytest.raises(QuotaExceeded):
        ingest(engine, make_document("b", seed=1))
    remove(engine, "default", "a")
    assert ingest(engine, make_document("b", seed=1)).status == "added"


def test_a_new_version_takes_the_place_of_the_old_one(engine: FileEngine) -> None:
    assert ingest(engine, make_document("a", seed=1)).status == "replaced"
    with pytest.raises(QuotaExceeded):
        ingest(engine, make_document("a", words=600, seed=2))
    assert engine.catalog.original("default", "a") == make_document("a", seed=1)


def test_a_kept_file_needs_room_and_gives_it_back(engine: FileEngine) -> None:
    small = make_document("b", words=20, seed=1)
    with pytest.raises(QuotaExceeded, match=r"with its file of 1001, and the limit is .* remove documents"):
        ingest(engine, replace(small, file=b"%" * 1001))
    ingest(engine, replace(small, file=b"%" * 700))
    assert engine.catalog.held("default", "a")[1] == 700
    with pytest.raises(QuotaExceeded):
        ingest(engine, make_document("c", words=20, seed=2))
    ingest(engine, replace(small, text="Typed in."))
    assert ingest(engine, make_document("c", words=20, seed=2)).status == "added"


def test_the_file_of_a_document_that_is_there_is_kept_if_there_is_room(engine: FileEngine) -> None:
    for size, kept in ((1001, 0), (1000, 1000), (1001, 1000)):
        assert ingest(engine, replace(make_document("a"), file=b"%" * size)).status == "unchanged"
        assert engine.catalog.held("default")[1] == kept


def test_each_collection_has_its_own_quota(engine: FileEngine) -> None:
    assert ingest(engine, make_document("a", collection="other")).status == "added"


def test_stored_documents_may_be_ingested_again_over_the_quota(engine: FileEngine) -> None:
    engine.quota = Quota(1, BYTES)
    assert ingest(engine, make_document("a")).status == "unchanged"
    engine.fingerprint = "other model"
    assert reindex(engine).reread == 1
    assert engine.stored() == engine.catalog.keys()


def test_two_ingests_at_once_do_not_share_the_last_room(engine: FileEngine, tmp_path: Path) -> None:
    other = FileEngine(tmp_path)
    small = [make_document(name, words=40, seed=n) for n, name in enumerate("bc")]

    def meanwhile(stage: Stage, done: int, total: int) -> None:
        if stage == "commit":
            ingest(other, small[1])

    with pytest.raises(QuotaExceeded):
        ingest(engine, small[0], meanwhile)
    assert [d.id for d in engine.catalog.documents()] == ["a", "c"]
    assert engine.stored() == engine.catalog.keys(), "KV that was encoded in vain is evicted"
    other.close()


def test_the_engine_counts_what_the_store_holds(tmp_path: Path) -> None:
    with quick_engine(tmp_path, collection_bytes=10**9) as engine:
        tokens = ingest(engine, make_document("a", words=60)).tokens
        assert engine.quota == Quota(10**9, engine.quota.per_token)
        assert tokens * engine.quota.per_token == sum(sum(engine.store.layers(key)) for key in set(engine.store.keys()))


def test_over_http_it_is_413() -> None:
    app = FastAPI()
    install(app)

    @app.get("/")
    def refuse() -> None:
        raise QuotaExceeded("too much")

    answer = TestClient(app).get("/")
    assert (answer.status_code, answer.json()["code"]) == (413, "quota_exceeded")
