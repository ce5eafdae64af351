"""Anthropic's API. The bodies and headers are those that the client `anthropic` 2.14 sends, as they were recorded."""

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
BODY: dict[str, Any] = {"max_tokens": 20, "messages": ASKED, "model": "tiny"}
"""What the client sends for `messages.create(model="tiny", max_tokens=20, messages=…)`."""
HEADERS = {"anthropic-version": "2026-10-21", "x-api-key": "none"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "Rain"}


def create(service: Service, **more: Any) -> httpx.Response:
    return service.post("/v1/messages", {**BODY, **more}, headers=HEADERS)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    (block,) = response.json()["content"]
    return str(block["text"])


def events(service: Service, **more: Any) -> list[dict[str, Any]]:
    """Read a stream as the client does. Every event has its name in its data, too."""
    body = {**BODY, "stream": True, **more}
    with service.client.stream("POST", "/v1/messages", json=body, headers=HEADERS) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    named = [line.removeprefix("event: ") for line in lines[::2]]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert named == [each["type"] for each in found]
    return found


def test_a_message_has_the_answer_with_its_citations_usage_and_report(service: Service) -> None:
    own = service.post("/v1/answers", {"question": WHO}).json()
    made = create(service).json()
    (block,) = made["content"]
    assert (made["type"], made["role"], made["model"]) == ("message", "assistant", "tiny")
    assert made["id"].startswith("msg_")
    assert (block["type"], block["text"], made["stop_reason"], made["stop_sequence"]) == (
        *("text", "Ada Brook", "end_turn"),
        None,
    )
    assert made["ragkv"]["citations"] == own["citations"]
    assert block["citations"][0] == {
        "type": "search_result_location",
        "cited_text": HARBOUR["text"],
        "search_result_index": 0,
        "source": "harbour",
        "title": "Tarn",
        "start_block_index": 0,
        "end_block_index": 1,
    }
    tokens, usage = made["ragkv"]["report"]["tokens"], made["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens["context"] + tokens["question"]
    assert 0 < usage["cache_read_input_tokens"] < tokens["context"]
    assert usage["output_tokens"] == tokens["generated"] > 0


def test_a_stream_has_anthropics_events_in_their_order(service: Service) -> None:
    found = [each for each in events(service) if each["type"] != "ping"]
    names = [each["type"] for each in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert found[0]["message"]["content"] == []
    deltas = [each["delta"] for each in found[2:-3]]
    text = "".join(each["text"] for each in deltas if each["type"] == "text_delta")
    cited = [each["citation"] for each in deltas if each["type"] == "citations_delta"]
    whole = create(service).json()
    assert (text, cited) == ("Ada Brook", whole["content"][0]["citations"])
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"] == whole["usage"]
    assert found[-2]["ragkv"]["citations"] == whole["ragkv"]["citations"]


def test_parameters_reach_the_engine(service: Service) -> None:
    made = create(service, model="tiny:full", max_tokens=1, ragkv={"top_k": 1}, metadata={"user_id": "a"}).json()
    assert (made["stop_reason"], made["usage"]["output_tokens"]) == ("max_tokens", 1)
    assert made["ragkv"]["report"]["method"] == "full"
    assert len(made["ragkv"]["citations"]) == 1
    assert text_of(create(service, stop_sequences=["Brook"])) == "Ada"
    assert text_of(create(service, max_tokens=100_000)) == "Ada Brook"
    assert text_of(create(service, system=[{"type": "text", "text": "Be brief."}], temperature=0.0)) == "Ada Brook"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": WHO, "cache_control": {"type": "ephemeral"}}]}],
        [
            {"role": "user", "content": "Is it raining?"},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, CALL]},
            {"role": "user", "content": [RESULT, {"type": "text", "text": WHO}]},
        ],
        [*ASKED, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT]}],
        [
            *ASKED,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]},
            {"role": "system", "content": "Be brief."},
        ],
    ],
)
def test_histories_with_tools_and_thoughts_are_answered(service: Service, messages: list[Any]) -> None:
    assert text_of(create(service, messages=messages, tools=[{"name": "w", "input_schema": {}}])) == "Ada Brook"


def test_an_answer_goes_on_from_a_prefilled_turn(service: Service) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "Ada"}]
    assert text_of(create(service, messages=messages)) == " Brook"
    deltas = [each["delta"] for each in events(service, messages=messages) if each["type"] == "content_block_delta"]
    assert "".join(each.get("text", "") for each in deltas) == " Brook"


def test_the_tokens_of_messages_are_those_that_an_answer_reads_besides_chunks(service: Service) -> None:
    def counted(**more: Any) -> int:
        made = service.post("/v1/messages/count_tokens", {"messages": ASKED, "model": "tiny", **more})
        assert made.status_code == 200, made.text
        return int(made.json()["input_tokens"])

    for more in ({}, {"system": "Be brief."}, {"messages": [*ASKED, {"role": "assistant", "content": "Ada"}]}):
        assert counted(**more) == create(service, **more).json()["ragkv"]["report"]["tokens"]["question"]
    assert counted(system="Be brief.") > counted()
    refused = service.post("/v1/messages/count_tokens", {"messages": ASKED, "model": "claude"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")


def test_the_beta_client_finds_the_same_routes(service: Service) -> None:
    assert text_of(service.post("/v1/messages?beta=true", BODY)) == "Ada Brook"
    assert service.post("/v1/messages/count_tokens?beta=true", BODY).json()["input_tokens"] > 0


def test_a_request_for_a_title_is_answered_by_rule(service: Service) -> None:
    asked = (
        "Provide a concise, 5-word-or-less title for the conversation, using title case conventions.\n\n"
        f"Conversation:\nUser: {WHO}\nAI: Ada Brook"
    )
    made = create(service, messages=[{"role": "user", "content": asked}])
    assert text_of(made) == WHO
    assert made.json()["usage"]["output_tokens"] == 0
    assert "ragkv" not in made.json()


FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    "body",
    [{"output_config": {"format": FORMAT, "effort": "low"}}, {"output_format": FORMAT}],
    ids=["messages.create", "beta.messages.create"],
)
def test_a_format_gives_json_that_follows_its_schema(service: Service, body: dict[str, Any]) -> None:
    asked = {"max_tokens": 100, **body}
    whole = text_of(create(service, **asked))
    jsonschema.validate(json.loads(whole), SCHEMA)
    deltas = [each["delta"] for each in events(service, **asked) if each["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == whole


def test_a_config_without_a_format_gives_words(service: Service) -> None:
    for config in ({}, {"format": None}, {"effort": "high"}):
        assert text_of(create(service, output_config=config)) == "Ada Brook"


@pytest.mark.parametrize(
    ("body", "status", "kind", "told"),
    [
        ({"model": "claude"}, 404, "not_found_error", "there is no such model; use 'tiny'"),
        ({"ragkv": {"collection": "none"}}, 404, "not_found_error", "collection 'none' has no documents"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: must be a whole number"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens: must be greater than or equal to 1"),
        ({"messages": []}, 400, "invalid_request_error", "messages: "),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "invalid_request_error", "one of them must be a"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error", "image blocks are not s"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, 400, "invalid_request_error", "not supported"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice.type: other values than auto"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "invalid_request_error", "output_config.format"),
        (
            {"output_config": {"format": {"type": "x"}}},
            400,
            "invalid_request_error",
            "output_config.format.type: other",
        ),
        (
            {"output_format": {"type": "json_schema", "schema": {"type": "x"}}},
            400,
            "invalid_request_error",
            "not unders",
        ),
        ({"ragkv": {"topk": 1}}, 400, "invalid_request_error", "ragkv.topk: is no field of this request"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_has_anthropics_form(
    service: Service, body: dict[str, Any], status: int, kind: str, told: str, stream: bool
) -> None:
    refused = create(service, stream=stream, **body)
    assert refused.status_code == status, refused.text
    found = refused.json()
    assert (found["type"], found["error"]["type"]) == ("error", kind)
    assert told in found["error"]["message"]
    assert found["request_id"] == refused.headers["x-request-id"]


def test_errors_outside_the_routes_have_anthropics_form_too(service: Service) -> None:
    assert service.client.get("/v1/messages/nothing").json()["error"]["type"] == "not_found_error"
    assert service.client.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    with held(service):
        waiting = [
            service.engine_thread.submit(lambda engine: None) for _ in range(service.engine_thread.health()["queue"])
        ]
        busy = create(service)
    assert (busy.status_code, busy.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(busy.headers["retry-after"]) >= 1
    assert all(future.result(30) is None for future in waiting)


def test_a_fault_in_a_stream_is_an_event(service: Service) -> None:
    with endless(service.engine_thread):
        *_, last = events(service, max_tokens=4000, ragkv={"deadline_s": 1.5})
    assert (last["type"], last["error"]["type"]) == ("error", "timeout_error")


def test_a_stream_that_is_closed_frees_its_place(service: Service) -> None:
    with endless(service.engine_thread):
        before = service.engine_thread.health()["cancelled"]
        body = {**BODY, "stream": True, "max_tokens": 2000}
        with service.client.stream("POST", "/v1/messages", json=body) as response:
            assert next(response.iter_lines()) == "event: message_start"
        until(lambda: service.engine_thread.health()["running"] == 0)
    assert service.engine_thread.health()["cancelled"] == before + 1


def test_the_key_comes_in_anthropics_header_and_names_the_tenant(tmp_path: Any) -> None:
    (tarn, first), (mell, second) = make_key("tarn"), make_key("mell", {"tokens": 600}, role="reader")
    writer, third = make_key("mell", {"tokens": 600})
    with serving(settings(tmp_path, api_keys=",".join((first, second, third)))) as locked:
        for key, document in ((tarn, HARBOUR), (writer, BRIDGE)):
            filled = locked.post("/v1/documents?wait=true", document, headers={"x-api-key": key})
            assert filled.status_code == 200
        refused = locked.post("/v1/messages", BODY)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        for key, id in ((tarn, "harbour"), (mell, "bridge")):
            made = locked.post("/v1/messages", BODY, headers={"x-api-key": key})
            assert {each["document_id"] for each in made.json()["ragkv"]["report"]["chunks"]} == {id}
            counted = locked.post("/v1/messages/count_tokens", BODY, headers={"Authorization": f"Bearer {key}"})
            assert counted.json()["input_tokens"] > 0
        assert '"tokens";q=600' in counted.headers["ratelimit-policy"]
        left = int(counted.headers["ratelimit"].partition("r=")[2].partition(";")[0])
        assert left < 600
