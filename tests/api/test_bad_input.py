"""Invalid input is answered with a 4xx and problem details, never a 5xx, and the service continues to work."""

from __future__ import annotations

import gzip
import importlib
import json
import pkgutil
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragkv.api import routes
from ragkv.api.error_forms import form_of
from ragkv.api.schemas.faults import fields_of
from tests.api.conftest import HARBOUR, LIMIT, Service

PROBLEM = "application/problem+json"
ASK, ADD, CHAT = "/v1/answers", "/v1/documents", "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def check_problem(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM
    body = response.json()
    assert body["status"] == status
    assert {"type", "title", "detail", "code"} <= set(body)
    return body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (ASK, {"question": ""}),
        (ASK, {"question": " \n\t "}),
        (ASK, {"question": "wh\0o?"}),
        (ASK, {"question": "a" * 200_001}),
        (ASK, {"question": 5}),
        (ASK, {"question": None}),
        (ASK, {"question": ["who?"]}),
        (ASK, {}),
        (ASK, []),
        (ASK, None),
        (ASK, "who?"),
        (ASK, {"question": "who?", "unknown": 1}),
        (ASK, {"question": "who?", "top_k": "3"}),
        (ASK, {"question": "who?", "top_k": 0}),
        (ASK, {"question": "who?", "top_k": 65}),
        (ASK, {"question": "who?", "top_k": 10**30}),
        (ASK, {"question": "who?", "top_k": 2.5}),
        (ASK, {"question": "who?", "top_k": True}),
        (ASK, {"question": "who?", "max_tokens": -1}),
        (ASK, {"question": "who?", "method": "magic"}),
        (ASK, {"question": "who?", "method": "epic:k=3"}),
        (ASK, {"question": "who?", "method": "epic:link=-1"}),
        (ASK, {"question": "who?", "method": "full:link=1"}),
        (ASK, {"question": "who?", "prefill": "minference"}),
        (ASK, {"question": "who?", "decode": "quest"}),
        (ASK, {"question": "who?", "decode": "psa:threshold=2"}),
        (ASK, {"question": "who?", "decode": "lfps:reach=0.5"}),
        (ASK, {"question": "who?", "deadline_s": 0}),
        (ASK, {"question": "who?", "deadline_s": "soon"}),
        (ASK, {"question": " ", "stream": True}),
        (ASK, {"question": "who?", "stream": True, "method": "magic"}),
        (ASK, {"question": "who?", "stream": "no"}),
        (ASK, {"question": "who?", "collection": ""}),
        (ASK, {"question": "who?", "collection": "a\nb"}),
        (ASK, {"question": "who?", "conversation_id": ""}),
        (ASK, {"question": "who?", "conversation_id": "a\nb"}),
        (ASK, {"question": "who?", "conversation_id": "a" * 513}),
        (ASK, {"question": "who?", "conversation_id": "a", "method": "multi-infllm"}),
        (ADD, {"id": "a"}),
        (ADD, {"id": "", "text": "x"}),
        (ADD, {"id": "a\0", "text": "x"}),
        (ADD, {"id": "a" * 513, "text": "x"}),
        (ADD, {"id": 1, "text": "x"}),
        (ADD, {"id": "a", "text": 1}),
        (ADD, {"id": "a", "text": "x", "extra": 1}),
        (ADD, {"id": "a", "text": "x", "metadata": []}),
        (ADD, {"id": "a", "text": "x", "metadata": {str(n): n for n in range(17)}}),
        (ADD, {"id": "a", "text": "x", "metadata": {"long": "x" * 20_000}}),
        (ADD, {"documents": []}),
        (ADD, {"documents": [{"id": "a", "text": "x"}], "id": "b"}),
        (ADD, {"documents": [{"id": "a", "text": "x"}] * 1001}),
        (ADD, {"documents": "x"}),
    ],
)
def test_bodies_outside_the_contract_are_refused(service: Service, path: str, body: Any) -> None:
    check_problem(service.post(path, body), 422)


@pytest.mark.parametrize("path", [ASK, ADD])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"{", id="half"),
        pytest.param(b"\0", id="NUL"),
        pytest.param(b'{"question": "\xff\xfe", "id": "a", "text": "\xff"}', id="not UTF-8"),
        pytest.param(b'{"question": "\\ud800", "id": "a", "text": "\\ud800"}', id="lone surrogate"),
        pytest.param(b'{"question": "a", "top_k": NaN, "id": "a", "text": "a", "metadata": {"x": NaN}}', id="NaN"),
        pytest.param(b'{"question": "a", "top_k": 1e999, "id": "a", "text": "a", "metadata": {"x": 1e999}}', id="inf"),
        pytest.param(b'{"a":' * 50_000, id="deep objects"),
        pytest.param(b"[" * 100_000, id="deep lists"),
        pytest.param(
            b'{"question": "a", "id": "a", "text": "a", "metadata": {"x": '
            + b"[" * 600
            + b"]" * 600
            + b'}, "top_k": []}',
            id="deep metadata",
        ),
        pytest.param(b'{"question": ' + b"9" * 5000 + b"}", id="long number"),
    ],
)
def test_a_body_that_is_not_valid_json_is_refused(service: Service, path: str, body: bytes) -> None:
    check_problem(service.client.post(path, content=body, headers=JSON), 422)


def test_a_body_needs_a_content_type_that_is_read(service: Service) -> None:
    body = json.dumps({"question": "who?"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/x"):
        problem = check_problem(service.client.post(ASK, content=body, headers={"content-type": kind}), 415)
        assert problem["code"] == "unsupported_media_type"
        assert "application/json" in problem["detail"]
    check_problem(service.client.post(ASK, content=body), 415)
    check_problem(service.client.post(ASK, content=iter([body]), headers={"content-type": "text/plain"}), 415)
    check_problem(service.client.put(f"{ADD}/a", content=b"text", headers={"content-type": "text/markdown"}), 415)
    form = check_problem(service.client.post(ADD, content=b"x", headers={"content-type": "text/csv"}), 415)
    assert "multipart/form-data" in form["detail"]
    chat = service.client.post(CHAT, content=body, headers={"content-type": "text/plain"})
    assert (chat.status_code, set(chat.json())) == (415, {"error"})
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        assert service.client.post(ASK, content=body, headers={"content-type": kind}).status_code == 200, kind


def test_a_compressed_body_is_refused_and_not_read_as_text(service: Service) -> None:
    body = gzip.compress(json.dumps({"question": "who?"}).encode())
    problem = check_problem(service.client.post(ASK, content=body, headers={**JSON, "content-encoding": "gzip"}), 415)
    assert problem["code"] == "unsupported_coding"


def test_a_request_without_a_body_needs_no_content_type(service: Service) -> None:
    check_problem(service.client.post("/v1/jobs/nothing/cancel"), 404)
    assert service.client.get("/v1/models", headers={"content-type": "text/plain"}).status_code == 200


def test_a_too_long_question_is_refused_with_its_size_and_the_limit(service: Service) -> None:
    detail = check_problem(service.post(ASK, {"question": "who is it " * 3500}), 422)["detail"]
    counts = [int(number) for number in re.findall(r"\d+", detail)]
    assert 2048 in counts
    assert max(counts) > 10_000


def test_an_error_does_not_repeat_the_input(service: Service) -> None:
    secret = "correct-horse-battery"
    assert secret not in service.post(ASK, {"question": [secret], "top_k": secret}).text


def test_a_content_length_over_the_limit_is_refused_before_the_body(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as line:
        size = LIMIT + 2**21
        head = f"POST {ADD} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        line.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode())
        answer = line.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413")
    assert PROBLEM.encode() in answer


def test_a_chunked_body_over_the_limit_is_refused_while_it_arrives(service: Service) -> None:
    sent = 0

    def body() -> Iterator[bytes]:
        nonlocal sent
        yield b'{"id": "a", "text": "'
        for _ in range(256):
            sent += 2**20
            yield b"x" * 2**20

    try:
        refused = service.client.post(ADD, content=body(), headers=JSON)
    except httpx.WriteError:  # the service closed the line while we were sending
        pass
    else:
        check_problem(refused, 413)
    assert sent < 128 * 2**20


def test_a_document_over_its_own_limit_fails_with_the_sizes(service: Service) -> None:
    refused = check_problem(service.post(f"{ADD}?wait=true", {"id": "big", "text": "x" * (LIMIT + 1)}), 413)
    assert refused["code"] == "too_large"
    assert str(LIMIT) in refused["detail"]


def test_a_name_that_looks_like_a_path_is_only_a_label(service: Service) -> None:
    document = {"id": "../../etc/passwd", "text": "The tower is tall.", "collection": "../up"}
    assert service.post(f"{ADD}?wait=true", document).json()["status"] == "completed"
    cited = service.post(ASK, {"question": "What is tall?", "collection": "../up"}).json()["citations"]
    assert cited[0]["document_id"] == "../../etc/passwd"


@pytest.mark.parametrize(
    ("path", "body", "at", "message"),
    [
        (ADD, {"id": "a"}, "body.text", "is required"),
        (ADD, {"id": "a", "text": 1}, "body.text", "must be a string"),
        (ADD, {"id": "a", "text": "x", "extra": 1}, "body.extra", "is no field of this request"),
        (ASK, {"question": "who?", "topk": 3}, "body.topk", "is no field of this request; did you mean top_k?"),
        (ADD, {"documents": [{"id": "a", "txt": "x"}]}, "body.documents.0.txt", "did you mean text?"),
        (ADD, {"documents": [{"id": "a", "text": "x"}, {"id": "", "text": "x"}]}, "body.documents.1.id", "at least 1"),
        (ADD, {"documents": "x"}, "body.documents", "must be a list"),
        (ADD, [], "body", "must be an object"),
        (ADD, "x", "body", "must be an object"),
        (ASK, {"question": "who?", "top_k": 0}, "body.top_k", "must be greater than or equal to 1"),
        (ASK, {"question": "who?", "filter": {"kind": {}}}, "body.filter.kind", "must be a string"),
        (ASK, {"question": "who?", "stream": "no"}, "body.stream", "must be true or false"),
    ],
)
def test_an_error_names_the_place_in_the_request_and_nothing_of_the_inside(
    service: Service, path: str, body: Any, at: str, message: str
) -> None:
    problem = check_problem(service.post(path, body), 422)
    (fault,) = [each for each in problem["errors"] if each["at"] == at]
    assert message in fault["message"]
    assert not re.search(r"DocumentIn|body\.document\b|_tag|str\b.*list\[|Input should|Value error", str(problem))


@pytest.mark.parametrize("module", [each.name for each in pkgutil.iter_modules(routes.__path__)])
def test_the_fields_of_every_body_can_be_told(module: str) -> None:
    found = vars(importlib.import_module(f"{routes.__name__}.{module}")).values()
    read = [each for router in found if isinstance(router, APIRouter) for each in router.routes]
    bodies = [each.body_field for each in read if isinstance(each, APIRoute) and each.body_field is not None]
    assert all(fields_of(body.field_info.annotation) for body in bodies)


def test_a_filter_in_the_query_is_refused_in_the_same_words(service: Service) -> None:
    problem = check_problem(service.client.get(ADD, params={"filter": '{"kind": {}}'}), 422)
    assert problem["errors"][0]["at"] == "query.filter"
    assert problem["errors"][0]["message"].startswith("kind must be a string")
    unread = check_problem(service.client.get(ADD, params={"filter": "{"}), 422)
    assert "JSON" in unread["errors"][0]["message"]


def test_no_client_is_told_to_run_a_command(service: Service) -> None:
    for response in (
        service.post(ASK, {"question": "who?", "collection": "nothing"}),
        service.client.get(f"{ADD}/nothing"),
        service.client.get("/v1/jobs/nothing"),
    ):
        assert "ragkv " not in check_problem(response, 404)["detail"]


def test_every_route_refuses_query_parameters_that_it_does_not_have(service: Service) -> None:
    tested = 0
    for template, methods in service.client.get("/openapi.json").json()["paths"].items():
        path = re.sub(r"\{\w+\}", "harbour", template)
        for method in methods:
            body = {"json": BODIES[method, template]} if (method, template) in BODIES else {}
            refused = service.client.request(method, path, params={"collectoin": "lost"}, **body)
            tested += 1
            if form_of(path) is not None:  # in the form of another API
                assert (refused.status_code, "query.collectoin" in refused.text) == (400, True), template
            else:
                assert check_problem(refused, 422)["errors"][0]["at"] == "query.collectoin", (method, template)
    assert tested > 20


BODIES = {
    ("post", ADD): HARBOUR,
    ("put", ADD + "/{document_id}"): {"text": HARBOUR["text"]},
    ("post", ASK): {"question": "who?"},
    ("post", CHAT): {"model": "x", "messages": [{"role": "user", "content": "who?"}]},
}


def test_an_upload_refuses_query_parameters_that_it_does_not_have(service: Service) -> None:
    form = {"files": ("lost.txt", b"The lamp of Tarn is lit.")}
    refused = check_problem(service.client.post(ADD, params={"collectoin": "lost"}, files=form), 422)
    assert refused["detail"] == "query.collectoin: unknown parameter; this route takes collection, wait"


def test_other_methods_and_paths_are_problems_too(service: Service) -> None:
    assert check_problem(service.client.delete(ASK), 405)
    assert service.client.delete(ASK).headers["allow"] == "GET, HEAD, POST"
    assert check_problem(service.client.get("/v2/answers"), 404)
    assert "/openapi.json" in check_problem(service.client.get("/"), 404)["detail"], "it has no dashboard"
    assert check_problem(service.client.post("/v1/documents?wait=maybe", json=HARBOUR), 422)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (ADD, "GET, HEAD, POST"),
        (ASK + "/one/map", "GET, HEAD"),
        (ADD + "/harbour/plan", "DELETE, GET, HEAD, PUT"),
        ("/v1/conversations/one", "DELETE, GET, HEAD"),
        (CHAT, "POST"),
        ("/openapi.json", "GET, HEAD"),
    ],
)
def test_a_405_lists_all_methods_of_the_path(service: Service, path: str, allowed: str) -> None:
    refused = service.client.request("PATCH", path)
    assert (refused.status_code, refused.headers["allow"]) == (405, allowed)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    *("question", "collection", "top_k", "method", "max_tokens", "id", "text", "title", "metadata", "documents"),
    *("filter", "stream", "deadline_s", "model", "messages", "stop", "temperature", "tools", "n", "ragkv"),
)


@given(
    path=st.sampled_from([ASK, ADD, CHAT]), body=VALUES | st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_json_value_breaks_the_service(service: Service, path: str, body: Any) -> None:
    content = json.dumps(body).encode()
    response = service.client.post(path, content=content, headers=JSON)
    assert response.status_code < 500, response.text
    if path == CHAT:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.status_code >= 400:
        check_problem(response, response.status_code)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"messages": "\\ud800"}'])
def test_the_openai_route_answers_unreadable_bodies_with_openai_errors(service: Service, body: bytes) -> None:
    refused = service.client.post(CHAT, content=body, headers=JSON)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_the_service_still_answers_afterwards(service: Service) -> None:
    answer = service.post(ASK, {"question": "Who built the harbour of Tarn?"})
    assert (answer.status_code, answer.json()["citations"][0]["document_id"]) == (200, "harbour")
