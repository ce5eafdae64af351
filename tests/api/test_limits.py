"""The limits of documents hold at every way into the service, and what exceeds one fails alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ragkv.catalog.limits import MAX_DEPTH, MAX_METADATA_KEYS, MAX_TITLE
from tests.api.conftest import Service
from tests.api.routes.test_uploads import upload
from tests.api.test_bad_input import ADD, check_problem
from tests.catalog.test_limits import nested
from tests.mcp_calls import over_http, refused

TEXT = "The harbour of Tarn was built in 1889."
EXCESSES: dict[str, dict[str, Any]] = {
    "depth": {"metadata": nested(MAX_DEPTH + 1)},
    "poison": {"metadata": nested(200)},
    "keys": {"metadata": {str(n): n for n in range(100)}},
    "bytes": {"metadata": {"a": "x" * 20_000}},
    "title": {"title": "x" * (MAX_TITLE + 1)},
}


@pytest.fixture(params=EXCESSES)
def excess(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Fields of a document, one of which exceeds a limit."""
    return EXCESSES[request.param]


def test_documents_as_json_are_refused(service: Service, excess: dict[str, Any]) -> None:
    check_problem(service.post(ADD, {"id": "over", "text": TEXT, **excess}), 422)
    check_problem(service.client.put(f"{ADD}/over", json={"text": TEXT, **excess}), 422)
    assert service.client.get(f"{ADD}/over").status_code == 404


def test_a_line_of_an_uploaded_file_fails_alone(service: Service, excess: dict[str, Any]) -> None:
    lines = [{"id": "over", "text": TEXT, **excess}, {"id": "within", "text": TEXT, "metadata": nested(MAX_DEPTH)}]
    done = upload(service, [("lines.jsonl", "\n".join(map(json.dumps, lines)).encode())], collection="limits").json()
    job = service.job(done["id"])
    assert [(each["id"], each["status"]) for each in job["documents"]] == [
        ("lines.jsonl, line 1", "failed"),
        ("within", "completed"),
    ]
    assert service.client.delete("/v1/collections/limits").status_code == 204


def test_the_documents_of_the_tool_are_refused(service: Service, excess: dict[str, Any]) -> None:
    async def use() -> str:
        async with over_http(service.url) as client:
            return await refused(client, "ingest", documents=[{"id": "over", "text": TEXT, **excess}])

    assert "over" not in asyncio.run(use())
    assert service.client.get(f"{ADD}/over").status_code == 404


def test_the_metadata_of_a_form_is_bounded_also_together_with_that_of_the_file(service: Service) -> None:
    file = [("notes.md", b"# Notes\n\nThe bridge is green.")]
    for metadata in (nested(MAX_DEPTH + 1), nested(120), {"a": "x" * 20_000}):
        check_problem(upload(service, file, metadata=json.dumps(metadata)), 422)
    full = json.dumps({str(n): n for n in range(MAX_METADATA_KEYS)})  # one less than with the file's `format`
    job = check_problem(upload(service, file, metadata=full), 422)
    assert "keys" in job["detail"]


def test_a_filter_is_no_way_around(service: Service) -> None:
    deep = json.dumps(nested(120))
    check_problem(service.client.get(ADD, params={"filter": deep}), 422)
    check_problem(service.post("/v1/answers", {"question": "who?", "filter": nested(120)}), 422)


def test_the_title_and_the_headings_of_a_file_are_cut(service: Service) -> None:
    text = f"# {'long ' * 500}\n\n" + "The harbour of Tarn was built in 1889 by Ada Brook. " * 20
    page = f'<html lang="{"x" * 20_000}"><title>{"long " * 400}</title><body><p>The bridge is green.</p></body></html>'
    files = [("long.md", text.encode()), ("long.html", page.encode())]
    job = upload(service, files, collection="cut").json()
    assert job["counts"]["completed"] == 2, job
    shown = service.client.get(ADD, params={"collection": "cut"}).json()["documents"]
    assert [len(each["title"]) <= MAX_TITLE for each in shown] == [True, True]
    assert shown[1]["title"].endswith("…")
    chunks = service.client.get(f"{ADD}/long.md/chunks", params={"collection": "cut"}).json()["chunks"]
    assert 0 < max(len(each["heading"] or "") for each in chunks) <= MAX_TITLE
    assert service.client.delete("/v1/collections/cut").status_code == 204
