"""Greetings and questions about the service are answered on every route, in streams too, without the model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.api.conftest import Service
from tests.api.streams import streamed
from tests.mcp_calls import call, over_http


def test_a_greeting_is_answered_by_a_rule(service: Service) -> None:
    response = service.post("/v1/answers", {"question": "hello"})
    found = response.json()
    assert "2 documents" in found["answer"]
    assert (found["citations"], found["report"]["rule"], found["report"]["tokens"]["generated"]) == ([], "greeting", 0)
    empty = service.post("/v1/answers", {"question": "What can I ask you?", "collection": "nothing"}).json()
    assert "no documents" in empty["answer"]
    about = service.post("/v1/answers", {"question": "List the cranes of the harbour of Tarn"}).json()
    assert about["report"]["rule"] == ""


def test_a_stream_of_an_answer_by_rule_has_all_events(service: Service) -> None:
    with streamed(service, "list the documents") as (_, events):
        found = list(events)
    names = [name for name, _ in found]
    assert (names[0], names[-2:]) == ("retrieval", ["report", "done"])
    told = "".join(data["text"] for name, data in found if name == "token")
    assert told == found[-1][1]["answer"]
    assert told.startswith("There are 2 documents")


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_route_answers_by_rule_too(service: Service, stream: bool) -> None:
    model = service.client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "Hi there!"}], "stream": stream}
    response = service.post("/v1/chat/completions", body)
    assert response.status_code == 200
    assert "I answer questions from the documents" in response.text


def test_mcp_answers_by_rule_too(service: Service) -> None:
    async def asked() -> Any:
        async with over_http(service.url) as client:
            return await call(client, "ask", question="who are you?")

    assert asyncio.run(asked())["report"]["rule"] == "service"


def test_answers_by_rule_are_in_no_figure_of_what_answers_reused(service: Service) -> None:
    before = service.engine_thread.metrics.sums
    assert service.post("/v1/answers", {"question": "thanks"}).json()["report"]["rule"] == "greeting"
    assert service.engine_thread.metrics.sums == before
