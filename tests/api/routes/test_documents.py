"""Documents over HTTP: put, list, show and delete, with any printable id."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.api.conftest import LIMIT, Service
from tests.api.test_bad_input import check_problem
from tests.api.test_faults import ask, held, retrieved, stored, tale

SAYS = {"text": "The lamp of Tarn is kept by Ada Brook.", "title": "Lamp", "metadata": {"year": 1889}}
LATER = {"text": "The lamp of Tarn is kept by Otto Lindqvist.", "title": "Lamp", "metadata": {"year": 1931}}


def at(document_id: str) -> str:
    return f"/v1/documents/{quote(document_id, safe='').replace('.', '%2E')}"  # clients shorten paths with dots


def put(service: Service, document_id: str, says: Any, collection: str, **more: Any) -> httpx.Response:
    return service.client.put(at(document_id), json=says, params={"collection": collection, **more})


def get(service: Service, document_id: str, collection: str, **more: Any) -> httpx.Response:
    return service.client.get(at(document_id), params={"collection": collection, **more})


def delete(service: Service, document_id: str, collection: str) -> httpx.Response:
    return service.client.delete(at(document_id), params={"collection": collection})


def test_an_id_that_looks_the_same_names_the_same_document(service: Service) -> None:
    put(service, "Cafe\u0301 no\xadtes", SAYS, "forms", wait=True)
    for form in ("Caf\xe9 notes", "Cafe\u0301 notes", "Ca\u200bf\xe9 notes"):
        assert get(service, form, "forms").json()["id"] == "Caf\xe9 notes"
    body = {"query": "lamp", "collection": "forms", "documents": ["Cafe\u0301 notes"]}
    assert len(service.client.post("/v1/search", json=body).json()["passages"]) == 1
    assert delete(service, "Cafe\u0301 notes", "forms").status_code == 204


def test_what_nobody_sees_is_not_in_a_text_that_is_sent(service: Service) -> None:
    says = {"text": "The keeper is Ma\u200bthil\xadde. The \ufb01re exit.", "title": "Ru\xadles"}
    put(service, "hidden", says, "forms", wait=True)
    found = get(service, "hidden", "forms", text=True).json()
    assert (found["title"], found["text"]) == ("Rules", "The keeper is Mathilde. The \ufb01re exit.")
    assert put(service, "hidden", says, "forms").status_code == 200, "it is there already"
    assert delete(service, "hidden", "forms").status_code == 204


def test_prose_that_was_wrapped_is_one_line_whose_offsets_are_those_of_the_sender(service: Service) -> None:
    wrapped = (
        "The lamp of Tarn was built by the famous engineer Ada Maria\nBrook of Lindmouth in the year 1889. It has "
        "served the town and\nits harbour for more than a hundred years.\n\n- one\n- two"
    )
    shown = wrapped.replace("Maria\nBrook", "Maria Brook").replace("and\nits", "and its")
    params = {"collection": "wraps", "wait": "true"}
    service.client.post("/v1/documents", json={"id": "posted", "text": wrapped}, params=params)
    put(service, "put", {"text": wrapped}, "wraps", wait=True)
    for document_id in ("posted", "put"):
        assert get(service, document_id, "wraps", text=True).json()["text"] == shown
        chunk = service.client.get(f"{at(document_id)}/chunks", params={"collection": "wraps"}).json()["chunks"][0]
        assert shown[chunk["start"] : chunk["end"]] == chunk["text"]
    assert put(service, "put", {"text": wrapped}, "wraps").status_code == 200, "it is there already"
    for document_id in ("posted", "put"):
        delete(service, document_id, "wraps")


def clean(service: Service) -> bool:
    """Wait until the keys of the chunks and of the store agree; return whether they do."""
    until = time.monotonic() + 20
    while (found := stored(service))[0] != found[1] and time.monotonic() < until:
        time.sleep(0.05)
    return found[0] == found[1]


# Put


def test_putting_unchanged_content_does_nothing(service: Service) -> None:
    accepted = put(service, "lamp", SAYS, "put")
    assert (accepted.status_code, list(accepted.json())) == (202, ["job_id"])
    assert accepted.headers["location"] == f"/v1/jobs/{accepted.json()['job_id']}"
    assert service.job(accepted.json()["job_id"])["status"] == "completed"
    latest = service.client.get("/v1/jobs?limit=1").json()
    encoded: list[object] = []

    def count(engine: Any) -> None:
        engine.model.forward = lambda passes: encoded.append(passes) or type(engine.model).forward(engine.model, passes)

    service.engine_thread.submit(count).result(30)
    try:
        again = [put(service, "lamp", SAYS, "put", wait=wait) for wait in (False, True)]
    finally:
        service.engine_thread.submit(lambda engine: engine.model.__dict__.pop("forward")).result(30)
    assert [each.status_code for each in again] == [200, 200]
    assert again[0].json() == again[1].json() == get(service, "lamp", "put").json()
    assert service.client.get("/v1/jobs?limit=1").json() == latest, "no job was made"
    assert encoded == [], "the model did nothing"


def test_a_document_shows_its_size_hash_and_times(service: Service) -> None:
    shown = put(service, "known", SAYS, "put", wait=True).json()
    size = service.engine_thread.catalog_service.kv.token_bytes
    assert {name: shown[name] for name in ("id", "collection", "title", "metadata", "chunks", "bytes")} == {
        "id": "known", "collection": "put", "title": "Lamp", "metadata": {"year": 1889}, "chunks": 1, "bytes": 38,
    }  # fmt: skip
    assert shown["kv_bytes"] == shown["tokens"] * size > 0
    assert (len(shown["hash"]), shown["created"] == shown["updated"]) == (64, True)
    assert "text" not in shown
    assert get(service, "known", "put", text=True).json() == {**shown, "text": SAYS["text"]}


def test_new_content_replaces_the_old_one_when_it_is_ingested(service: Service) -> None:
    first = put(service, "lamp", SAYS, "swapped", wait=True).json()
    with held(service):
        accepted = put(service, "lamp", LATER, "swapped")
        assert (accepted.status_code, get(service, "lamp", "swapped").json()) == (202, first)
    assert service.job(accepted.json()["job_id"])["counts"]["completed"] == 1
    second = get(service, "lamp", "swapped").json()
    assert (second["metadata"], second["created"]) == ({"year": 1931}, first["created"])
    assert second["hash"] != first["hash"]
    assert second["updated"] > first["updated"]
    assert ask(service, "swapped").json()["answer"] == "Otto Lindqvist"
    assert clean(service)


def test_the_version_put_last_stays(service: Service) -> None:
    put(service, "lamp", SAYS, "last", wait=True)
    with held(service):
        newer = put(service, "lamp", LATER, "last")
        back = put(service, "lamp", SAYS, "last")  # what is there, but not what would be
        assert [newer.status_code, back.status_code] == [202, 202]
    service.job(back.json()["job_id"])
    assert get(service, "lamp", "last", text=True).json()["text"] == SAYS["text"]


@pytest.mark.parametrize(
    ("says", "status", "code"),
    [
        ({"text": " \n"}, 422, "invalid_document"),
        ({"text": "a\0b"}, 422, "invalid_document"),
        ({"text": "x" * (LIMIT + 1)}, 413, "too_large"),
        ({"text": "x", "id": "y"}, 422, "invalid_request"),
        ({"text": "x", "metadata": {"a": "x" * 20_000}}, 422, "invalid_request"),
        ({}, 422, "invalid_request"),
    ],
)
def test_an_invalid_document_is_refused_at_once(service: Service, says: Any, status: int, code: str) -> None:
    latest = service.client.get("/v1/jobs?limit=1").json()
    assert check_problem(put(service, "bad", says, "put"), status)["code"] == code
    assert service.client.get("/v1/jobs?limit=1").json() == latest


def test_waiting_for_a_deleted_document_is_a_conflict(service: Service) -> None:
    with ThreadPoolExecutor(1) as pool, held(service):
        waiting = pool.submit(put, service, "lamp", SAYS, "conflict", wait=True)
        until = time.monotonic() + 20
        while delete(service, "lamp", "conflict").status_code != 204:
            assert time.monotonic() < until
        assert check_problem(waiting.result(30), 409)["code"] == "cancelled"


# Waiting for the outcome


def test_waiting_for_the_only_document_returns_its_error(service: Service) -> None:
    blank = {"id": "blank", "text": " ", "collection": "outcome"}
    problem = check_problem(service.post("/v1/documents?wait=true", blank), 422)
    assert problem["code"] == "invalid_document"
    assert service.job(problem["job_id"])["status"] == "failed"
    form = {"files": ("blank.txt", b" ")}
    uploaded = service.client.post("/v1/documents?wait=true&collection=outcome", files=form)
    assert check_problem(uploaded, 422)["code"] == "invalid_document"


def test_waiting_for_several_documents_tells_of_each_that_failed(service: Service) -> None:
    documents = [{"id": name, "text": text, "collection": "outcome"} for name, text in (("ok", "A lamp."), ("no", " "))]
    some = service.post("/v1/documents?wait=true", {"documents": documents})
    assert (some.status_code, some.json()["status"]) == (207, "completed")
    (failed,) = some.json()["documents"]
    assert (failed["id"], failed["error"]["code"]) == ("no", "invalid_document")
    none = service.post("/v1/documents?wait=true", {"documents": [{**documents[1], "id": name} for name in "ab"]})
    assert (none.status_code, none.json()["status"]) == (207, "failed")
    assert service.post("/v1/documents?wait=true", {"documents": documents[:1]}).status_code == 200


# The collection as a parameter


def test_posted_documents_go_into_the_collection_of_the_parameter(service: Service) -> None:
    lamp = {"id": "lost", "text": SAYS["text"]}
    answer = service.post("/v1/documents?collection=lost&wait=true", {"documents": [lamp]})
    assert answer.json()["collection"] == "lost"
    form = {"files": ("lost.txt", SAYS["text"].encode())}
    answer = service.client.post("/v1/documents?collection=lost&wait=true", files=form)
    assert answer.json()["collection"] == "lost"
    assert [get(service, name, "lost").status_code for name in ("lost", "lost.txt")] == [200, 200]
    assert [get(service, name, "default").status_code for name in ("lost", "lost.txt")] == [404, 404]


def test_a_document_may_name_the_collection_of_the_parameter_and_no_other(service: Service) -> None:
    lamp = {"id": "twice", "text": SAYS["text"], "collection": "named"}
    assert service.post("/v1/documents?collection=named&wait=true", lamp).json()["collection"] == "named"
    refused = [
        service.post("/v1/documents?collection=lost", lamp),
        service.client.post(
            "/v1/documents?collection=lost", files={"files": ("a.txt", b"a")}, data={"collection": "named"}
        ),
    ]
    for each in refused:
        assert "'lost'" in check_problem(each, 422)["detail"]


# Names

NAMES = ["a/b/c", "ends/text", "über müde", "日本語", "50% #1?x=y&z", "..", ".", "../../etc/passwd", "a//b", "/", "+ +"]


@pytest.mark.parametrize("name", [*NAMES, "x" * 512])
def test_any_printable_name_is_an_id(service: Service, name: str) -> None:
    assert put(service, name, SAYS, "names", wait=True).json()["id"] == name
    assert get(service, name, "names").json()["id"] == name
    assert [d["id"] for d in service.client.get("/v1/documents?collection=names").json()["documents"]] == [name]
    assert delete(service, name, "names").status_code == 204
    assert check_problem(get(service, name, "names"), 404)["code"] == "not_found"


@pytest.mark.parametrize("name", [" ", "a\nb", "a\0b", "x" * 513])
def test_names_that_are_not_printable_are_refused(service: Service, name: str) -> None:
    for response in (put(service, name, SAYS, "names"), get(service, name, "names"), delete(service, name, "names")):
        check_problem(response, 404 if "\n" in name else 422)  # a path is one line


# Listed


def test_pages_show_every_document_once_in_order(service: Service) -> None:
    given = [{"id": f"d/{n}", "text": f"Boat {n}.", "metadata": {"n": n, "odd": bool(n % 2)}} for n in range(7)]
    service.post("/v1/documents?wait=true", {"documents": [{**each, "collection": "pages"} for each in given]})
    for limit in (1, 3, 7, 100):
        seen, after = [], ""
        while after is not None:
            page = service.client.get(
                "/v1/documents", params={"collection": "pages", "limit": limit, "after": after}
            ).json()
            assert len(page["documents"]) <= limit
            seen += [document["id"] for document in page["documents"]]
            after = page["after"]
        assert seen == [each["id"] for each in given], limit
    found = service.client.get(
        "/v1/documents", params={"collection": "pages", "filter": '{"odd": true, "n": [1, 2, 5]}'}
    )
    assert [document["metadata"]["n"] for document in found.json()["documents"]] == [1, 5]
    assert service.client.get("/v1/documents?collection=nothing").json() == {"documents": [], "after": None}


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "limit=x",
        "collection=",
        "filter=x",
        "filter=[]",
        'filter={"a":{}}',
        'filter={"a":[]}',
        'filter={"a":"\\ud800"}',
        'filter={"a":NaN}',
        f"after={'x' * 513}",
    ],
)
def test_invalid_list_parameters_are_refused(service: Service, query: str) -> None:
    check_problem(service.client.get(f"/v1/documents?{query}"), 422)


# Deleted


def test_deleting_does_not_wait_for_the_engine(service: Service) -> None:
    put(service, "there", SAYS, "busy", wait=True)
    failed = service.post("/v1/documents?wait=true", {"id": "failed", "text": " ", "collection": "busy"}).json()
    with held(service):
        waiting = put(service, "waits", SAYS, "busy").json()["job_id"]
        while service.engine_thread.health()["waiting"]:
            pass
        crowd = [service.engine_thread.submit(lambda engine: True) for _ in range(32)]  # the line is full
        began = time.monotonic()
        answers = [delete(service, name, "busy").status_code for name in ("there", "failed", "waits", "waits", "never")]
        assert time.monotonic() - began < 5
        assert check_problem(get(service, "there", "busy"), 404)
    assert answers == [204, 204, 204, 404, 404]
    assert all(each.result(30) for each in crowd)
    assert service.job(waiting)["status"] == "cancelled"
    assert service.client.get(f"/v1/jobs/{failed['job_id']}").json()["status"] == "failed", (
        "what happened stays on record"
    )
    assert check_problem(ask(service, "busy"), 404)
    assert clean(service)


def test_a_document_can_be_deleted_during_ingest_and_leaves_nothing(service: Service) -> None:
    long = tale("Lamp", "Ada Brook", 40)
    job_id = service.post("/v1/documents", {**long, "collection": "read"}).json()["job_id"]
    while service.client.get(f"/v1/jobs/{job_id}").json()["stage"] != "encode":
        pass
    began = time.monotonic()
    assert delete(service, "lamp", "read").status_code == 204
    assert time.monotonic() - began < 5
    job = service.job(job_id)
    assert (job["status"], job["counts"]["cancelled"]) == ("cancelled", 1)
    assert check_problem(ask(service, "read"), 404)
    assert clean(service)


def test_a_document_deleted_during_retrieval_is_never_cited_afterwards(service: Service) -> None:
    for name, says in (("lamp", SAYS), ("other", {"text": "The boats stay out for three days."})):
        put(service, name, says, "asked", wait=True)
    started, go_on = threading.Event(), threading.Event()

    def stop_in_the_middle(engine: Any) -> None:
        search = engine.retriever.search

        def searched(*arguments: Any) -> Any:
            hits = search(*arguments)
            started.set()
            go_on.wait(30)
            return hits

        engine.retriever.search = searched

    service.engine_thread.submit(stop_in_the_middle).result(30)
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, service, "asked")
            assert started.wait(30)
            assert delete(service, "lamp", "asked").status_code == 204
            go_on.set()
            assert retrieved(answer.result(60)) == [("other", "other")], "it began again"
    finally:
        go_on.set()
        service.engine_thread.submit(lambda engine: engine.retriever.__dict__.pop("search")).result(30)
    assert retrieved(ask(service, "asked")) == [("other", "other")]
    assert clean(service)
