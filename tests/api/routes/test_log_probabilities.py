"""Log probabilities as clients of OpenAI's and Ollama's APIs get them, whole and in streams."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from ragkv.api.routes.log_probabilities import TokenLists, token_entries
from ragkv.engine.decoding import generate
from ragkv.engine.engine import Engine
from ragkv.engine.token_scores import TokenScore
from ragkv.types import AskOptions
from tests.api.conftest import Service
from tests.api.runtime.test_answers_together import endless

WHO = "Who built the harbour of Tarn?"
ASKED: Any = [{"role": "user", "content": WHO}]
INCLUDED: Any = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def own(service: Service) -> Sequence[TokenScore]:
    """The same answer, decoded without the service's loop."""

    def scored(engine: Engine) -> Sequence[TokenScore]:
        request = engine.prefill(WHO, AskOptions(top_log_probabilities=3))
        list(generate(engine.model, request.sequence))
        return request.detokenizer.scores_of("Ada Brook")

    return service.engine_thread.submit(scored).result(60)


def assert_scores(entries: Sequence[Any], own: Sequence[TokenScore], top: int = 3) -> None:
    """OpenAI's entries are those of the engine."""
    assert len(entries) == len(own)
    for entry, score in zip(entries, own, strict=True):
        assert entry.token == score.text.decode()
        assert entry.logprob == pytest.approx(score.log_probability, abs=1e-3)
        found = [(bytes(each.bytes), each.logprob) for each in entry.top_logprobs]
        assert [text for text, _ in found] == [text for text, _ in score.likely[:top]]
        assert [value for _, value in found] == pytest.approx([value for _, value in score.likely[:top]], abs=1e-3)


def test_a_chat_has_those_of_each_token_of_its_text(client: openai.OpenAI, own: Sequence[TokenScore]) -> None:
    for top in (0, 1, 3):
        made = client.chat.completions.create(model="tiny", messages=ASKED, logprobs=True, top_logprobs=top)
        (choice,) = made.choices
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert_scores(choice.logprobs.content, own, top)
        said = b"".join(bytes(each.bytes or []) for each in choice.logprobs.content)
        assert said.decode().strip() == choice.message.content == "Ada Brook"
    assert made.choices[0].logprobs is not None
    bare = client.chat.completions.create(model="tiny", messages=ASKED)
    assert bare.choices[0].logprobs is None


def test_the_chunks_of_a_chat_have_those_of_their_text(client: openai.OpenAI, own: Sequence[TokenScore]) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=ASKED, logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True}
    )
    entries, text = [], ""
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            entries += (choice.logprobs and choice.logprobs.content) or []
            said = b"".join(bytes(each.bytes or []) for each in entries).decode().lstrip()
            assert said.startswith(text), "no text comes before its tokens"
    assert_scores(entries, own)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_them_as_lists(client: openai.OpenAI, own: Sequence[TokenScore], stream: bool) -> None:
    asked: Any = {"model": "tiny", "prompt": WHO, "logprobs": 2}
    made: Any = client.completions.create(**asked, stream=stream)
    choices = [choice for chunk in made for choice in chunk.choices] if stream else made.choices
    text = "".join(choice.text for choice in choices)
    lists = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for each in lists for token in each.tokens]
    assert tokens == [score.text.decode() for score in own]
    values = [value for each in lists for value in each.token_logprobs]
    assert values == pytest.approx([score.log_probability for score in own], abs=1e-3)
    for likely, score in zip([each for part in lists for each in part.top_logprobs], own, strict=True):
        assert likely.keys() == {found.decode() for found, _ in score.likely[:2]} | {score.text.decode()}
    offsets = [offset for each in lists for offset in each.text_offset]
    assert [text[at:].startswith(token.lstrip()) for at, token in zip(offsets[:1], tokens, strict=False)] == [True]
    assert [text[at:].startswith(token) for at, token in zip(offsets[1:], tokens[1:], strict=True)] == [True] * (
        len(tokens) - 1
    )
    assert client.completions.create(model="tiny", prompt=WHO).choices[0].logprobs is None


@pytest.mark.parametrize("more", [{"include": INCLUDED, "top_logprobs": 3}, {"top_logprobs": 3}, {"include": INCLUDED}])
def test_a_response_has_them_where_they_are_included(
    client: openai.OpenAI, own: Sequence[TokenScore], more: dict[str, Any]
) -> None:
    top = more.get("top_logprobs", 0)
    made = client.responses.create(model="tiny", input=WHO, store=False, **more)
    (part,) = made.output[0].content  # type: ignore[union-attr]
    assert_scores(part.logprobs, own, top)  # type: ignore[union-attr, arg-type]
    assert made.top_logprobs == top
    pieces, done = [], None
    for event in client.responses.create(model="tiny", input=WHO, store=False, stream=True, **more):
        if event.type == "response.output_text.delta":
            pieces += event.logprobs
        if event.type == "response.output_text.done":
            done = event.logprobs
    assert [(each.token, each.logprob) for each in pieces] == [(each.token, each.logprob) for each in done or []]
    assert [each.token for each in pieces] == [score.text.decode() for score in own]
    assert {len(each.top_logprobs or []) for each in pieces} == {top}


def test_a_response_without_them_has_none(client: openai.OpenAI) -> None:
    made = client.responses.create(model="tiny", input=WHO, include=["reasoning.encrypted_content"])
    (part,) = made.output[0].content  # type: ignore[union-attr]
    assert not part.logprobs  # type: ignore[union-attr]
    again = client.responses.retrieve(made.id)
    assert not again.output[0].content[0].logprobs  # type: ignore[union-attr]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollamas_lines_have_them(service: Service, own: Sequence[TokenScore], path: str) -> None:
    asked = {"model": "tiny", "messages": ASKED, "prompt": WHO, "logprobs": True, "top_logprobs": 1}
    whole = service.post(path, {**asked, "stream": False}).json()
    lines = [json.loads(line) for line in service.post(path, asked).text.splitlines()]
    for entries in (whole["logprobs"], [each for line in lines for each in line.get("logprobs", [])]):
        assert [each["token"] for each in entries] == [score.text.decode() for score in own]
        assert [len(each["top_logprobs"]) for each in entries] == [1] * len(own)
    assert "logprobs" not in service.post(path, {**asked, "stream": False, "logprobs": False}).json()


def test_they_are_of_the_models_own_distribution_whatever_samples(
    service: Service, client: openai.OpenAI, own: Sequence[TokenScore]
) -> None:
    """The first token is that of the greedy answer or another one; its place has the same distribution."""
    hot: dict[str, Any] = {"temperature": 2.0, "top_p": 0.9, "presence_penalty": 2.0, "seed": 5}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Ada", "Otto"]}}}
    for more in (hot, {"response_format": schema}):
        made = client.chat.completions.create(
            model="tiny", messages=ASKED, logprobs=True, top_logprobs=3, max_tokens=4, **more
        )
        assert made.choices[0].logprobs is not None
        first = (made.choices[0].logprobs.content or [])[0]
        assert [bytes(each.bytes or []) for each in first.top_logprobs] == [text for text, _ in own[0].likely]
        assert [each.logprob for each in first.top_logprobs] == pytest.approx(
            [value for _, value in own[0].likely], abs=1e-3
        )
    assert first.token not in [each.token for each in first.top_logprobs], "the schema wants a quotation mark"
    assert first.logprob < first.top_logprobs[-1].logprob


def test_a_stop_string_cuts_tokens_as_it_cuts_text(client: openai.OpenAI, own: Sequence[TokenScore]) -> None:
    made = client.chat.completions.create(model="tiny", messages=ASKED, logprobs=True, stop="Brook")
    assert made.choices[0].logprobs is not None
    entries = made.choices[0].logprobs.content or []
    text = b"".join(bytes(each.bytes or []) for each in entries).decode().strip()
    assert (text, made.choices[0].message.content) == ("Ada", "Ada")


def test_a_continued_answer_has_those_of_what_follows(client: openai.OpenAI) -> None:
    begun: Any = [*ASKED, {"role": "assistant", "content": "Ada"}]
    whole = client.chat.completions.create(model="tiny", messages=begun, logprobs=True)
    stream = client.chat.completions.create(model="tiny", messages=begun, logprobs=True, stream=True)
    streamed = [each for chunk in stream for choice in chunk.choices for each in _content(choice)]
    for entries in (_content(whole.choices[0]), streamed):
        assert b"".join(bytes(each.bytes) for each in entries).decode() == whole.choices[0].message.content == " Brook"


def _content(choice: Any) -> list[Any]:
    return (choice.logprobs and choice.logprobs.content) or []


def test_what_a_rule_says_has_no_tokens(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}], logprobs=True)
    assert made.choices[0].message.content
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.content == []


def test_long_answers_have_one_for_each_token_in_streams_too(service: Service, client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": ASKED, "logprobs": True, "max_tokens": 150}
    with endless(service.engine_thread):
        whole = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(**asked, stream=True)
        streamed = [each for chunk in stream for choice in chunk.choices for each in _content(choice)]
    assert whole.usage is not None
    assert len(_content(whole.choices[0])) > 100
    assert [each.token for each in streamed] == [each.token for each in _content(whole.choices[0])]
    assert all(math.isfinite(each.logprob) and each.logprob <= 0 for each in streamed)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs needs logprobs: true"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs: must be less than"),
        ("/v1/chat/completions", {"logprobs": "many"}, "logprobs: "),
        ("/v1/completions", {"logprobs": 21}, "logprobs: must be less than"),
        ("/v1/completions", {"logprobs": -1}, "logprobs: must be greater than"),
        ("/v1/responses", {"top_logprobs": 21}, "top_logprobs: must be less than"),
        ("/v1/responses", {"include": "x"}, "include: "),
    ],
)
def test_more_than_there_is_is_refused_by_name(service: Service, path: str, body: dict[str, Any], told: str) -> None:
    refused = service.post(path, {"model": "tiny", "messages": ASKED, "prompt": WHO, "input": WHO, **body})
    assert refused.status_code == 400
    assert told in refused.json()["error"]["message"]


def test_a_part_of_a_character_is_shown_by_its_bytes() -> None:
    scores = [TokenScore(b" \xf0\x9f", -1.0, ((b"\xff", -0.5),)), TokenScore(b"\x99\x82", -2.0), TokenScore(b"!", -3.0)]
    first, second, _ = token_entries(scores)
    assert (first["token"], first["bytes"]) == (" \\xf0\\x9f", [32, 0xF0, 0x9F])
    assert first["top_logprobs"] == [{"token": "\\xff", "logprob": -0.5, "bytes": [255]}]
    assert second["token"] == "\\x99\\x82"
    lists = TokenLists()
    assert lists.of(scores[:1])["text_offset"] + lists.of(scores[1:])["text_offset"] == [0, 0, 1]
