"""Collections over HTTP, metadata filters, and the isolation of tenants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from ragkv.api.app import create_app
from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.tenants import Tenant
from tests.api.conftest import Service, settings
from tests.api.routes.test_documents import clean
from tests.api.test_bad_input import check_problem
from tests.api.test_faults import ask, held, retrieved

BOATS = [
    {"id": "heron", "text": "The Grey Heron is a ferry.", "metadata": {"kind": "ferry", "year": 1931, "tags": ["sea"]}},
    {"id": "gull", "text": "The White Gull is a ferry.", "metadata": {"kind": "ferry", "year": 1889}},
    {"id": "mast", "text": "The mast of the ferry is red.", "metadata": {"kind": "part", "tags": ["sea", "wood"]}},
]


def fill(service: Service, collection: str) -> None:
    body = {"documents": [{**boat, "collection": collection} for boat in BOATS]}
    assert service.post("/v1/documents?wait=true", body).json()["status"] == "completed"


def shown(service: Service) -> dict[str, Any]:
    found = service.client.get("/v1/collections").json()["collections"]
    assert [each["name"] for each in found] == sorted(each["name"] for each in found)
    return {each["name"]: each for each in found}


def test_a_collection_shows_its_size(service: Service) -> None:
    fill(service, "boats/held")
    page = service.client.get("/v1/documents", params={"collection": "boats/held"}).json()["documents"]
    assert shown(service)["boats/held"] == {
        "name": "boats/held",
        "documents": 3,
        **{name: sum(document[name] for document in page) for name in ("chunks", "tokens", "kv_bytes", "file_bytes")},
    }
    assert service.client.delete("/v1/collections/boats%2Fheld").status_code == 204
    assert "boats/held" not in shown(service)


def test_deleting_a_collection_removes_its_jobs_conversations_and_kv(service: Service) -> None:
    fill(service, "sunk")
    fill(service, "afloat")
    assert ask(service, "sunk", "What is the Grey Heron?", conversation_id="talk").status_code == 200
    with held(service):
        job_id = service.post("/v1/documents", {**BOATS[0], "id": "late", "collection": "sunk"}).json()["job_id"]
        assert service.client.delete("/v1/collections/sunk").status_code == 204, "it does not wait for the engine"
        check_problem(service.client.delete("/v1/collections/sunk"), 404)
    assert service.job(job_id)["status"] == "cancelled"
    check_problem(service.client.get("/v1/conversations/talk?collection=sunk"), 404)
    check_problem(ask(service, "sunk"), 404)
    assert len(retrieved(ask(service, "afloat"))) == 3
    assert clean(service)
    fill(service, "sunk")
    assert len(retrieved(ask(service, "sunk"))) == 3
    for name in ("never", "%20"):
        check_problem(service.client.delete(f"/v1/collections/{name}"), 422 if "%" in name else 404)


# Filters


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        (None, {"heron", "gull", "mast"}),
        ({}, {"heron", "gull", "mast"}),
        ({"kind": "ferry"}, {"heron", "gull"}),
        ({"kind": ["ferry", "part"], "tags": "sea"}, {"heron", "mast"}),
        ({"year": [1889, 1931.0]}, {"heron", "gull"}),
        ({"tags": ["wood"]}, {"mast"}),
    ],
)
def test_a_question_is_answered_from_the_documents_that_match_its_filter(
    service: Service, conditions: Any, found: set[str]
) -> None:
    if "filtered" not in shown(service):
        fill(service, "filtered")
    answered = ask(service, "filtered", "What is a ferry?", filter=conditions, top_k=3)
    assert {document for document, _ in retrieved(answered)} == found


def test_a_filter_applies_to_its_turn_only(service: Service) -> None:
    fill(service, "turns")
    turns = [
        ask(service, "turns", "What is a ferry?", conversation_id="talk", filter=conditions, top_k=1)
        for conditions in ({"tags": "wood"}, {"year": 1889}, None)
    ]
    assert [[document for document, _ in retrieved(turn)] for turn in turns[:2]] == [["mast"], ["mast", "gull"]]
    assert len(turns[1].json()["report"]["chunks"]) == 2, "what an earlier turn read stays"


@pytest.mark.parametrize(
    "conditions",
    [
        "kind",
        [],
        {"kind": {"a": 1}},
        {"kind": [["ferry"]]},
        {"kind": []},
        {"kind": "x" * 513},
        {"kind": "\ud800"},
        {str(n): n for n in range(17)},
        {"kind": list(range(65))},
    ],
)
def test_an_invalid_filter_is_refused(service: Service, conditions: Any) -> None:
    body = json.dumps({"question": "What is a ferry?", "filter": conditions}).encode()
    head = {"content-type": "application/json"}
    check_problem(service.client.post("/v1/answers", content=body, headers=head), 422)


def test_a_filter_without_a_match_is_a_404_that_names_it(service: Service) -> None:
    detail = check_problem(ask(service, "default", filter={"kind": "none"}), 404)["detail"]
    assert "filter" in detail


# Tenants


class AsTenant:
    """Middleware that sets the tenant from a header, in place of the authentication."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = dict(scope["headers"]).get(b"x-tenant", b"").decode()
        await self.app({**scope, "state": {**scope.get("state", {}), "caller": Caller(Tenant(name))}}, receive, send)


Call = Callable[..., Awaitable[httpx.Response]]


def test_a_tenant_sees_nothing_of_another_tenant(tmp_path: Path) -> None:
    app = create_app(settings(tmp_path))

    async def exchange(ours: Call, theirs: Call) -> None:
        text = {"text": "The lamp is kept by Ada Brook.", "metadata": {"kind": "lamp"}}
        assert (await ours("PUT", "/v1/documents/lamp?wait=true", json=text)).json()["collection"] == "default"
        files = [("files", ("bad.txt", b"\xff"))]
        refused = (await ours("POST", "/v1/documents?wait=true", files=files)).json()
        path = f"/v1/jobs/{refused['job_id']}"
        job = (await ours("GET", path)).json()
        assert (job["collection"], job["status"]) == ("default", "failed")
        for method, route in (
            ("GET", "/v1/documents/lamp"),
            ("DELETE", "/v1/documents/lamp"),
            ("DELETE", "/v1/documents/bad.txt"),
            ("DELETE", "/v1/collections/default"),
            ("DELETE", "/v1/collections/ours:default"),
            ("GET", path),
            ("GET", f"{path}/events"),
            ("POST", f"{path}/cancel"),
        ):
            check_problem(await theirs(method, route), 404)
        assert (await theirs("GET", "/v1/documents")).json()["documents"] == []
        assert (await theirs("GET", "/v1/documents?collection=ours:default")).json()["documents"] == []
        assert (await theirs("GET", "/v1/collections")).json() == {"collections": []}
        assert (await theirs("GET", "/v1/jobs")).json() == {"jobs": []}
        assert [job["collection"] for job in (await ours("GET", "/v1/jobs")).json()["jobs"]] == ["default"] * 2
        assert [each["name"] for each in (await ours("GET", "/v1/collections")).json()["collections"]] == ["default"]
        asked = {"question": "Who keeps the lamp?", "filter": {"kind": "lamp"}}
        check_problem(await theirs("POST", "/v1/answers", json=asked), 404)
        assert (await ours("POST", "/v1/answers", json=asked)).json()["citations"][0]["document_id"] == "lamp"
        assert (await ours("GET", path)).json() == job
        assert "event: done" in (await ours("GET", f"{path}/events")).text
        assert (await ours("DELETE", "/v1/documents/bad.txt")).status_code == 204
        assert (await ours("DELETE", "/v1/collections/default")).status_code == 204

    async def session() -> None:
        transport = httpx.ASGITransport(AsTenant(app))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client,
        ):

            def as_tenant(name: str) -> Call:
                return lambda method, path, **more: client.request(method, path, headers={"x-tenant": name}, **more)

            await exchange(as_tenant("ours"), as_tenant("theirs"))

    asyncio.run(session())
