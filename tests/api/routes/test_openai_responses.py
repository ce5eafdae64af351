"""OpenAI's Responses API, with OpenAI's own client: responses, their events, and conversations of responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from ragkv.api.middleware.keys import make_key
from tests.api.conftest import BRIDGE, HARBOUR, Service, serving, settings
from tests.api.routes.test_structured import SCHEMA
from tests.api.runtime.test_answers_together import endless, until

WHO = "Who built the harbour of Tarn?"
WHEN = "And when was it built?"
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "Rain"}


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    """OpenAI's client with the address of the service."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def create(client: openai.OpenAI, asked: Any = WHO, **more: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": asked, **more})


def earlier_tokens(response: Any) -> float:
    tokens: dict[str, float] = response.ragkv["report"]["tokens"]
    return tokens["history"]


def test_a_response_has_the_answer_its_citations_usage_and_report(service: Service, client: openai.OpenAI) -> None:
    own = service.post("/v1/answers", {"question": WHO}).json()
    made = create(client)
    assert (made.object, made.status, made.output_text, made.error) == ("response", "completed", "Ada Brook", None)
    assert made.ragkv["citations"] == own["citations"]
    (part,) = made.output[0].content
    assert [(each.type, each.file_id, each.filename, each.index) for each in part.annotations] == [
        ("file_citation", "harbour", "Tarn", 0),
        ("file_citation", "bridge", "Mell", 1),
    ]
    tokens = made.ragkv["report"]["tokens"]
    assert made.usage.input_tokens == tokens["context"] + tokens["question"]
    assert 0 < made.usage.input_tokens_details.cached_tokens < tokens["context"]
    assert made.usage.output_tokens == tokens["generated"] > 0
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens


def test_a_document_with_an_address_is_cited_as_a_link(service: Service, client: openai.OpenAI) -> None:
    mill = {"id": "https://example.org/mill", "text": "The mill of Orm is blue.", "collection": "links"}
    service.post("/v1/documents?wait=true", mill)
    made = create(client, "What colour is the mill of Orm?", extra_body={"ragkv": {"collection": "links"}})
    (cited,) = made.output[0].content[0].annotations
    assert (cited.type, cited.url, cited.start_index) == ("url_citation", "https://example.org/mill", 0)
    assert cited.end_index == len(made.output_text)


def test_a_stream_has_openais_events_in_their_order(client: openai.OpenAI) -> None:
    events = list(create(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(names[4:-4]) == {"output_text.delta", "output_text.annotation.added"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Ada Brook"
    assert len({event.response.id for event in (events[0], events[-1])}) == 1
    whole = events[-1].response
    added = [event.annotation for event in events if event.type == "response.output_text.annotation.added"]
    assert [each.file_id for each in added] == ["harbour", "bridge"]
    assert whole.ragkv["citations"] == create(client).ragkv["citations"]
    with client.responses.stream(model="tiny", input=WHO) as stream:
        assert stream.get_final_response().output_text == "Ada Brook"


def test_an_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    made = create(client, max_output_tokens=1)
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (made.usage.output_tokens, made.max_output_tokens) == (1, 1)
    *_, last = create(client, max_output_tokens=1, stream=True)
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_parameters_reach_the_engine_and_are_returned(client: openai.OpenAI) -> None:
    harmless: Any = {"metadata": {"a": "b"}, "truncation": "auto", "include": [], "reasoning": {"effort": "low"}}
    harmless |= {"tools": [{"type": "file_search"}], "text": {"format": {"type": "text"}}, "background": False}
    made = create(client, model="tiny:full", instructions="Be brief.", extra_body={"ragkv": {"top_k": 1}}, **harmless)
    assert (made.output_text, made.ragkv["report"]["method"]) == ("Ada Brook", "full")
    assert len(made.ragkv["citations"]) == 1
    assert (made.instructions, made.metadata, made.model) == ("Be brief.", {"a": "b"}, "tiny:full")
    assert made.ragkv["report"]["tokens"]["question"] > create(client).ragkv["report"]["tokens"]["question"]


@pytest.mark.parametrize(
    "items",
    [
        [{"role": "user", "content": WHO}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": WHO}]}],
        [{"role": "user", "content": WHO}, CALL, RESULT],
        [
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": WHO},
        ],
        [
            {"role": "user", "content": "Is it raining?"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
            {"role": "user", "content": WHO},
        ],
    ],
)
def test_items_of_other_programs_are_answered(client: openai.OpenAI, items: list[Any]) -> None:
    assert create(client, items).output_text == "Ada Brook"


def test_the_text_follows_a_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "harbour", "schema": SCHEMA, "strict": True}
    made = create(client, text={"format": form})
    jsonschema.validate(json.loads(made.output_text), SCHEMA)
    assert (made.text.format.type, made.text.format.name) == ("json_schema", "harbour")
    assert isinstance(json.loads(create(client, text={"format": {"type": "json_object"}}).output_text), dict)


def test_a_greeting_that_has_to_follow_a_schema_is_a_turn_and_goes_on(client: openai.OpenAI) -> None:
    form = {"format": {"type": "json_schema", "name": "harbour", "schema": SCHEMA}}
    first = create(client, "hello", text=form)
    jsonschema.validate(json.loads(first.output_text), SCHEMA)
    assert first.ragkv["report"]["rule"] == ""
    second = create(client, WHO, previous_response_id=first.id)
    assert earlier_tokens(second) > 0, "no rule answered it, so the conversation has it"


def test_the_output_of_a_response_can_be_sent_back_as_input(client: openai.OpenAI) -> None:
    first = create(client)
    items = [{"role": "user", "content": WHO}, *first.output, {"role": "user", "content": WHEN}]
    made = create(client, items, extra_body={"ragkv": {"top_k": 1}})
    assert made.output_text == "1889"
    assert made.store is False


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_continues_another_one_and_reuses_its_context(client: openai.OpenAI, stream: bool) -> None:
    def continued(response: Any, asked: str) -> Any:
        made = create(client, asked, previous_response_id=response.id, stream=stream)
        return list(made)[-1].response if stream else made

    first = create(client)
    second = continued(first, WHEN)
    assert (second.output_text, second.previous_response_id) == ("1889", first.id)
    assert earlier_tokens(second) > earlier_tokens(first) == 0
    third = continued(second, WHO)
    assert earlier_tokens(third) > earlier_tokens(second)
    assert [client.responses.retrieve(each.id).output_text for each in (first, second, third)] == [
        *("Ada Brook", "1889", "Ada Brook"),
    ]


def test_a_response_can_be_continued_twice(client: openai.OpenAI) -> None:
    first = create(client)
    second = create(client, WHEN, previous_response_id=first.id)
    branch = create(client, WHEN, previous_response_id=first.id)
    assert (branch.output_text, second.output_text) == ("1889", "1889")
    after = create(client, WHO, previous_response_id=branch.id)
    assert after.output_text == "Ada Brook"
    assert earlier_tokens(after) > 0
    client.responses.delete(second.id)
    assert client.responses.retrieve(branch.id).output_text == "1889"


def test_a_greeting_is_continued_though_no_conversation_keeps_it(client: openai.OpenAI) -> None:
    greeted = create(client, "hello")
    assert greeted.ragkv["report"]["rule"] == "greeting"
    first = create(client, WHO, previous_response_id=greeted.id)
    thanked = create(client, "thanks", previous_response_id=first.id)
    last = create(client, WHEN, previous_response_id=thanked.id)
    assert (first.output_text, last.output_text) == ("Ada Brook", "1889")
    assert earlier_tokens(last) > 0
    assert client.responses.retrieve(last.id).output_text == "1889"
    for unkept in (greeted, thanked):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            client.responses.retrieve(unkept.id)
    again = create(client, WHO, previous_response_id=greeted.id)
    assert (again.output_text, earlier_tokens(again)) == ("Ada Brook", 0)


def test_a_response_that_is_not_stored_is_continued_by_nothing(client: openai.OpenAI) -> None:
    alone = create(client, store=False)
    assert alone.store is False
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(alone.id)
    first = create(client)
    aside = create(client, WHEN, previous_response_id=first.id, store=False)
    assert (aside.output_text, aside.store) == ("1889", False)
    assert create(client, WHEN, previous_response_id=first.id).id.split("_")[1] == first.id.split("_")[1]


def test_a_deleted_response_goes_with_its_conversation(service: Service, client: openai.OpenAI) -> None:
    first = create(client)
    second = create(client, WHEN, previous_response_id=first.id)
    removed = service.client.delete(f"/v1/responses/{first.id}").json()
    assert removed == {"id": first.id, "object": "response", "deleted": True}
    for made in (first, second):
        with pytest.raises(openai.NotFoundError, match="deleted"):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="deleted"):
        create(client, WHO, previous_response_id=first.id)


def test_the_text_of_a_deleted_document_is_in_no_response(service: Service, client: openai.OpenAI) -> None:
    tower = {"id": "tower", "text": "The tower of Ulm was built by Ida Fern.", "collection": "towers"}
    service.post("/v1/documents?wait=true", tower)
    own: Any = {"extra_body": {"ragkv": {"collection": "towers"}}}
    first = create(client, "Who built the tower of Ulm?", **own)
    second = create(client, "Who built it?", previous_response_id=first.id, **own)
    assert "Ida Fern" in first.output_text
    where: Any = {"extra_query": {"collection": "towers"}}
    assert client.responses.retrieve(first.id, **where).output_text == first.output_text
    assert service.client.delete("/v1/documents/tower?collection=towers").status_code == 204
    service.post("/v1/documents?wait=true", {**tower, "id": "gate", "text": "The gate of Ulm is red."})
    assert client.responses.retrieve(first.id, **where).output_text == ""
    for previous in (first, second):
        after = create(client, "Who built the tower of Ulm?", previous_response_id=previous.id, **own)
        assert "Ida" not in after.output_text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_is_not_supported_is_said_to_be_so(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{param}: .*not supported") as refused:
        create(client, **{"asked": body.get("input", WHO), **{k: v for k, v in body.items() if k != "input"}})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"input": ""}, 400),
        ({"input": []}, 400),
        ({"input": [{"role": "assistant", "content": "x"}]}, 400),
        ({"input": None}, 400),
        ({"model": "gpt-5"}, 404),
        ({"previous_response_id": "resp_1"}, 404),
        ({"previous_response_id": f"resp_{'0' * 24}_3_{'0' * 8}"}, 404),
        ({"ragkv": {"collection": "none"}}, 404),
        ({"model": "tiny:multi-infllm", "store": True}, 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_other_errors_are_openais_too(service: Service, body: dict[str, Any], status: int, stream: bool) -> None:
    refused = service.post("/v1/responses", {"model": "tiny", "input": WHO, "stream": stream, **body})
    assert refused.status_code == status, refused.text
    assert set(refused.json()["error"]) == {"message", "type", "param", "code"}


def test_a_method_without_conversations_answers_and_stores_nothing(client: openai.OpenAI) -> None:
    made = create(client, model="tiny:multi-infllm")
    assert made.status == "completed"
    assert made.store is False


def test_a_fault_in_a_stream_is_raised_with_its_sentence(service: Service, client: openai.OpenAI) -> None:
    with endless(service.engine_thread), pytest.raises(openai.APIError, match="in time"):
        list(create(client, stream=True, max_output_tokens=4000, extra_body={"ragkv": {"deadline_s": 1.5}}))


def test_a_stream_that_is_closed_frees_its_place(service: Service, client: openai.OpenAI) -> None:
    with endless(service.engine_thread):
        before = service.engine_thread.health()["cancelled"]
        stream = create(client, stream=True, max_output_tokens=2000)
        assert next(iter(stream)).type == "response.created"
        stream.close()
        until(lambda: service.engine_thread.health()["running"] == 0)
    assert service.engine_thread.health()["cancelled"] == before + 1


def test_responses_belong_to_their_tenant(tmp_path: Any) -> None:
    (tarn, first), (mell, second), (reader, third) = make_key("tarn"), make_key("mell"), make_key("tarn", role="reader")
    with serving(settings(tmp_path, api_keys=",".join((first, second, third)))) as locked:
        with httpx.Client(base_url=locked.url) as nobody:
            refused = nobody.post("/v1/responses", json={"model": "tiny", "input": WHO})
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        clients = {}
        for key in (tarn, mell, reader):
            clients[key] = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0)
        for key, document in ((tarn, HARBOUR), (mell, BRIDGE)):
            headers = {"Authorization": f"Bearer {key}"}
            assert locked.post("/v1/documents?wait=true", document, headers=headers).status_code == 200
        made = create(clients[reader])
        assert {each["document_id"] for each in made.ragkv["report"]["chunks"]} == {"harbour"}
        assert clients[tarn].responses.retrieve(made.id).output_text == "Ada Brook"
        for use in (clients[mell].responses.retrieve, clients[mell].responses.delete):
            with pytest.raises(openai.NotFoundError):
                use(made.id)
        with pytest.raises(openai.NotFoundError):
            create(clients[mell], WHEN, previous_response_id=made.id, store=True)
        clients[reader].responses.delete(made.id)
        for opened in clients.values():
            opened.close()
