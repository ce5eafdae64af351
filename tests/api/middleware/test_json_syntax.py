"""The syntax of a JSON body is limited, so that no body holds the event loop: it is read there as a whole."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from ragkv.api.middleware.json_syntax import MOST, JsonSyntax
from ragkv.api.schemas import common, documents, openai, search, texts, tools
from ragkv.api.schemas.faults import readable
from tests.api.conftest import Service
from tests.growth import seconds

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\\n,[好')),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=3), inside, max_size=4),
    max_leaves=12,
)
BODIES: dict[str, Any] = {
    name: model
    for module in (common, documents, openai, search, texts, tools)
    for name, model in vars(module).items()
    if inspect.isclass(model) and issubclass(model, common.Body | openai.Chat | texts.EmbeddingsIn | texts.RerankIn)
}
BODIES["Documents"] = common.Documents


def counted(*chunks: bytes) -> int:
    syntax = JsonSyntax()
    for chunk in chunks:
        syntax.add(chunk)
    return syntax.count


@given(JSON, st.integers(1, 7), st.sampled_from([None, 2]))
def test_what_is_in_strings_and_white_space_is_not_counted(value: Any, size: int, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=False, indent=indent).encode()
    assert counted(*(body[at : at + size] for at in range(0, len(body), size))) == counted(body)
    strings = re.sub(rb'"(?:[^"\\]|\\.)*"', b'""', body, flags=re.DOTALL)
    assert counted(body) == len(b"".join(strings.split()))


def test_texts_of_any_length_are_free() -> None:
    assert counted(json.dumps({"id": "a", "text": '[],"\\' * 200_000}).encode()) == len('{"":"","":""}')
    assert counted(json.dumps([0] * 1000).encode()) == 2 + 1999


@pytest.mark.parametrize("part", [b'"', b"[],", b'\\"', b"\\", b"a"])
def test_counting_a_chunk_takes_no_time(part: bytes) -> None:
    assert seconds(lambda: counted(part * (2**16 // len(part)))) < 0.1


def hostile() -> Iterator[Any]:
    """Yield what is largest in values, for bodies of the largest size."""
    yield [0] * (MOST // 2)
    yield [{} for _ in range(MOST // 3)]
    yield [""] * (MOST // 3)
    yield {format(number, "x"): 0 for number in range(MOST // 5)}
    yield {format(number, "x"): {} for number in range(MOST // 6)}
    yield [{"a": 0, "b": 0, "c": 0, "d": 0} for _ in range(MOST // 22)]


@pytest.mark.parametrize("name", BODIES)
def test_no_body_of_the_largest_size_is_validated_for_long(name: str) -> None:
    adapter, model = TypeAdapter[Any](BODIES[name]), BODIES[name]
    fields = list(model.model_fields) if inspect.isclass(model) else ["documents", "metadata"]
    for value in hostile():
        for body in (value, *({field: value} for field in fields)):
            start = time.thread_time()
            try:
                adapter.validate_python(body)
            except ValidationError as error:
                readable([{**each, "loc": ("body", *each["loc"])} for each in error.errors()], body)
            assert time.thread_time() - start < 1.5, (name, str(body)[:40])


@pytest.mark.parametrize(
    "path",
    [
        "/v1/documents",
        "/v1/answers",
        "/v1/search",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/mcp",
        "/api/chat",
        "/v1/messages",
    ],
)
def test_a_body_of_very_many_values_is_refused(service: Service, path: str) -> None:
    body = b'{"id": "a", "text": "b", "metadata": {"k": [' + b"[]," * (MOST // 3) + b"0]}}"
    answer = service.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert "syntax" in answer.text


def test_very_many_unknown_members_are_one_error(service: Service) -> None:
    answer = service.post("/v1/documents", {"id": "a", "text": "b"} | {f"k{number}": 0 for number in range(1000)})
    assert answer.status_code == 422
    assert len(answer.json()["errors"]) == 1
