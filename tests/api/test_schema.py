"""The OpenAPI schema describes request bodies with examples, responses and errors of the routes."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest

from tests.api.conftest import Service
from tests.api.routes.test_documents import NAMES, SAYS, put

ROOMS = ("/v1/documents", "/v1/jobs", "/v1/collections")


@pytest.fixture(scope="module")
def schema(service: Service) -> dict[str, Any]:
    found: dict[str, Any] = service.client.get("/openapi.json").json()
    return found


def operations(schema: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, operation)
        for path, methods in schema["paths"].items()
        if path.startswith(ROOMS)
        for method, operation in methods.items()
    ]


def test_every_route_describes_its_responses_and_errors(schema: dict[str, Any]) -> None:
    assert len(operations(schema)) == 14
    for path, method, operation in operations(schema):
        where = f"{method} {path}"
        assert operation["description"], where
        good = {status: each for status, each in operation["responses"].items() if status.startswith("2")}
        assert good, where
        for status, each in good.items():
            kinds = each.get("content", {})
            assert status == "204" or any("schema" in kind or "itemSchema" in kind for kind in kinds.values()), where
            assert all(kind.get("schema") != {} for kind in kinds.values()), where
        for status in ("404", "413", "422", "429", "503"):
            assert "application/problem+json" in operation["responses"][status]["content"], where


def test_every_body_has_an_example_that_fits(schema: dict[str, Any]) -> None:
    bodies = [
        operation["requestBody"]["content"] for _, _, operation in operations(schema) if "requestBody" in operation
    ]
    assert [sorted(body) for body in bodies] == [["application/json", "multipart/form-data"], ["application/json"]]
    for name in ("DocumentIn", "DocumentsIn", "Content"):
        model = schema["components"]["schemas"][name]
        for example in model["examples"]:
            jsonschema.validate(example, {**schema, **model})
    assert set(bodies[0]["multipart/form-data"]["example"]) == set(
        bodies[0]["multipart/form-data"]["schema"]["properties"]
    )


def test_the_pattern_of_names_is_in_the_schema_and_refuses_nothing_that_is_accepted(
    service: Service, schema: dict[str, Any]
) -> None:
    (parameter,) = [
        each for each in schema["paths"]["/v1/documents/{document_id}"]["get"]["parameters"] if each["in"] == "path"
    ]
    pattern = parameter["schema"]["pattern"]
    assert schema["components"]["schemas"]["DocumentIn"]["properties"]["id"]["pattern"] == pattern
    for name in [*NAMES, " a", "a b"]:
        assert re.search(pattern, name), name
    for name in ["", " ", "a\nb", "\x1b[31m", "\u2003", "a\xa0b", "\t"]:
        assert not re.search(pattern, name), name
        refused = service.post("/v1/documents", {"id": name, "text": "x"})
        assert refused.status_code == 422, name


def test_the_limits_of_a_body_are_documented(schema: dict[str, Any]) -> None:
    description = schema["paths"]["/v1/documents"]["post"]["description"]
    assert "RAGKV_MAX_DOCUMENT_BYTES" in description
    assert "4 times" in description


def test_responses_match_the_schema(service: Service, schema: dict[str, Any]) -> None:
    put(service, "described", SAYS, "schema", wait=True)
    job = service.post("/v1/documents?wait=true", {"id": "x", "text": " ", "collection": "schema"}).json()["job_id"]
    for path, route in (
        ("/v1/documents?collection=schema", "/v1/documents"),
        ("/v1/documents/described?collection=schema&text=true", "/v1/documents/{document_id}"),
        ("/v1/jobs", "/v1/jobs"),
        (f"/v1/jobs/{job}?documents=all", "/v1/jobs/{job_id}"),
        ("/v1/collections", "/v1/collections"),
    ):
        described = schema["paths"][route]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        answer = service.client.get(path).json()
        jsonschema.validate(answer, {**schema, **described})
        if "$ref" in described:
            model = schema["components"]["schemas"][described["$ref"].rpartition("/")[2]]
            assert set(answer) <= set(model["properties"]), path
