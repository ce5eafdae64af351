"""Ollama's API. The bodies are those that the client `ollama` 0.6.3 and Open WebUI 0.12 send, as they were recorded."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from ragkv.api.middleware.keys import make_key
from tests.api.conftest import BRIDGE, HARBOUR, Service, serving, settings
from tests.api.routes.test_structured import SCHEMA
from tests.api.runtime.test_answers_together import endless, until
from tests.api.test_faults import held

WHO = "Who built the harbour of Tarn?"
ASKED = [{"role": "user", "content": WHO}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {"model": "tiny", "stream": False, "messages": ASKED, "tools": []}
"""What the client sends for `chat("tiny", messages=…)`."""


def lines(service: Service, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Read a stream as the client does: every line is JSON."""
    with service.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def test_the_models_have_the_members_that_ollamas_clients_read(service: Service) -> None:
    models = service.client.get("/api/tags").json()["models"]
    listed = [each["id"] for each in service.client.get("/v1/models").json()["data"]]
    assert [each["name"] for each in models] == [each["model"] for each in models] == listed
    assert set(models[0]) == {"name", "model", "modified_at", "size", "digest", "details"}
    assert service.client.get("/api/version").json()["version"]


def test_open_webui_sees_which_model_is_loaded_and_what_it_can_do(service: Service) -> None:
    """It asks for the version, the loaded models, and for what a model is before a chat."""
    (loaded,) = service.client.get("/api/ps").json()["models"]
    (first, *_) = service.client.get("/api/tags").json()["models"]
    assert {name: loaded[name] for name in first} == first
    assert loaded["expires_at"].startswith("9999")
    for body in (
        {"model": "tiny"},
        {"name": "tiny"},
        {"model": "tiny:latest", "verbose": True},
        {"model": "tiny:full"},
    ):
        shown = service.post("/api/show", body)
        assert shown.status_code == 200, shown.text
        known = shown.json()
        assert known["capabilities"] == ["completion"], "it calls no tools and sees no images"
        assert known["details"] == first["details"]
        longest = known["model_info"][f"{known['model_info']['general.architecture']}.context_length"]
        assert longest == loaded["context_length"] == service.app.state.settings.max_question_tokens


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"model": "llama3"}, 404, "there is no such model; use 'tiny'"),
        ({}, 400, "model is required"),
        ({"model": ["tiny"]}, 400, "model: "),
    ],
)
def test_a_model_that_is_not_there_cannot_be_shown(service: Service, body: Any, status: int, told: str) -> None:
    refused = service.post("/api/show", body)
    assert (refused.status_code, set(refused.json())) == (status, {"error"})
    assert told in refused.json()["error"]


def test_a_chat_has_the_answer_the_counts_citations_and_report(service: Service) -> None:
    own = service.post("/v1/answers", {"question": WHO}).json()
    made = service.post("/api/chat", CHAT).json()
    assert made["message"] == {"role": "assistant", "content": "Ada Brook"}
    assert (made["model"], made["done"], made["done_reason"]) == ("tiny", True, "stop")
    assert made["ragkv"]["citations"] == own["citations"]
    tokens = made["ragkv"]["report"]["tokens"]
    assert made["prompt_eval_count"] == tokens["context"] + tokens["question"]
    assert made["eval_count"] == tokens["generated"] > 0
    assert made["total_duration"] >= made["prompt_eval_duration"] > 1_000_000


def test_a_chat_is_streamed_unless_the_request_says_otherwise(service: Service) -> None:
    for more in ({}, {"stream": True}):
        body = {name: value for name, value in CHAT.items() if name != "stream"} | more
        *pieces, last = lines(service, "/api/chat", body)
        assert "".join(each["message"]["content"] for each in pieces) == "Ada Brook"
        assert not any(each["done"] for each in pieces)
        assert (last["done"], last["message"]["content"]) == (True, "")
        assert {each["document_id"] for each in last["ragkv"]["citations"]} == {"harbour", "bridge"}


def test_lines_come_one_by_one_and_are_not_compressed_together(service: Service) -> None:
    accepts = {"accept-encoding": "gzip"}
    with service.client.stream("POST", "/api/chat", json={**CHAT, "stream": True}, headers=accepts) as response:
        assert "content-encoding" not in response.headers
        assert len([*response.iter_raw()]) > 1


def test_a_prompt_is_answered_whole_and_streamed(service: Service) -> None:
    body = {"model": "tiny", "stream": False, "prompt": WHO, "system": "Be brief"}
    assert service.post("/api/generate", body).json()["response"] == "Ada Brook"
    *pieces, last = lines(service, "/api/generate", {"model": "tiny:latest", "prompt": WHO})
    assert "".join(each["response"] for each in pieces) == "Ada Brook"
    assert last["done_reason"] == "stop"
    assert last["ragkv"]["report"]["tokens"]["generated"] == last["eval_count"]


def test_options_reach_the_engine_and_unknown_ones_are_ignored(service: Service) -> None:
    own = {"ragkv": {"top_k": 1}, "num_ctx": 4096, "repeat_penalty": 1.1, "temperature": 0.0}
    made = service.post("/api/chat", {**CHAT, "options": {**own, "num_predict": 1}, "keep_alive": "5m"}).json()
    assert (made["done_reason"], made["eval_count"]) == ("length", 1)
    assert len(made["ragkv"]["citations"]) == 1
    beside = service.post("/api/chat", {**CHAT, "model": "tiny:full", "ragkv": {"top_k": 1}}).json()
    assert beside["ragkv"]["report"]["method"] == "full"
    assert len(beside["ragkv"]["citations"]) == 1
    stopped = service.post("/api/chat", {**CHAT, "options": {"stop": ["Brook"]}}).json()
    assert stopped["message"]["content"] == "Ada"
    for longest in (-1, -2, 0):
        whole = service.post("/api/chat", {**CHAT, "options": {"num_predict": longest}}).json()
        assert whole["message"]["content"] == "Ada Brook"


def test_a_history_with_tools_is_answered(service: Service) -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    result = {"role": "tool", "content": "x", "tool_name": "f"}
    earlier = [{"role": "user", "content": "Is it raining?"}, called, result, {"role": "assistant", "content": "Yes."}]
    messages = [{"role": "system", "content": "Be brief"}, *earlier, *ASKED]
    made = service.post("/api/chat", {**CHAT, "messages": messages, "tools": [TOOL], "think": False}).json()
    assert made["message"]["content"] == "Ada Brook"


def test_an_empty_request_loads_the_model_as_clients_ask_before_a_chat(service: Service) -> None:
    for path, empty in (("/api/chat", {"messages": []}), ("/api/generate", {}), ("/api/generate", {"prompt": ""})):
        made = service.post(path, {"model": "tiny", **empty}).json()
        assert (made["done"], made["done_reason"]) == (True, "load")
        unloaded = service.post(path, {"model": "tiny", "keep_alive": 0.0, **empty}).json()
        assert unloaded["done_reason"] == "unload"
        assert service.post(path, {"model": "llama3", **empty}).status_code == 404


def test_open_webui_gets_a_title_by_ollamas_api_without_documents(service: Service) -> None:
    chat = f"<chat_history>\nUSER: {WHO}\nASSISTANT: Ada Brook\n</chat_history>"
    asked = f'### Task:\nGenerate a title.\n### Output:\nJSON format: {{ "title": "x" }}\n{chat}'
    body = {**CHAT, "messages": [{"role": "user", "content": asked}]}
    made = service.post("/api/chat", body).json()
    assert json.loads(made["message"]["content"]) == {"title": WHO}
    assert (made["eval_count"], made["prompt_eval_count"]) == (0, 0)
    assert "ragkv" not in made
    *pieces, last = lines(service, "/api/chat", {**body, "stream": True})
    assert json.loads("".join(each["message"]["content"] for each in pieces)) == {"title": WHO}
    assert last["done"] is True


@pytest.mark.parametrize("form", ["json", SCHEMA], ids=["json", "schema"])
def test_a_format_gives_json(service: Service, form: Any) -> None:
    made = service.post("/api/chat", {"model": "tiny", "messages": ASKED, "stream": False, "format": form}).json()
    jsonschema.validate(json.loads(made["message"]["content"]), {"type": "object"} if form == "json" else SCHEMA)


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"model": "llama3"}, 404, "there is no such model; use 'tiny'"),
        ({"ragkv": {"collection": "none"}}, 404, "collection 'none' has no documents"),
        ({"format": "yaml"}, 400, "format: other values than json and a JSON schema are not supported"),
        ({"format": {"type": "nothing"}}, 400, "the schema is not understood"),
        ({"options": {"temperature": -1}}, 400, "options.temperature: must be greater than or equal to 0"),
        ({"messages": [{**ASKED[0], "images": ["aGk="]}]}, 400, "messages.0.images: images are not supported"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "messages: one of them must be a question"),
        ({"messages": "x"}, 400, "messages: must be a list"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs: must be less than or equal to 20"),
        ({"ragkv": {"top_k": 1}, "options": {"ragkv": {}}}, 400, "ragkv is there twice"),
        ({"ragkv": {"topk": 1}}, 400, "ragkv.topk: is no field of this request"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_is_the_sentence_that_ollamas_client_shows(
    service: Service, body: dict[str, Any], status: int, told: str, stream: bool
) -> None:
    refused = service.post("/api/chat", {**CHAT, "stream": stream, **body})
    assert refused.status_code == status, refused.text
    assert set(refused.json()) == {"error"}
    assert told in refused.json()["error"]


def test_errors_outside_the_routes_have_ollamas_form_too(service: Service) -> None:
    for refused in (service.client.get("/api/nothing"), service.client.get("/api/chat"), service.post("/api/chat", [])):
        assert refused.status_code in (400, 404, 405)
        assert isinstance(refused.json()["error"], str)
    with held(service):
        waiting = [
            service.engine_thread.submit(lambda engine: None) for _ in range(service.engine_thread.health()["queue"])
        ]
        busy = service.post("/api/chat", CHAT)
    assert (busy.status_code, set(busy.json())) == (429, {"error"})
    assert int(busy.headers["retry-after"]) >= 1
    assert all(future.result(30) is None for future in waiting)


def test_a_fault_in_a_stream_is_its_last_line(service: Service) -> None:
    with endless(service.engine_thread):
        body = {**CHAT, "stream": True, "ragkv": {"deadline_s": 1.5}, "options": {"num_predict": 4000}}
        *pieces, last = lines(service, "/api/chat", body)
    assert pieces
    assert set(last) == {"error"}


def test_a_stream_that_is_closed_frees_its_place(service: Service) -> None:
    with endless(service.engine_thread):
        before = service.engine_thread.health()["cancelled"]
        body = {**CHAT, "stream": True, "options": {"num_predict": 2000}}
        with service.client.stream("POST", "/api/chat", json=body) as response:
            assert next(response.iter_lines())
        until(lambda: service.engine_thread.health()["running"] == 0)
    assert service.engine_thread.health()["cancelled"] == before + 1


def test_keys_tenants_and_quotas_hold_at_ollamas_door(tmp_path: Any) -> None:
    (tarn, first), (mell, second) = make_key("tarn", {"requests": 30}), make_key("mell")
    reader, third = make_key("tarn", {"requests": 30}, role="reader")
    with serving(settings(tmp_path, api_keys=",".join((first, second, third)))) as locked:
        owners = ((tarn, HARBOUR), (mell, BRIDGE))
        for key, document in owners:
            headers = {"Authorization": f"Bearer {key}"}
            assert locked.post("/v1/documents?wait=true", document, headers=headers).status_code == 200
        refused = locked.post("/api/chat", CHAT)
        assert (refused.status_code, set(refused.json())) == (401, {"error"})
        assert locked.client.get("/api/tags").status_code == 401
        assert locked.client.get("/health").json() == {"status": "ok"}
        for key, document in (*owners, (reader, HARBOUR)):
            made = locked.post("/api/chat", CHAT, headers={"Authorization": f"Bearer {key}"})
            read = made.json()["ragkv"]["report"]["chunks"]
            assert {each["document_id"] for each in read} == {document["id"]}
        with httpx.Client(base_url=locked.url, headers={"Authorization": f"Bearer {tarn}"}) as limited:
            assert limited.post("/api/generate", json={"model": "tiny"}).headers["ratelimit-policy"]
            statuses = {limited.get("/api/version").status_code for _ in range(40)}
        assert statuses == {200, 429}
