"""Passages over HTTP: scores, places, filters, and nothing of another tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragkv.api.middleware.keys import make_key
from ragkv.api.runtime.passage_search import PassageSearch
from ragkv.errors import Busy
from ragkv.retrieval import SearchScope
from tests.api.conftest import BRIDGE, HARBOUR, Service, serving, settings
from tests.api.test_bad_input import check_problem

QUERY = {"query": "Who built the harbour of Tarn?"}


def search(service: Service, **more: Any) -> Any:
    found = service.post("/v1/search", {**QUERY, **more})
    assert found.status_code == 200, found.text
    return found.json()


def test_passages_come_best_first_with_scores_and_places(service: Service) -> None:
    found = search(service)
    first, second = found["passages"]
    assert (first["document_id"], first["text"], first["start"], first["end"]) == (
        *("harbour", HARBOUR["text"], 0, len(HARBOUR["text"])),
    )
    assert first["score"] > second["score"]
    assert 1 >= first["similarity"] > second["similarity"] > -1
    assert first["word_score"] > 0
    assert (first["version"], first["chunk"], first["heading"], first["page"]) == (1, 0, None, None)


def test_the_report_says_what_was_searched_and_how_long(service: Service) -> None:
    report = search(service, top_k=1)["report"]
    assert (report["embedder"], report["chunks"], report["exact"]) == ("all-MiniLM-L6-v2", 2, True)
    assert report["by_vector"] == 2
    times = report["timings_ms"]
    assert 0 < times["embed"] <= times["total"]
    assert times["words"] + times["embed"] + times["vectors"] <= times["total"]


def test_a_search_is_limited_to_documents_and_metadata(service: Service) -> None:
    assert len(search(service, top_k=1)["passages"]) == 1
    only = search(service, documents=["bridge", "nothing"])["passages"]
    assert [each["document_id"] for each in only] == ["bridge"]
    assert search(service, documents=["nothing"])["passages"] == []
    assert search(service, filter={"year": 1889})["passages"] == []


def test_nothing_is_generated(service: Service) -> None:
    before = service.client.get("/v1/answers").json()
    passes: list[object] = []

    def watch(engine: Any) -> None:
        engine.model.forward = lambda given: passes.append(given) or type(engine.model).forward(engine.model, given)

    service.engine_thread.submit(watch).result(30)
    try:
        search(service)
    finally:
        service.engine_thread.submit(lambda engine: engine.model.__dict__.pop("forward")).result(30)
    assert (passes, service.client.get("/v1/answers").json()) == ([], before)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"query": ""}, 422),
        ({"query": "x" * 9000}, 422),
        ({"question": "x"}, 422),
        ({**QUERY, "method": "full"}, 422),
        ({**QUERY, "top_k": 65}, 422),
        ({**QUERY, "documents": []}, 422),
        ({**QUERY, "filter": {"a": {}}}, 422),
        ({**QUERY, "collection": "nothing"}, 404),
    ],
)
def test_a_wrong_search_is_refused(service: Service, body: Any, status: int) -> None:
    check_problem(service.post("/v1/search", body), status)


def test_an_answer_marks_its_words_and_an_unknown_one_cites_nothing(service: Service) -> None:
    answer = service.post("/v1/answers", {"question": QUERY["query"], "method": "full"}).json()
    assert answer["answer"] == "Ada Brook"
    (citation,) = [each for each in answer["citations"] if each["document_id"] == "harbour"]
    (mark,) = citation["marks"]
    text = service.client.get("/v1/documents/harbour/text").json()["text"]
    assert text[mark["start"] : mark["end"]] == "Ada Brook"
    assert text[mark["sentence_start"] : mark["sentence_end"]] == text == citation["text"]
    unknown = service.post("/v1/answers", {"question": "How much does the Grey Heron weigh?", "method": "full"}).json()
    assert (unknown["answer"], unknown["citations"]) == ("unknown", [])
    assert unknown["report"]["cache"]["chunks"] == 2, "the report still says what was read"


def test_too_many_searches_are_refused() -> None:
    class Slow:
        def find_passages(self, *arguments: object) -> None:
            raise AssertionError("it is never asked")

    async def refused() -> None:
        await PassageSearch(Slow(), 0).find("x", SearchScope(), 1)  # type: ignore[arg-type]

    with pytest.raises(Busy):
        asyncio.run(refused())


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, dict[str, str]]]]:
    """A service with two tenants and the headers of each."""
    made = {name: make_key(name) for name in ("red", "blue")}
    chosen = settings(Path(tmp_path_factory.mktemp("tenants")), api_keys=",".join(pair for _, pair in made.values()))
    with serving(chosen) as running:
        yield running, {name: {"X-API-Key": key} for name, (key, _) in made.items()}


def test_a_tenant_finds_nothing_of_another(tenants: tuple[Service, dict[str, dict[str, str]]]) -> None:
    service, headers = tenants
    for name, document in (("red", HARBOUR), ("blue", BRIDGE)):
        sent = service.post("/v1/documents?wait=true", document, headers=headers[name])
        assert sent.status_code == 200
    for name, own in (("red", "harbour"), ("blue", "bridge")):
        for more in ({}, {"documents": ["harbour", "bridge"]}):
            found = service.post("/v1/search", {**QUERY, **more}, headers=headers[name]).json()["passages"]
            assert [each["document_id"] for each in found] == [own]
    problem = check_problem(
        service.post("/v1/search", {**QUERY, "collection": "red:default"}, headers=headers["blue"]), 404
    )
    assert "'red:default' has no documents" in problem["detail"]
