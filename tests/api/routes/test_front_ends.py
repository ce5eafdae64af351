"""Requests as chat programs build them: Open WebUI, LibreChat, LangChain and OpenAI's own client.

The bodies are those that Open WebUI 0.12, LibreChat 0.8 and `ChatOpenAI` of langchain-openai 1.7 send to an
OpenAI-compatible address.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from ragkv.api.routes.openai_tasks import LONGEST_TITLE, task_reply
from tests.api.conftest import HARBOUR, Service

WHO = "Who built the harbour of Tarn?"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_current_timestamp",
        "description": "Get the current Unix timestamp.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
TASK = """### Task:
Generate a concise title for the chat.
### Guidelines:
- Keep it short.
### Output:
JSON format: {{ "{member}": {example} }}
### Chat History:
<chat_history>
USER: {question}
ASSISTANT: Ada Brook
</chat_history>"""


def open_webui(question: str = WHO, **more: Any) -> dict[str, Any]:
    """What Open WebUI sends for a chat with its own tools, which it offers by default."""
    system = {"role": "system", "content": "You have access to tools."}
    return {
        "stream": True,
        "model": "tiny",
        "messages": [system, {"role": "user", "content": question}],
        "tools": [TOOL],
        "stream_options": {"include_usage": True},
        **more,
    }


def chunks(service: Service, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Read a stream as Open WebUI does: line by line."""
    with service.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line[5:].strip() for line in response.iter_lines() if line.startswith("data:")]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


def test_open_webui_lists_the_models(service: Service) -> None:
    models = service.client.get("/v1/models").json()
    assert models["object"] == "list"
    assert all(set(each) == {"id", "object", "created", "owned_by"} for each in models["data"])
    assert service.client.get("/v1/models/tiny").json()["id"] == "tiny"


def test_open_webui_gets_the_text_the_sources_and_the_usage(service: Service) -> None:
    found = chunks(service, open_webui())
    usage = found.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in found) == "Ada Brook"
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
    events = [each["event"] for each in found if "event" in each]
    assert {event["type"] for event in events} == {"source"}
    (harbour,) = [event["data"] for event in events if event["data"]["source"]["id"] == "harbour"]
    assert harbour == {
        "source": {"id": "harbour", "name": "Tarn"},
        "document": [HARBOUR["text"]],
        "metadata": [{"source": "harbour", "name": "Tarn"}],
    }


def test_the_sources_of_pages_and_addresses_can_be_opened(service: Service) -> None:
    address = "https://example.org/mill"
    service.post(
        "/v1/documents?wait=true", {"id": address, "text": "The mill of Orm is blue.", "collection": "addresses"}
    )
    body = open_webui("What colour is the mill of Orm?", ragkv={"collection": "addresses"})
    (event,) = [each["event"] for each in chunks(service, body) if "event" in each]
    assert event["data"]["source"] == {"id": address, "name": address, "url": address}


def test_parameters_that_open_webui_lets_users_set_are_honoured_or_ignored(service: Service) -> None:
    advanced = {
        "temperature": 0.0,
        "top_p": 0.9,
        "min_p": 0.0,
        "top_k": 40,
        "repeat_penalty": 1.1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "max_tokens": 128_000,
        "seed": 42,
        "stop": ["\n\n"],
        "logit_bias": {},
        "keep_alive": "5m",
        "num_ctx": 2048,
        "reasoning_effort": "low",
        "user": {"name": "Ann", "id": "7", "email": "ann@example.org", "role": "user"},
    }
    found = chunks(service, open_webui(**advanced))
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in found[:-1]) == "Ada Brook"
    impossible = {"response_format": {"type": "grammar"}, "n": 2, "tool_choice": "required"}
    for name, value in impossible.items():
        refused = service.post("/v1/chat/completions", open_webui(**{name: value}))
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error"), name


@pytest.mark.parametrize(
    ("member", "example", "reply"),
    [
        ("title", '"your concise title here"', WHO),
        ("tags", '["tag1", "tag2"]', []),
        ("follow_ups", '["Question 1?"]', []),
        ("queries", '["query1"]', []),
    ],
)
def test_open_webui_gets_titles_and_the_like_without_documents(
    service: Service, member: str, example: str, reply: Any
) -> None:
    asked = TASK.format(member=member, example=example, question=WHO)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": asked}],
        "stream": False,
        "max_completion_tokens": 1000,
    }
    made = service.post("/v1/chat/completions", body).json()
    assert json.loads(made["choices"][0]["message"]["content"]) == {member: reply}
    assert made["choices"][0]["finish_reason"] == "stop"
    assert made["usage"]["total_tokens"] == 0
    assert "ragkv" not in made
    streamed = chunks(service, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.pop()["usage"]["total_tokens"] == 0
    text = "".join(each["choices"][0]["delta"].get("content") or "" for each in streamed)
    assert json.loads(text) == {member: reply}
    assert service.post("/v1/chat/completions", {**body, "model": "gpt-4o"}).status_code == 404


def test_a_title_is_the_first_question_cut_at_a_word() -> None:
    question = "Who built the harbour of Tarn, and when did the work on it begin, if anybody knows that?"
    made = task_reply(TASK.format(member="title", example='"x"', question=question))
    assert made is not None
    title = json.loads(made)["title"]
    assert title == "Who built the harbour of Tarn, and when did the work on it…"
    assert len(title) <= LONGEST_TITLE


def test_what_only_looks_like_a_task_is_a_question() -> None:
    assert task_reply(WHO) is None
    assert task_reply("### Task:\nWho built the harbour?") is None
    assert task_reply("Provide a concise, 5-word-or-less title for the conversation") is None


def test_librechat_chats_and_gets_a_title(service: Service) -> None:
    body = {
        "model": "tiny",
        "temperature": 1e-9,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "65f0a1",
        "messages": [{"role": "user", "content": [{"type": "text", "text": WHO}]}],
    }
    found = chunks(service, body)
    assert found.pop()["usage"]["prompt_tokens"] > 0
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in found) == "Ada Brook"
    asked = (
        "Provide a concise, 5-word-or-less title for the conversation, using title case conventions. Only return the "
        f"title itself.\n\nConversation:\nUser: {WHO}\nAI: Ada Brook"
    )
    made = service.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": asked}]})
    assert made.json()["choices"][0]["message"]["content"] == WHO


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"properties": {"city": {"type": "string"}}, "required": ["city"], "type": "object"},
    },
}
"""A tool as `bind_tools` has it."""
CALL = {"type": "function", "id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Tarn"}'}}
AGENT: list[dict[str, Any]] = [
    {"content": "Be brief", "role": "system"},
    {"content": "Is it raining in Tarn?", "role": "user"},
    {"content": None, "role": "assistant", "tool_calls": [CALL]},
    {"content": "Rain", "role": "tool", "tool_call_id": "call_1"},
    {"content": "Yes.", "role": "assistant"},
    {"content": WHO, "role": "user"},
]
"""What another model and its tools said before the question."""
BUILT = {
    "description": "Who built what.",
    "properties": {
        "builder": {"title": "Builder", "type": "string"},
        "year": {"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "Year"},
    },
    "required": ["builder", "year"],
    "title": "Built",
    "type": "object",
    "additionalProperties": False,
}
"""A pydantic model as `with_structured_output` has it."""


def langchain(**more: Any) -> dict[str, Any]:
    """What `ChatOpenAI(…, extra_body={"ragkv": {"top_k": 2}})` sends."""
    asked = [{"content": WHO, "role": "user"}]
    return {"model": "tiny", "stream": False, "messages": asked, "ragkv": {"top_k": 2}, **more}


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER]}, {"tools": [WEATHER], "messages": AGENT}])
def test_langchain_gets_an_answer_beside_tools_and_behind_their_calls(service: Service, more: dict[str, Any]) -> None:
    made = service.post("/v1/chat/completions", langchain(**more)).json()
    (choice,) = made["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Ada Brook", "stop")
    assert "tool_calls" not in choice["message"]
    assert len(made["ragkv"]["citations"]) == 2
    streamed = chunks(service, langchain(**more, stream=True))
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in streamed) == "Ada Brook"


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "json_schema", "json_schema": {"schema": BUILT, "name": "Built", "strict": True}}, BUILT),
        ({"type": "json_object"}, {"type": "object"}),
    ],
    ids=["json_schema", "json_mode"],
)
def test_langchain_gets_structured_output(service: Service, form: dict[str, Any], schema: dict[str, Any]) -> None:
    made = service.post("/v1/chat/completions", langchain(response_format=form, max_completion_tokens=100)).json()
    jsonschema.validate(json.loads(made["choices"][0]["message"]["content"]), schema)


def test_langchains_structured_output_by_function_calling_is_told_to_use_a_schema(service: Service) -> None:
    forced = {"type": "function", "function": {"name": "Built"}}
    refused = service.post(
        "/v1/chat/completions", langchain(tools=[WEATHER], tool_choice=forced, parallel_tool_calls=False)
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("tool_choice: other values than none and auto")


def test_langchain_by_responses_gets_an_answer_behind_calls(service: Service) -> None:
    """As with `use_responses_api=True`."""
    tool = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
    items = [
        {"content": "Be brief", "role": "system", "type": "message"},
        {"content": "Is it raining in Tarn?", "role": "user", "type": "message"},
        {"type": "function_call", "name": "weather", "arguments": '{"city": "Tarn"}', "call_id": "call_1"},
        {"type": "function_call_output", "output": "Rain", "call_id": "call_1"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
        },
        {"content": WHO, "role": "user", "type": "message"},
    ]
    made = service.post("/v1/responses", {"model": "tiny", "stream": False, "input": items, "tools": [tool]}).json()
    assert made["output"][0]["content"][0]["text"] == "Ada Brook"


def test_openais_client_reads_a_stream_with_sources(service: Service) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": WHO}],
            stream=True,
            tools=[TOOL],  # type: ignore[list-item]  # a plain dictionary
            tool_choice="auto",
        )
        made = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in made) == "Ada Brook"
    assert not any(chunk.choices[0].delta.tool_calls for chunk in made)
    assert made[-1].choices[0].finish_reason == "stop"
