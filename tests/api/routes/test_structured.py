"""Structured answers over HTTP: JSON that follows the schema of the question, in one piece or as a stream."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.api.conftest import Service
from tests.api.streams import streamed

SCHEMA = {
    "type": "object",
    "properties": {"builder": {"type": "string"}, "year": {"type": ["integer", "null"]}},
    "required": ["builder", "year"],
    "additionalProperties": False,
}
ASK: dict[str, Any] = {"question": "Who built the harbour of Tarn, and when?", "answer_schema": SCHEMA}


def test_an_answer_follows_the_schema_of_its_question(service: Service) -> None:
    answer = service.post("/v1/answers", ASK).json()
    jsonschema.validate(json.loads(answer["answer"]), SCHEMA)
    assert answer["report"]["decoding"]["ended"] == "stop"
    assert answer["report"]["confidence"] is None
    assert answer["citations"]


def test_a_stream_of_it_is_the_same(service: Service) -> None:
    whole = service.post("/v1/answers", ASK).json()["answer"]
    with streamed(service, **ASK) as (_, events):
        assert "".join(data["text"] for name, data in events if name == "token") == whole


def test_structured_and_plain_questions_are_answered_together(service: Service) -> None:
    def answered(body: dict[str, Any]) -> str:
        return str(service.post("/v1/answers", body).json()["answer"])

    bodies = [ASK, {"question": "Who built the harbour of Tarn?"}] * 2
    alone = [answered(body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as clients:
        assert list(clients.map(answered, bodies)) == alone


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"answer_schema": {"type": "nothing"}}, "the schema is not understood"),
        ({"answer_schema": "a string"}, "answer_schema"),
        ({"answer_schema": {"description": "x" * 40_000}}, "characters, the limit is"),
    ],
)
def test_what_is_no_schema_is_refused(service: Service, more: dict[str, Any], words: str) -> None:
    refused = service.post("/v1/answers", ASK | more)
    assert refused.status_code == 422
    assert words in refused.text


def test_a_greeting_with_a_schema_gets_json(service: Service) -> None:
    answer = service.post("/v1/answers", ASK | {"question": "hello"}).json()
    jsonschema.validate(json.loads(answer["answer"]), SCHEMA)
    assert answer["report"]["rule"] == ""
