"""The OpenAI-compatible routes, with and without OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from ragkv.api.routes.openai_chat import ChatTurns, continued, turns_of
from ragkv.api.schemas.openai import Chat
from tests.api.conftest import Service
from tests.api.runtime.test_answers_together import endless, until
from tests.api.test_faults import held

WHO = "Who built the harbour of Tarn?"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Rain"}
FUNCTION_RESULT = {"role": "function", "name": "f", "content": None}


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    """OpenAI's client with the address of the service."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_completion_has_the_answer_citations_and_report(service: Service, client: openai.OpenAI) -> None:
    own = service.post("/v1/answers", {"question": WHO}).json()
    made = client.chat.completions.create(model="tiny", messages=asked(WHO))
    (choice,) = made.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Ada Brook", "stop")
    assert (made.object, made.model) == ("chat.completion", "tiny")
    assert made.ragkv["citations"] == own["citations"]  # type: ignore[attr-defined]
    tokens = made.ragkv["report"]["tokens"]  # type: ignore[attr-defined]
    usage = made.usage
    assert usage is not None
    assert usage.prompt_tokens == tokens["context"] + tokens["question"]
    assert usage.completion_tokens == tokens["generated"] > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert 0 < (usage.prompt_tokens_details.cached_tokens or 0) < tokens["context"]


def test_nothing_is_cached_of_a_prompt_that_is_prefilled(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="tiny:full", messages=asked(WHO))
    assert made.ragkv["report"]["method"] == "full"  # type: ignore[attr-defined]
    assert made.usage is not None
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_completion_ends_with_citations_report_and_requested_usage(
    client: openai.OpenAI,
) -> None:
    whole = client.chat.completions.create(model="tiny", messages=asked(WHO))
    for with_usage in (False, True):
        stream = client.chat.completions.create(
            model="tiny", messages=asked(WHO), stream=True, stream_options={"include_usage": with_usage}
        )
        chunks = list(stream)
        assert len({chunk.id for chunk in chunks}) == 1
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        if with_usage:
            assert chunks.pop().usage == whole.usage
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Ada Brook"
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert chunks[-1].ragkv["citations"] == whole.ragkv["citations"]  # type: ignore[attr-defined]
        assert chunks[-1].ragkv["report"]["tokens"] == whole.ragkv["report"]["tokens"]  # type: ignore[attr-defined]


def test_the_asynchronous_client_gets_the_same_answer(service: Service) -> None:
    async def exchange() -> tuple[str | None, str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model="tiny", messages=asked(WHO))
            text, cited = "", []
            stream = await client.chat.completions.create(model="tiny", messages=asked(WHO), stream=True)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if chunk.choices[0].finish_reason:
                    cited = [each["document_id"] for each in chunk.ragkv["citations"]]  # type: ignore[attr-defined]
            return whole.choices[0].message.content, text, cited

    whole, text, cited = asyncio.run(exchange())
    assert whole == text == "Ada Brook"
    assert set(cited) == {"harbour", "bridge"}


def test_a_disconnected_stream_frees_its_place(service: Service, client: openai.OpenAI) -> None:
    with endless(service.engine_thread):
        before = service.engine_thread.health()["cancelled"]
        stream = client.chat.completions.create(model="tiny", messages=asked(WHO), stream=True, max_tokens=2000)
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        stream.close()
        until(lambda: service.engine_thread.health()["running"] == 0)
    assert service.engine_thread.health()["cancelled"] == before + 1


def test_chat_options_reach_the_engine(service: Service, client: openai.OpenAI) -> None:
    ferry = {"id": "ferry", "text": "The ferry to Ostrey is the Grey Heron.", "metadata": {"year": 2020}}
    wreck = {"id": "wreck", "text": "The ferry to Ostrey was the Black Tern.", "metadata": {"year": 1950}}
    boats = [{**each, "collection": "boats"} for each in (ferry, wreck)]
    service.post("/v1/documents?wait=true", {"documents": boats})
    made = client.chat.completions.create(
        model="tiny:reuse",
        messages=asked("What is the ferry to Ostrey?"),
        max_completion_tokens=1,
        extra_body={"ragkv": {"collection": "boats", "top_k": 2, "filter": {"year": [2019, 2020]}}},
    )
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert made.usage.completion_tokens == 1
    assert [each["document_id"] for each in made.ragkv["citations"]] == ["ferry"]  # type: ignore[attr-defined]
    assert made.ragkv["report"]["method"] == "reuse"  # type: ignore[attr-defined]
    stopped = client.chat.completions.create(model="tiny", messages=asked(WHO), stop=["Brook"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("Ada", "stop")


def test_a_seed_repeats_a_sampled_answer(service: Service, client: openai.OpenAI) -> None:
    def sampled(**more: Any) -> str | None:
        made = client.chat.completions.create(model="tiny", messages=asked(WHO), max_tokens=12, **more)
        return made.choices[0].message.content

    with endless(service.engine_thread):
        hot = {"temperature": 2.0}
        assert sampled(seed=7, **hot) == sampled(seed=7, **hot)
        assert len({sampled(**hot) for _ in range(3)} | {sampled(seed=7, **hot)}) > 1
    assert sampled(temperature=1e-30) == sampled(top_p=0, temperature=2) == sampled() == "Ada Brook"


def test_models_are_the_loaded_one_and_its_methods(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names[0] == "tiny"
    assert {"tiny:scout", "tiny:full", "tiny:epic"} <= set(names)
    assert client.models.retrieve("tiny:scout").owned_by == "ragkv"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_baselines_are_listed_for_who_asks_and_may_be_named_by_all(service: Service, client: openai.OpenAI) -> None:
    listed = {model.id for model in client.models.list()}
    everything = {each["id"] for each in service.client.get("/v1/models?all=true").json()["data"]}
    assert everything - listed == {"tiny:random", "tiny:reuse", "tiny:reuse-encoded"}
    assert listed < everything
    assert client.models.retrieve("tiny:random").id == "tiny:random"
    made = client.chat.completions.create(model="tiny:random", messages=asked(WHO))
    assert made.ragkv["report"]["method"] == "random"  # type: ignore[attr-defined]


def test_ids_of_models_have_no_blanks_and_the_name_is_understood(
    service: Service, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "Sm-135M Instruct + own adapter"
    monkeypatch.setattr(service.engine_thread, "model", name)
    ids = [model.id for model in client.models.list()]
    assert ids[0] == "Sm-135M-Instruct-own-adapter"
    assert not any(" " in each or "+" in each for each in ids)
    for model in (ids[0], name, f"{ids[0]}:scout", f"{name}:scout"):
        made = client.chat.completions.create(model=model, messages=asked(WHO))
        assert (made.model, made.choices[0].message.content) == (model, "Ada Brook")
        assert client.models.retrieve(model).id.startswith(ids[0])
    for wrong in (f"{ids[0]}x", "Sm-135M", f"{name} "):
        with pytest.raises(openai.NotFoundError, match=ids[0]):
            client.chat.completions.create(model=wrong, messages=asked(WHO))


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/v1/chat/completions", {"model": "tiny", "messages": []}, "messages: "),
        ("/v1/chat/completions", {"model": "tiny"}, "messages: is required"),
        ("/v1/embeddings", {"model": "none", "input": "x"}, "all-MiniLM-L6-v2"),
        ("/v1/embeddings", {"input": 5}, "input: "),
        ("/v1/chat/nothing", {}, "no such path; /docs lists"),
    ],
)
def test_the_sentence_of_an_error_names_the_field_as_the_client_wrote_it(
    service: Service, path: str, body: dict[str, Any], sentence: str
) -> None:
    error = service.post(path, body).json()["error"]
    assert sentence in error["message"]
    assert "body." not in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"stop": ["a"] * 5}, None),
        ({"stream": "yes"}, "stream"),
        ({"ragkv": {"colection": "x"}}, "ragkv.colection"),
        ({"ragkv": {"method": "magic"}}, None),
        ({"model": "tiny:magic"}, None),
        ({"model": "tiny:full", "ragkv": {"method": "scout"}}, None),
        ({"messages": [{"role": "user", "content": "who is it " * 3500}]}, None),
    ],
)
def test_an_invalid_request_is_an_openai_error(service: Service, body: dict[str, Any], param: str | None) -> None:
    refused = service.post("/v1/chat/completions", {"model": "tiny", "messages": asked(WHO), **body})
    error = refused.json()["error"]
    assert refused.status_code == 400, refused.text
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": WHO}, AUDIO]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages.0.content"),
    ],
)
def test_what_is_not_supported_is_said_to_be_so_with_its_name(
    service: Service, client: openai.OpenAI, body: dict[str, Any], param: str
) -> None:
    refused = service.post("/v1/chat/completions", {"model": "tiny", "messages": asked(WHO), **body})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"].startswith(f"{param}: ")
    assert "not supported" in error["message"]
    assert "; " not in error["message"].replace("; this service reads text only", ""), "one sentence"
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.chat.completions.create(**{"model": "tiny", "messages": asked(WHO), **body})


@pytest.mark.parametrize(
    ("body", "status"),
    [({"model": "gpt-4o"}, 404), ({"ragkv": {"collection": "nothing-here"}}, 404), ({"stream": True, "n": 2}, 400)],
)
def test_other_errors_are_openai_errors_too(service: Service, body: dict[str, Any], status: int) -> None:
    refused = service.post("/v1/chat/completions", {"model": "tiny", "messages": asked(WHO), **body})
    assert (refused.status_code, set(refused.json())) == (status, {"error"})
    assert set(service.client.get("/v1/chat/nothing").json()) == {"error"}
    assert service.client.get("/v1/nothing").headers["content-type"] == "application/problem+json"


def test_harmless_parameters_pass(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "You are a poet."},
            {"role": "user", "content": [{"type": "text", "text": WHO}]},
        ],
        n=1,
        user="me",
        logprobs=False,
        presence_penalty=0,
        frequency_penalty=0.0,
        tool_choice="none",
        response_format={"type": "text"},
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        extra_body={"something_new": 1},
    )
    assert made.choices[0].message.content == "Ada Brook"


@pytest.mark.parametrize(
    "messages",
    [
        [*asked(WHO), {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
        [*asked(WHO), {"role": "assistant", "content": None, "function_call": {"name": "f"}}, FUNCTION_RESULT],
        [
            *asked("Is it raining?"),
            {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
            {**RESULT, "content": [{"type": "text", "text": "Rain"}]},
            {"role": "assistant", "content": "Yes."},
            *asked(WHO),
        ],
        [*asked(WHO), {"role": "system", "content": "Answer briefly."}],
        [{"role": "system", "content": None}, *asked(WHO), {"role": "developer", "content": []}],
        [*asked(WHO), {"role": "assistant", "content": None}],
        [*asked(WHO), {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
        [{"role": "assistant", "content": "Hello!"}, *asked(WHO), {"role": "user", "content": None}],
    ],
)
def test_histories_of_other_programs_are_answered(client: openai.OpenAI, messages: list[Any]) -> None:
    made = client.chat.completions.create(model="tiny", messages=messages)
    assert made.choices[0].message.content == "Ada Brook"


@pytest.mark.parametrize("beginning", ["Ada", "Ada ", "\nAda"])
def test_an_answer_goes_on_from_the_last_message_of_the_assistant(client: openai.OpenAI, beginning: str) -> None:
    messages: list[Any] = [*asked(WHO), {"role": "assistant", "content": beginning}]
    made = client.chat.completions.create(model="tiny", messages=messages)
    rest = made.choices[0].message.content or ""
    assert f"{beginning.lstrip()}{rest}" == "Ada Brook"
    assert any(each["marks"] for each in made.ragkv["citations"])  # type: ignore[attr-defined]
    stream = client.chat.completions.create(model="tiny", messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == rest


def test_an_answer_that_begins_otherwise_is_told_as_a_whole() -> None:
    async def pieces(*texts: str) -> AsyncIterator[str]:
        for text in texts:
            yield text

    async def told(beginning: str, *texts: str) -> str:
        return "".join([piece async for piece in continued(pieces(*texts), beginning)])

    assert asyncio.run(told("Ada Br", "Ada", "", " Broo", "k")) == "ook"
    assert asyncio.run(told("Ada Brook", "Ada ", "Brook")) == ""
    assert asyncio.run(told("Calloway Yard", "unknown")) == "unknown"
    assert asyncio.run(told("", "Ada", " Brook")) == "Ada Brook"


@pytest.mark.parametrize("stop", ["", [], None, [""]])
def test_an_empty_stop_string_stops_nothing(client: openai.OpenAI, stop: Any) -> None:
    made = client.chat.completions.create(model="tiny", messages=asked(WHO), stop=stop)
    assert made.choices[0].message.content == "Ada Brook"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_minus_one_stands_for_the_limit_of_the_service(service: Service, client: openai.OpenAI, name: str) -> None:
    def length(**more: Any) -> int:
        made = client.chat.completions.create(model="tiny", messages=asked(WHO), **more)
        assert made.usage is not None
        return made.usage.completion_tokens

    with endless(service.engine_thread):
        assert length(**{name: -1}) == length() > length(**{name: 3}) == 3


def test_penalties_keep_an_answer_from_repeating_itself(service: Service, client: openai.OpenAI) -> None:
    def answered(**more: Any) -> str:
        made = client.chat.completions.create(model="tiny", messages=asked(WHO), max_tokens=64, **more)
        return made.choices[0].message.content or ""

    def repeated(text: str) -> int:
        return len(text.split()) - len(set(text.split()))

    with endless(service.engine_thread):
        plain, penalised = answered(), answered(presence_penalty=2.0, frequency_penalty=2.0)
        again = answered(frequency_penalty=-2.0)
    assert len({plain, penalised}) == 2
    assert repeated(penalised) < repeated(plain) <= repeated(again)


def test_a_full_queue_raises_the_clients_rate_limit_error(service: Service, client: openai.OpenAI) -> None:
    with held(service):
        waiting = [
            service.engine_thread.submit(lambda engine: None) for _ in range(service.engine_thread.health()["queue"])
        ]
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model="tiny", messages=asked(WHO))
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert refused.value.type == "rate_limit_error"
    assert all(future.result(30) is None for future in waiting)


def read(*messages: tuple[str, str]) -> ChatTurns:
    made = [{"role": role, "content": content} for role, content in messages]
    return turns_of(Chat.model_validate({"model": "tiny", "messages": made}))


def test_messages_keep_their_roles() -> None:
    assert read(("user", WHO)) == ChatTurns(WHO)
    chat = (("system", "Be brief."), ("user", WHO), ("assistant", "Ada Brook"), ("user", "When was it built?"))
    assert read(*chat) == ChatTurns("When was it built?", ((WHO, "Ada Brook"),), "Be brief.")
    assert read(("assistant", "Hello"), ("user", "Hm."), ("user", WHO)) == ChatTurns(f"Hm.\n{WHO}")
    assert read(("user", WHO), ("assistant", ""), ("user", "And when?")).question == f"{WHO}\nAnd when?"
    late = (("user", WHO), ("assistant", "Ada"), ("assistant", "Brook"), ("user", "When?"), ("system", "Be brief."))
    assert read(*late) == ChatTurns("When?", ((WHO, "Ada\nBrook"),), "Be brief.")
    assert read(*late[:3]) == ChatTurns(WHO, beginning="Brook")
    assert read(("user", WHO), ("assistant", "Ada"), ("system", "Be brief.")) == ChatTurns(WHO, (), "Be brief.")


def test_a_follow_up_question_retrieves_the_document_of_the_earlier_one(client: openai.OpenAI) -> None:
    messages = [*asked(WHO), {"role": "assistant", "content": "Ada Brook"}, *asked("And when was it built?")]
    made = client.chat.completions.create(model="tiny", messages=messages, extra_body={"ragkv": {"top_k": 1}})
    assert made.ragkv["citations"][0]["document_id"] == "harbour"  # type: ignore[attr-defined]


def test_a_system_message_and_earlier_turns_are_read(client: openai.OpenAI) -> None:
    def prompt_tokens(*messages: tuple[str, str]) -> int:
        made = client.chat.completions.create(
            model="tiny", messages=[{"role": role, "content": text} for role, text in messages], max_tokens=1
        )
        assert made.usage is not None
        return made.usage.prompt_tokens

    alone = prompt_tokens(("user", WHO))
    told = prompt_tokens(("system", "Answer in one word."), ("user", WHO))
    after = prompt_tokens(("user", WHO), ("assistant", "Ada Brook"), ("user", WHO))
    assert alone < told < after


def test_what_does_not_fit_of_the_earlier_turns_is_left_out_from_the_beginning(client: openai.OpenAI) -> None:
    turns = [("user", WHO), ("assistant", "Ada Brook " * 100)] * 20
    messages: Any = [{"role": role, "content": text} for role, text in (*turns, ("user", WHO))]
    made = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    assert made.choices[0].message.content


WHO_BUILT = {
    "type": "object",
    "properties": {"builder": {"type": "string"}, "year": {"type": ["integer", "null"]}},
    "required": ["builder", "year"],
    "additionalProperties": False,
}


def test_a_response_format_gives_json_that_follows_its_schema(client: openai.OpenAI) -> None:
    schema = {"name": "harbour", "schema": WHO_BUILT, "strict": True}
    wanted: Any = {"type": "json_schema", "json_schema": schema}
    made = client.chat.completions.create(model="tiny", messages=asked(WHO), response_format=wanted)
    jsonschema.validate(json.loads(made.choices[0].message.content or ""), WHO_BUILT)
    assert made.choices[0].finish_reason == "stop"
    pieces = client.chat.completions.create(model="tiny", messages=asked(WHO), response_format=wanted, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == made.choices[0].message.content


def test_an_object_is_any_object(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="tiny", messages=asked(WHO), response_format={"type": "json_object"})
    assert isinstance(json.loads(made.choices[0].message.content or ""), dict)


def test_a_type_of_the_client_is_filled(client: openai.OpenAI) -> None:
    class Harbour(BaseModel):
        builder: str
        year: int | None

    made = client.chat.completions.parse(model="tiny", messages=asked(WHO), response_format=Harbour)
    assert isinstance(made.choices[0].message.parsed, Harbour)


def test_a_schema_that_is_not_understood_says_why(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match="schema is not understood"):
        client.chat.completions.create(model="tiny", messages=asked(WHO), response_format=wanted)
    with pytest.raises(openai.BadRequestError, match="json_schema is missing"):
        client.chat.completions.create(model="tiny", messages=asked(WHO), response_format={"type": "json_schema"})  # type: ignore[typeddict-item]
