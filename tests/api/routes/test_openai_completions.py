"""OpenAI's older route `/v1/completions`, with OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.api.conftest import Service
from tests.api.runtime.test_answers_together import endless, until

WHO = "Who built the harbour of Tarn?"


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    """OpenAI's client with the address of the service."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.parametrize("prompt", [WHO, [WHO]])
def test_a_prompt_is_answered_with_usage_citations_and_report(
    service: Service, client: openai.OpenAI, prompt: Any
) -> None:
    own = service.post("/v1/answers", {"question": WHO}).json()
    made = client.completions.create(model="tiny", prompt=prompt)
    (choice,) = made.choices
    assert (choice.text, choice.finish_reason, made.object) == ("Ada Brook", "stop", "text_completion")
    assert made.id.startswith("cmpl-")
    assert made.ragkv["citations"] == own["citations"]  # type: ignore[attr-defined]
    assert made.usage is not None
    assert made.usage.completion_tokens == made.ragkv["report"]["tokens"]["generated"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_ends_with_the_reason_and_requested_usage(client: openai.OpenAI, with_usage: bool) -> None:
    stream = client.completions.create(
        model="tiny", prompt=WHO, stream=True, stream_options={"include_usage": with_usage}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    if with_usage:
        usage = chunks.pop().usage
        assert usage is not None
        assert usage.completion_tokens > 0
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Ada Brook"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1].ragkv["citations"]  # type: ignore[attr-defined]


def test_parameters_reach_the_engine(client: openai.OpenAI) -> None:
    extra = {"ragkv": {"top_k": 1}}
    made = client.completions.create(model="tiny:full", prompt=WHO, max_tokens=1, extra_body=extra)
    assert made.choices[0].finish_reason == "length"
    assert made.ragkv["report"]["method"] == "full"  # type: ignore[attr-defined]
    assert len(made.ragkv["citations"]) == 1  # type: ignore[attr-defined]
    assert client.completions.create(model="tiny", prompt=WHO, stop="Brook").choices[0].text == "Ada"
    harmless: Any = {"n": 1, "best_of": 1, "echo": False, "logit_bias": {}, "user": "me", "temperature": 0, "seed": 1}
    assert client.completions.create(model="tiny", prompt=WHO, max_tokens=-1, **harmless).choices[0].text == "Ada Brook"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": [[1, 2]]}, "prompt"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_what_is_not_supported_is_said_to_be_so(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError, match="not supported") as refused:
        client.completions.create(**{"model": "tiny", "prompt": WHO, **body})
    assert refused.value.param == param


@pytest.mark.parametrize("body", [{"prompt": ""}, {"prompt": []}, {"prompt": None}, {"max_tokens": 0}, {"model": "x"}])
def test_other_errors_are_openais_too(service: Service, body: dict[str, Any]) -> None:
    refused = service.post("/v1/completions", {"model": "tiny", "prompt": WHO, **body})
    assert refused.status_code in (400, 404), refused.text
    assert set(refused.json()["error"]) == {"message", "type", "param", "code"}


def test_a_stream_that_is_closed_frees_its_place(service: Service, client: openai.OpenAI) -> None:
    with endless(service.engine_thread):
        before = service.engine_thread.health()["cancelled"]
        stream = client.completions.create(model="tiny", prompt=WHO, stream=True, max_tokens=2000)
        assert next(iter(stream)).choices[0].text
        stream.close()
        until(lambda: service.engine_thread.health()["running"] == 0)
    assert service.engine_thread.health()["cancelled"] == before + 1
