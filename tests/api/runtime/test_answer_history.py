"""The history of answers: what is recorded, for which tenant, for how long, and what is shown of it."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
import tracemalloc
import uuid
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from ragkv.api.middleware.keys import make_key
from ragkv.api.runtime.answer_history import AnswerHistory, RecordedAnswer
from ragkv.api.runtime.request_context import RequestContext, working_for
from ragkv.api.schemas.history import blocks_with_answer
from ragkv.catalog import Catalog
from ragkv.engine.kv_map import KEPT, ChunkKVMap, KVMap
from ragkv.engine.request import Request
from ragkv.passages import Citation
from ragkv.report import (
    Answer,
    ByteCounts,
    CacheReport,
    ChunkReport,
    DecodeReport,
    PrefillReport,
    Ratios,
    Report,
    TierHits,
    Timings,
    TokenCounts,
)
from ragkv.types import AskOptions
from tests.api.conftest import HARBOUR, Service, serving, settings
from tests.api.runtime.test_answers_together import on_prefill

ASK = {"question": "Who built the harbour of Tarn?"}


@pytest.fixture
def collection(service: Service) -> str:
    """Name of a new collection with one document of several blocks."""
    name = f"history-{uuid.uuid4().hex[:8]}"
    put(service, name, "mill", "The mill of Orm was built by Ida Falk. 水車 " * 4 + "It was burnt down in 1901.")
    return name


def put(service: Service, collection: str, id: str, text: str) -> None:
    done = service.client.put(
        f"/v1/documents/{id}", params={"collection": collection, "wait": "true"}, json={"text": text, "title": id}
    )
    assert done.status_code == 200


def ask(service: Service, collection: str = "default", id: str = "", **more: Any) -> tuple[str, Any]:
    """Return (id, answer)."""
    given = {"X-Request-ID": id} if id else {}
    answer = service.post("/v1/answers", {**ASK, "collection": collection, **more}, headers=given)
    assert answer.status_code == 200
    return answer.headers["X-Request-ID"], answer.json()


def get(service: Service, path: str, status: int = 200, **params: Any) -> Any:
    found = service.client.get(f"/v1/answers{path}", params=params)
    assert found.status_code == status, found.text
    return found.json()


def listed(service: Service, collection: str) -> list[Any]:
    return [each for each in get(service, "", limit=100)["answers"] if each["collection"] == collection]


def test_an_answer_is_found_under_the_id_of_its_request_as_it_was_given(service: Service, collection: str) -> None:
    before = time.time()
    id, answer = ask(service, collection)
    found = get(service, f"/{id}")
    assert {name: found[name] for name in answer} == answer
    assert (found["id"], found["collection"]) == (id, collection)
    assert before < found["when"] < time.time()
    own, _ = ask(service, collection, id="my.request-1")
    assert own == "my.request-1"
    assert get(service, "/my.request-1")["question"] == ASK["question"]


def test_the_list_has_the_newest_first_a_page_at_a_time(service: Service, collection: str) -> None:
    ids = [ask(service, collection, question=f"{n}? " + "why " * 90, max_tokens=1)[0] for n in range(5)]
    found = listed(service, collection)
    assert [each["id"] for each in found] == ids[::-1]
    assert found[0]["question"] == ("4? " + "why " * 90)[:200]
    report = get(service, f"/{ids[-1]}")["report"]
    assert (found[0]["method"], found[0]["ratios"]) == (report["method"], report["ratios"])
    assert (found[0]["ttft"], found[0]["total"]) == (report["timings_ms"]["ttft"], report["timings_ms"]["total"])
    first = get(service, "", limit=2)
    second = get(service, "", limit=2, before=first["before"])
    assert [each["id"] for each in first["answers"] + second["answers"]] == ids[:0:-1]
    assert turned(service, 3, first["before"]) == turned(service, 100, first["before"]) > 2


def turned(service: Service, limit: int, before: str | None) -> int:
    """Count the answers before one, `limit` a page."""
    count = 0
    while before is not None:
        page = get(service, "", limit=limit, before=before)
        count, before = count + len(page["answers"]), page["before"]
    return count


def test_the_latest_answer_of_an_id_wins(service: Service, collection: str) -> None:
    ask(service, collection, id="twice", question="Who built the mill?")
    ask(service, collection, id="twice", question="When was it burnt down?")
    assert get(service, "/twice")["question"] == "When was it burnt down?"
    assert [each["id"] for each in listed(service, collection)] == ["twice"]


def test_streamed_answers_and_those_of_the_openai_route_are_recorded_too(service: Service) -> None:
    streamed = service.post("/v1/answers", {**ASK, "stream": True}, headers={"X-Request-ID": "streamed"})
    assert get(service, "/streamed")["answer"] in streamed.text
    chat = {"model": "tiny", "messages": [{"role": "user", "content": ASK["question"]}]}
    completion = service.post("/v1/chat/completions", chat, headers={"X-Request-ID": "chat"}).json()
    assert get(service, "/chat")["answer"] == completion["choices"][0]["message"]["content"]


def test_a_refused_question_is_not_recorded(service: Service) -> None:
    service.post("/v1/answers", {**ASK, "method": "guess"}, headers={"X-Request-ID": "refused"})
    for path in ("/refused", "/refused/map", "/nothing", "/nothing/map"):
        assert get(service, path, 404)["code"] == "not_found"


def test_the_map_shows_which_blocks_were_read_and_their_text(service: Service, collection: str) -> None:
    id, answer = ask(service, collection, question="Who built the mill of Orm?", method="scout")
    read = get(service, f"/{id}/map")
    (chunk,) = read["chunks"]
    (reported,) = answer["report"]["chunks"]
    assert (read["block"], len(chunk["states"])) == (16, read["layers"])
    assert (chunk["chunk_id"], chunk["citation"], chunk["tokens"]) == (reported["chunk_id"], 1, reported["tokens"])
    for b, share in enumerate(reported["kept"]):
        assert share == sum(layer[b] in "kr" for layer in chunk["states"]) / read["layers"]
    document = service.client.get(f"/v1/documents/mill?collection={collection}&text=true").json()
    assert "".join(chunk["texts"]) == f"Document: mill\n{document['text']}\n"
    assert len(chunk["texts"]) == reported["blocks"] > 2
    assert "\ufffd" not in "".join(chunk["texts"])
    held = "".join(chunk["texts"][b] for b in chunk["holds_answer"])
    assert answer["answer"]
    assert answer["answer"].lower() in held.lower()


def test_the_map_shows_recomputed_shares_only_where_there_are_any(service: Service) -> None:
    id, _ = ask(service, method="full", top_k=2)
    for chunk in get(service, f"/{id}/map")["chunks"]:
        assert chunk["recomputed"] == [[1.0] * len(chunk["texts"])] * len(chunk["states"])
    id, _ = ask(service, method="reuse", top_k=2)
    assert all("recomputed" not in chunk for chunk in get(service, f"/{id}/map")["chunks"])


def test_citations_are_numbered_and_chunks_of_earlier_turns_have_no_number(service: Service) -> None:
    ask(service, conversation_id="numbers", question="What colour is the bridge of Mell?", top_k=1)
    id, answer = ask(service, conversation_id="numbers", top_k=1)
    chunks = get(service, f"/{id}/map")["chunks"]
    assert [cited["document_id"] for cited in answer["citations"]] == ["harbour"]
    assert [(chunk["document_id"], chunk["citation"]) for chunk in chunks] == [("bridge", None), ("harbour", 1)]


@pytest.mark.parametrize(
    ("texts", "answer", "held"),
    [
        (["built by Ada", " Brook in", " 1889."], "Ada Brook", [0, 1]),
        (["built by Ada", " Brook in", " 1889."], "ada  brook.", [0, 1]),
        (["in 1889, not 18", "89", " or 188"], "1889", [0, 1]),
        (["in 18890 or 188", "9x"], "1889", []),
        (["a (b) c*", ""], "(b)", [0]),
        (["anything"], "", []),
        (["anything"], " . ", []),
        ([], "Ada", []),
    ],
)
def test_blocks_that_contain_words_of_the_answer_are_found(texts: list[str], answer: str, held: list[int]) -> None:
    assert blocks_with_answer(texts, answer) == held


def test_an_answer_is_removed_when_its_document_is_replaced(service: Service, collection: str) -> None:
    id, _ = ask(service, collection, question="Who built the mill?")
    put(service, collection, "mill", "The mill of Orm is a museum.")
    get(service, f"/{id}", 404)
    get(service, f"/{id}/map", 404)
    assert listed(service, collection) == []


def test_an_answer_is_removed_with_a_document_it_was_read_from(service: Service, collection: str) -> None:
    put(service, collection, "quay", "The quay of Orm was paved by Sten Berg.")
    both, _ = ask(service, collection, question="Who paved the quay?", top_k=2)
    mill, _ = ask(service, collection, question="Who built the mill of Orm?", top_k=1)
    service.client.delete(f"/v1/documents/quay?collection={collection}")
    assert service.engine_thread.history.find("", both) is None, "it is removed at once, not at the next look"
    get(service, f"/{both}", 404)
    get(service, f"/{both}/map", 404)
    assert [each["id"] for each in listed(service, collection)] == [mill]
    assert b"Sten" not in json.dumps(listed(service, collection)).encode()


def test_answers_are_removed_with_their_collection_and_their_conversation(service: Service, collection: str) -> None:
    alone, _ = ask(service, collection)
    in_conversation, _ = ask(service, collection, conversation_id="mills")
    service.client.delete(f"/v1/conversations/mills?collection={collection}")
    assert [each["id"] for each in listed(service, collection)] == [alone]
    get(service, f"/{in_conversation}", 404)
    service.client.delete(f"/v1/collections/{collection}")
    assert service.engine_thread.history.find("", alone) is None
    assert listed(service, collection) == []
    get(service, f"/{alone}", 404)


@pytest.mark.parametrize("again", [False, True])
def test_what_another_process_removed_is_not_shown(service: Service, collection: str, again: bool) -> None:
    id, _ = ask(service, collection)
    catalog = Catalog.open(service.app.state.settings.data / "catalog.sqlite")
    unwanted = catalog.remove(collection, "mill")
    catalog.close()
    service.engine_thread.submit(lambda engine: engine.evict(unwanted)).result(30)
    if again:  # a new document of the same name is not the one that was removed
        put(service, collection, "mill", "The mill of Orm is a museum.")
    assert listed(service, collection) == []
    get(service, f"/{id}", 404)
    assert service.engine_thread.history.find("", id) is None


def test_an_answer_whose_document_is_removed_while_it_is_decoded_is_neither_returned_nor_shown(
    service: Service, collection: str
) -> None:
    put(service, collection, "quay", "The quay of Orm was paved by Sten Berg.")
    removed = list[str]()

    def remove(*prefilled: object) -> None:
        if not removed:
            service.engine_thread.catalog_service.remove(collection, "mill")
            removed.append("mill")

    options = AskOptions(collection=collection)
    with on_prefill(service.engine_thread, remove), working_for(RequestContext("late")):
        answer = service.engine_thread.ask("Who built the mill of Orm?", options).result(30)
    assert {chunk.document_id for chunk in answer.report.chunks} == {"quay"}
    assert get(service, "/late")["answer"] == answer.answer
    assert [each["id"] for each in listed(service, collection)] == ["late"]


def test_an_answer_is_returned_although_its_map_cannot_be_made(
    service: Service, collection: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(state: Request) -> KVMap:
        raise ZeroDivisionError

    engine = service.engine_thread.submit(lambda engine: engine).result(30)
    with monkeypatch.context() as broken:
        broken.setattr(engine, "map", fail)
        id, _ = ask(service, collection)
    get(service, f"/{id}", 404)
    assert "its map cannot be made" in caplog.text
    get(service, f"/{ask(service, collection)[0]}")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, httpx.Client]]]:
    """A service of two tenants, which keeps three answers."""
    made = {name: make_key(name) for name in ("acme", "zeta")}
    pairs = ", ".join(pair for _, pair in made.values())
    with serving(settings(tmp_path_factory.mktemp("shared"), api_keys=pairs, history=3)) as service:
        clients = {
            name: httpx.Client(base_url=service.url, timeout=60, headers={"X-API-Key": key})
            for name, (key, _) in made.items()
        }
        for client in clients.values():
            assert client.post("/v1/documents?wait=true", json=HARBOUR).status_code == 200
        yield service, clients
        for client in clients.values():
            client.close()


def test_a_tenant_sees_its_own_answers_only(shared: tuple[Service, dict[str, httpx.Client]]) -> None:
    _, clients = shared
    for name, client in clients.items():
        for id in (f"of-{name}", "of-both")[: 1 if name == "zeta" else 2]:
            asked = {**ASK, "question": f"Who built the harbour, {name}?"}
            assert client.post("/v1/answers", json=asked, headers={"X-Request-ID": id}).status_code == 200
    acme, zeta = clients["acme"], clients["zeta"]
    assert [each["id"] for each in acme.get("/v1/answers").json()["answers"]] == ["of-both", "of-acme"]
    assert [each["id"] for each in zeta.get("/v1/answers").json()["answers"]] == ["of-zeta"]
    assert acme.get("/v1/answers/of-acme").json()["collection"] == "default"
    assert acme.get("/v1/answers/of-acme/map").json()["chunks"][0]["texts"]
    for path in ("of-acme", "of-acme/map", "of-both"):
        refused = zeta.get(f"/v1/answers/{path}")
        assert (refused.status_code, refused.json()["code"]) == (404, "not_found")
    zeta.delete("/v1/documents/harbour")
    assert zeta.get("/v1/answers").json()["answers"] == []
    assert len(acme.get("/v1/answers").json()["answers"]) == 2, "the same name, another tenant's document"


def test_a_service_may_keep_no_answers(tmp_path: Path) -> None:
    with serving(settings(tmp_path, history=0)) as service:
        assert service.post("/v1/documents?wait=true", HARBOUR).status_code == 200
        id, _ = ask(service)
        assert get(service, "")["answers"] == []
        get(service, f"/{id}", 404)


def test_the_estimate_of_full_recompute_is_summed_and_shown(service: Service) -> None:
    before = service.engine_thread.metrics.sums
    ids = [ask(service, method=method)[0] for method in ("full", "scout")]
    shown = {each["id"]: each["full_ms"] for each in get(service, "", limit=5)["answers"]}
    assert all(shown[id] > 0 for id in ids)
    after = service.engine_thread.metrics.sums.since(before)
    assert after.full_seconds == pytest.approx(sum(shown[id] for id in ids) / 1000)


def test_answers_are_as_the_schema_says(service: Service) -> None:
    schema = service.client.get("/openapi.json").json()
    id, _ = ask(service, method="scout")
    for path, route in (("", ""), (f"/{id}", "/{answer_id}"), (f"/{id}/map", "/{answer_id}/map")):
        operation = schema["paths"][f"/v1/answers{route}"]["get"]
        described = operation["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(get(service, path), {**schema, **described})
        assert operation["description"]
    for name in ("AnswerSummaryOut", "ChunkMapOut"):
        model = schema["components"]["schemas"][name]
        for example in model["examples"]:
            jsonschema.validate(example, {**schema, **model})


CHUNKS, BLOCKS, LAYERS = 2, 16, 16


def recorded(number: int, tenant: str = "", id: str = "") -> RecordedAnswer:
    """Make an answer of ordinary size that shares no part with another one."""
    chunks = tuple(
        ChunkKVMap(i, f"d{number}#{i}", f"d{number}", "T", 16 * BLOCKS, 16, array("B", [KEPT] * BLOCKS * LAYERS))
        for i in range(CHUNKS)
    )
    reports = tuple(
        ChunkReport(c.chunk_id, c.document_id, c.title, c.tokens, BLOCKS, tuple([b / 7 for b in range(BLOCKS)]), 0.0)
        for c in chunks
    )
    report = Report(
        method="scout",
        prefill="dense",
        decode="dense",
        model="tiny",
        tokens=TokenCounts(1536, 300.0, 200.0, 20, 8, 0.0, 220.0),
        ratios=Ratios(0.2, 0.1, 0.3, 1.0),
        cache=CacheReport(CHUNKS, TierHits(0, 0, CHUNKS), 0, ()),
        bytes=ByteCounts(1, 1, 1),
        prefilling=PrefillReport(None, None, "dense was asked for"),
        decoding=DecodeReport(8, 1.0, 1.0, 0, "stop", "dense was asked for"),
        timings_ms=Timings(*[1.0] * 9),
        chunks=reports,
    )
    cited = tuple(Citation(c.document_id, c.chunk_id, c.title, 0.1) for c in chunks)
    answer = Answer(f"question {number} " * 4, f"answer {number}", cited, report)
    return RecordedAnswer(id or f"id-{number}", tenant, "default", "", answer, KVMap(16, LAYERS, chunks), 1.0)


def test_memory_is_bounded_however_many_answers_there_were() -> None:
    history = AnswerHistory(200)
    tracemalloc.start()
    try:
        for number in range(400):
            history.record(recorded(number))
        gc.collect()  # of the services that run beside this test
        full = tracemalloc.get_traced_memory()[0]
        for number in range(400, 2_400):
            history.record(recorded(number))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 1.1 * full
    finally:
        tracemalloc.stop()
    assert full < 200 * 16_384
    assert [each.id for each in history.page("", 1000)] == [f"id-{n}" for n in range(2_399, 2_199, -1)]


def test_recording_and_reading_the_history_is_cheap() -> None:
    history = AnswerHistory(10_000)
    made = [recorded(number, tenant=f"t{number % 7}") for number in range(2000)]
    many = [dataclasses.replace(each, id=f"{each.id}-{n}") for n in range(5) for each in made]
    began = time.thread_time()
    for each in many:
        history.record(each)
    assert (time.thread_time() - began) / len(many) < 0.001
    began = time.thread_time()
    for n in range(100):
        history.page(f"t{n % 7}", 20)
        history.find("t3", "id-1999-4")
    assert (time.thread_time() - began) / 100 < 0.005


def test_answers_of_several_threads_are_all_recorded_at_different_times() -> None:
    history = AnswerHistory(1000)

    def record(start: int) -> None:
        for number in range(start, start + 100):
            history.record(recorded(number))
            history.page("", 5)
            history.remove(lambda each: each.id == "nobody")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(record, range(0, 800, 100)))
    found = history.page("", 1000)
    assert len(found) == 800
    assert [each.when for each in found] == sorted({each.when for each in found}, reverse=True)


def test_a_rating_is_kept_with_its_answer_until_the_answer_goes() -> None:
    history = AnswerHistory(2)
    for number in range(2):
        history.record(recorded(number))
    rated = history.rate("", "id-0", "down")
    assert rated is not None
    assert [(each.id, each.rating) for each in history.page("", 5)] == [("id-1", ""), ("id-0", "down")]
    assert history.rate("other", "id-0", "up") is None
    history.record(recorded(2))
    assert history.rate("", "id-0", "up") is None


def test_a_page_of_wanted_answers_is_full_although_others_lie_between() -> None:
    history = AnswerHistory(100)
    for number in range(20):
        history.record(recorded(number))
    found = history.page("", 3, which=lambda each: int(each.id.removeprefix("id-")) % 5 == 0)
    assert [each.id for each in found] == ["id-15", "id-10", "id-5"]


def test_an_answer_of_the_api_says_so_and_one_of_the_page_too(service: Service, collection: str) -> None:
    asked = {**ASK, "collection": collection}
    assert service.client.post("/v1/answers", json=asked, headers={"X-Request-ID": "by-api"}).status_code == 200
    with working_for(RequestContext("by-page", origin="page")):
        service.engine_thread.ask(ASK["question"], AskOptions(collection)).result(60)
    found = {each["id"]: each for each in service.client.get("/v1/answers").json()["answers"]}
    assert (found["by-api"]["origin"], found["by-page"]["origin"]) == ("api", "page")
    assert found["by-api"]["rating"] == ""


def test_a_rehearsed_question_is_in_no_history_and_no_metrics(service: Service, collection: str) -> None:
    before, known = service.engine_thread.metrics.sums.answered, service.client.get("/v1/answers").json()
    with working_for(RequestContext("rehearsed")):
        answer = service.engine_thread.ask(ASK["question"], AskOptions(collection), rehearsed=True).result(60)
    assert answer.answer
    assert service.engine_thread.metrics.sums.answered == before
    assert service.client.get("/v1/answers").json() == known
