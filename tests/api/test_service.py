"""The service answers valid requests as its contract says."""

from __future__ import annotations

import dataclasses
import resource
import threading
import time
from typing import Any

from ragkv.passages import Citation
from ragkv.report import Answer, ByteCounts, CacheReport, ChunkReport, Ratios, Report, TierHits, Timings, TokenCounts
from tests.api.conftest import BRIDGE, Service

PROBLEM = "application/problem+json"


def names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def ask(service: Service, question: str, **more: Any) -> Any:
    return service.post("/v1/answers", {"question": question, **more})


def test_a_document_is_cited_once_its_job_is_done(service: Service) -> None:
    document = {"id": "ferry", "text": "The ferry to Ostrey is called the Grey Heron.", "collection": "ferries"}
    accepted = service.post("/v1/documents", document)
    job_id = accepted.json()["job_id"]
    job = service.job(job_id)
    answered = ask(service, "What is the ferry to Ostrey called?", collection="ferries")
    assert (accepted.status_code, accepted.headers["location"]) == (202, f"/v1/jobs/{job_id}")
    assert (job["status"], job["documents"][0]["id"]) == ("completed", "ferry")
    assert [citation["document_id"] for citation in answered.json()["citations"]] == ["ferry"]


def test_an_answer_holds_exactly_the_report_contract(service: Service) -> None:
    answer = ask(service, "Who built the harbour of Tarn?").json()
    report = answer["report"]
    assert set(answer) == names(Answer)
    assert set(report) == names(Report)
    parts = {"tokens": TokenCounts, "ratios": Ratios, "cache": CacheReport, "bytes": ByteCounts, "timings_ms": Timings}
    for name, kind in parts.items():
        assert set(report[name]) == names(kind), name
    assert set(report["cache"]["hits"]) == names(TierHits)
    assert all(set(citation) == names(Citation) for citation in answer["citations"])
    assert all(set(chunk) == names(ChunkReport) for chunk in report["chunks"])
    assert {citation["document_id"] for citation in answer["citations"]} == {"harbour", "bridge"}
    assert report["ratios"]["cache_hit"] == 1.0
    assert 0 < report["timings_ms"]["ttft"] <= report["timings_ms"]["total"]


def test_request_options_reach_the_engine(service: Service) -> None:
    report = ask(service, "Who built the harbour?", method="full", top_k=1, max_tokens=2).json()["report"]
    assert (report["method"], len(report["chunks"])) == ("full", 1)
    assert report["tokens"]["generated"] <= 2
    linked = ask(service, "Who built the harbour?", method="epic:link=3").json()["report"]
    assert linked["method"] == "epic:link=3"
    assert linked["tokens"]["recomputed"] == 3 * (len(linked["chunks"]) - 1)


def test_questions_of_one_conversation_follow_one_another(service: Service) -> None:
    path, questions = "/v1/conversations/harbour%2Ftalk", ["Who built the harbour?", "And what was painted?"]
    assert service.client.get(path).status_code == 404
    answers = [ask(service, q, conversation_id="harbour/talk", top_k=1).json() for q in questions]
    assert [answer["report"]["tokens"]["history"] > 0 for answer in answers] == [False, True]
    assert [len(answer["report"]["chunks"]) for answer in answers] == [1, 2]
    found = service.client.get(path).json()
    assert (found["conversation_id"], found["collection"]) == ("harbour/talk", "default")
    assert [(turn["question"], turn["answer"]) for turn in found["turns"]] == [
        (answer["question"], answer["answer"]) for answer in answers
    ]
    assert [turn["chunks"] for turn in found["turns"]] == [["harbour#0"], ["bridge#0"]]
    assert service.client.get(path, params={"collection": "other"}).json()["code"] == "not_found"
    assert service.client.delete(path).status_code == 204
    assert service.client.delete(path).status_code == service.client.get(path).status_code == 404
    assert service.client.get("/v1/conversations/%20").status_code == 422


def test_wait_returns_the_finished_job(service: Service) -> None:
    done = service.post("/v1/documents?wait=true", BRIDGE)
    assert done.status_code == 200
    assert done.json() == service.client.get(f"/v1/jobs/{done.json()['id']}").json()


def test_a_named_policy_is_reported_with_what_it_read(service: Service) -> None:
    assert service.post("/v1/documents?wait=true", {**BRIDGE, "collection": "stages"}).status_code == 200
    asked = {"collection": "stages", "method": "reuse", "max_tokens": 4}
    named = {"prefill": "critiprefill:segment=16,block=8,budget=8,skip=0", "decode": "topk:count=1,block=8"}
    report = ask(service, "Who painted the bridge of Mell?", **asked, **named).json()["report"]
    assert (report["prefill"], report["decode"]) == ("critiprefill", "topk")
    assert 0 < report["prefilling"]["pairs_read"] < report["prefilling"]["pairs_dense"]
    assert report["decoding"]["read"] < report["decoding"]["present"]
    plain = ask(service, "Who painted the bridge of Mell?", **asked).json()["report"]
    assert plain["prefilling"]["pairs_read"] is plain["prefilling"]["pairs_dense"] is None
    assert plain["prefilling"]["why_dense"].startswith("auto: ")
    assert plain["decoding"]["why_dense"].startswith("auto: ")
    shapes = service.client.get("/openapi.json").json()["components"]["schemas"]
    assert {"pairs_read", "pairs_dense", "why_dense"} == set(shapes["PrefillReport"]["properties"])
    assert "why_dense" in shapes["DecodeReport"]["properties"]


def test_an_empty_document_fails_alone(service: Service) -> None:
    documents = [{"id": "blank", "text": " \n\t "}, {"id": "full", "text": "Something is written here."}]
    given = [{**document, "collection": "mixed"} for document in documents]
    job = service.post("/v1/documents?wait=true", {"documents": given}).json()
    assert [(document["id"], document["error"]["code"]) for document in job["documents"]] == [
        ("blank", "invalid_document")
    ], "those that failed are named"
    assert (job["status"], job["counts"]["completed"], job["counts"]["failed"]) == ("completed", 1, 1)
    assert job["last_error"] == job["documents"][0]["error"]
    assert [document["status"] for document in service.job(job["id"])["documents"]] == ["failed", "completed"]


def test_a_full_disk_is_507_and_the_service_recovers(service: Service) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        refused = service.post("/v1/documents", {**BRIDGE, "collection": "full"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (refused.status_code, refused.headers["content-type"]) == (507, PROBLEM)
    assert service.client.get("/healthz").json()["status"] == "ok"
    assert service.post("/v1/documents?wait=true", {**BRIDGE, "collection": "full"}).json()["status"] == "completed"


def test_a_job_of_two_collections_is_refused(service: Service) -> None:
    refused = service.post("/v1/documents", {"documents": [BRIDGE, {**BRIDGE, "collection": "other"}]})
    assert (refused.status_code, refused.headers["content-type"]) == (422, PROBLEM)


def test_an_unknown_job_and_an_empty_collection_are_not_found(service: Service) -> None:
    for missing in (service.client.get("/v1/jobs/none"), ask(service, "Who?", collection="nothing-here")):
        assert (missing.status_code, missing.headers["content-type"]) == (404, PROBLEM)
        assert missing.json()["code"] == "not_found"


def test_health_answers_at_once_while_the_engine_is_busy(service: Service) -> None:
    release = threading.Event()
    held = service.engine_thread.submit(lambda engine: release.wait(30))
    try:
        healthy = service.client.get("/healthz", timeout=5)
    finally:
        release.set()
    assert held.result(30)
    assert (healthy.status_code, healthy.json()["status"]) == (200, "ok")


def test_a_full_queue_is_a_429_with_retry_after(service: Service) -> None:
    release = threading.Event()
    waiting = [service.engine_thread.submit(lambda engine: release.wait(30))]
    try:
        while service.engine_thread.health()["waiting"]:
            time.sleep(0.01)  # until the engine holds the first one
        waiting += [
            service.engine_thread.submit(lambda engine: True) for _ in range(service.engine_thread.health()["queue"])
        ]
        refused = ask(service, "Who built the harbour of Tarn?")
    finally:
        release.set()
    assert all(future.result(30) for future in waiting)
    assert (refused.status_code, refused.headers["content-type"]) == (429, PROBLEM)
    assert int(refused.headers["retry-after"]) >= 1
    assert ask(service, "Who built the harbour of Tarn?").status_code == 200


def test_a_question_is_answered_while_a_long_document_is_ingested(service: Service) -> None:
    text = "\n\n".join(
        f"Paragraph {n} tells of the {n} gulls that sat on the wall of Tarn that day." for n in range(50)
    )
    job_id = service.post("/v1/documents", {"id": "gulls", "text": text, "collection": "long"}).json()["job_id"]
    while service.client.get(f"/v1/jobs/{job_id}").json()["stage"] != "encode":
        time.sleep(0.01)
    answered = ask(service, "Who built the harbour of Tarn?", max_tokens=1)
    assert answered.status_code == 200
    assert service.client.get(f"/v1/jobs/{job_id}").json()["finished"] is None
    assert service.job(job_id)["status"] == "completed"


def test_the_schema_describes_the_routes_and_no_page_loads_scripts(service: Service) -> None:
    schema = service.client.get("/openapi.json").json()
    conversations = "/v1/conversations/{conversation_id}"
    assert set(schema["paths"]) >= {
        *("/v1/documents", "/v1/jobs/{job_id}", "/v1/answers", conversations),
        *("/v1/chat/completions", "/v1/models", "/v1/models/{model_id}", "/healthz", "/readyz"),
    }
    assert "<script" not in service.client.get("/docs").text
    assert service.client.get("/redoc").status_code == 404
    for path in ("/v1/answers", "/v1/chat/completions"):
        responses = schema["paths"][path]["post"]["responses"]
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        assert responses["200"]["content"]["text/event-stream"]["example"]
        assert {"401", "404", "429", "503", "504"} <= set(responses)
    assert "422" not in schema["paths"]["/v1/chat/completions"]["post"]["responses"]
