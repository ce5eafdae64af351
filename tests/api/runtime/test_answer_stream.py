"""Answers as server-sent events: what is sent and when, and what happens when clients read slowly or disconnect."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import weakref
from typing import Any

import httpx
import jsonschema
import pytest

from ragkv.api.routes.answers import _events
from ragkv.api.routes.event_stream import EventStream
from ragkv.api.runtime import answer_stream
from ragkv.api.runtime.answer_channel import AnswerChannel
from ragkv.api.runtime.answer_stream import AnswerStream
from ragkv.engine.engine import Engine
from ragkv.engine.request import Request
from ragkv.errors import InputError
from ragkv.types import AskOptions
from tests.api.conftest import Service
from tests.api.runtime.test_answers_together import QUESTIONS, endless, on_prefill, until
from tests.api.streams import streamed
from tests.api.test_faults import held

PROBLEM = "application/problem+json"


def test_events_come_in_order_and_add_up_to_the_whole_answer(service: Service) -> None:
    for question in QUESTIONS:
        whole = service.post("/v1/answers", {"question": question}).json()
        with streamed(service, question) as (response, events):
            received = list(events)
        names = [name for name, _ in received if name]
        tokens = names.count("token")
        assert names == ["retrieval", *["token"] * tokens, *["citation"] * 2, "report", "done"]
        assert tokens >= 1
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "no-cache" in response.headers["cache-control"]
        assert response.headers["x-accel-buffering"] == "no"
        done = received[-1][1]
        assert "".join(data["text"] for name, data in received if name == "token") == done["answer"] == whole["answer"]
        assert [data for name, data in received if name == "citation"] == done["citations"] == whole["citations"]
        assert received[0][1]["citations"] == [{**each, "marks": []} for each in done["citations"]]
        assert received[-2][1] == done["report"]
        known = received[0][1]["timings_ms"]
        assert known.items() <= done["report"]["timings_ms"].items()
        assert set(known) >= {"retrieve", "prefill"}
        assert done["report"]["tokens"] == whole["report"]["tokens"]


def test_each_event_matches_its_schema(service: Service) -> None:
    paths = service.client.get("/openapi.json").json()["paths"]
    kinds = [paths[path]["post"]["responses"]["200"]["content"] for path in ("/v1/answers", "/v1/chat/completions")]
    ours, openais = (kind["text/event-stream"] for kind in kinds)
    assert "schema" not in ours | openais, "that would be of all events together"
    with streamed(service, QUESTIONS[0]) as (_, events):
        for name, data in events:
            jsonschema.validate({"event": name, "data": json.dumps(data)}, ours["itemSchema"])
    for wrong in ({"data": "{}"}, {"event": "token"}, {"event": "tokens", "data": "{}"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, ours["itemSchema"])
    jsonschema.validate({"data": "[DONE]"}, openais["itemSchema"])


def test_tokens_come_while_the_answer_is_decoded(service: Service) -> None:
    with endless(service.engine_thread), streamed(service, QUESTIONS[0], max_tokens=60) as (_, events):
        seen = [next(events)[0], next(events)[0]]
        assert service.engine_thread.health()["running"] == 1, "the first token is here and the last one is not made"
        rest = list(events)
    assert seen == ["retrieval", "token"]
    assert rest[-1][1]["report"]["tokens"]["generated"] == 60
    assert rest[-1][1]["report"]["decoding"]["ended"] == "length"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"question": "Who?", "collection": "nothing-here"}, 404, "not_found"),
        ({"question": "who is it " * 3500}, 422, "invalid_request"),
        ({"question": "Who?", "method": "magic"}, 422, "invalid_request"),
        ({"question": "Who?", "conversation_id": "a", "method": "multi-infllm"}, 422, "invalid_request"),
    ],
)
def test_a_fault_before_the_first_event_has_its_own_status(
    service: Service, body: dict[str, Any], status: int, code: str
) -> None:
    refused = service.post("/v1/answers", {**body, "stream": True})
    assert (refused.status_code, refused.headers["content-type"]) == (status, PROBLEM)
    assert refused.json()["code"] == code


def test_a_full_queue_has_its_own_status(service: Service) -> None:
    with held(service):
        waiting = [
            service.engine_thread.submit(lambda engine: None) for _ in range(service.engine_thread.health()["queue"])
        ]
        refused = service.post("/v1/answers", {"question": QUESTIONS[0], "stream": True})
    assert (refused.status_code, refused.json()["code"]) == (429, "busy")
    assert int(refused.headers["retry-after"]) >= 1
    assert [future.result(30) for future in waiting] == [None] * len(waiting)


def test_a_later_fault_is_the_last_event(service: Service) -> None:
    def spoil(engine: Engine) -> None:
        def spoiled(state: Any) -> Any:
            del engine.finalize
            raise InputError("spoiled")

        engine.finalize = spoiled  # type: ignore[method-assign]

    service.engine_thread.submit(spoil).result(30)
    with streamed(service, QUESTIONS[0]) as (response, events):
        received = list(events)
    assert response.status_code == 200
    name, problem = received[-1]
    assert (name, problem["status"], problem["detail"]) == ("error", 422, "spoiled")
    assert problem["request_id"] == response.headers["x-request-id"]
    assert "done" not in dict(received)
    with streamed(service, QUESTIONS[0]) as (_, events):
        assert list(events)[-1][0] == "done"


def test_a_silent_stream_sends_comments(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_stream, "KEEP_ALIVE", 0.05)
    release = threading.Event()
    with endless(service.engine_thread), streamed(service, QUESTIONS[0], max_tokens=20) as (_, events):
        assert next(events)[0] == "retrieval"
        busy = service.engine_thread.submit(lambda engine: release.wait(30))
        comments = [data for name, data in events if not name and not release.set()]
    assert busy.result(30)
    assert comments


def test_the_question_of_a_client_that_disconnects_is_dropped_before_the_next_step(service: Service) -> None:
    engine_thread, states, counts = service.engine_thread, list[tuple[Any, Any]](), list[int]()

    def note(_: str, __: AskOptions, state: Request) -> None:
        states.append((weakref.ref(state.sequence.cache), state.sequence.tokens))

    with endless(engine_thread):
        before = engine_thread.health()["cancelled"]
        with on_prefill(engine_thread, note), streamed(service, QUESTIONS[0], max_tokens=2000) as (_, events):
            assert [next(events)[0] for _ in range(3)] == ["retrieval", "token", "token"]
            (future,) = engine_thread._waited_for
            future.add_done_callback(lambda _: counts.append(len(states[0][1])))
        until(lambda: engine_thread.health()["running"] == 0)
        ((cache, tokens),), (generated,) = states, counts
    assert engine_thread.health()["cancelled"] == before + 1
    assert generated <= len(tokens) <= generated + 1, "the step that was under way, and none after it"
    assert cache() is None


def test_the_queued_question_of_a_client_that_disconnects_is_never_prefilled(service: Service) -> None:
    before = service.engine_thread.health()["cancelled"]
    for stream in (False, True):
        with held(service), pytest.raises(httpx.TimeoutException):
            service.post("/v1/answers", {"question": QUESTIONS[0], "stream": stream}, timeout=0.3)
    until(lambda: service.engine_thread.health()["cancelled"] == before + 2)
    assert service.engine_thread.health()["waiting"] == 0


def test_a_client_that_does_not_read_delays_no_other(service: Service) -> None:
    async def read() -> list[bytes]:
        sent: list[bytes] = []
        reads, never = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, Any]:
            await never.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:  # a server whose client has stopped reading
            sent.append(message.get("body", b""))
            if sent[-1].startswith(b"event: token"):
                await reads.wait()

        options = AskOptions(max_tokens=40)
        asked = AnswerStream(service.engine_thread, receive, QUESTIONS[0], options, "", 60, True)
        stream = EventStream(asked, _events(asked, await asked.prefilled(), "none"))
        reader = asyncio.create_task(stream({"type": "http"}, receive, send))
        quick = {"question": QUESTIONS[2], "max_tokens": 3}
        answered = await asyncio.to_thread(service.post, "/v1/answers", quick)
        assert answered.json()["report"]["tokens"]["generated"] == 3
        await asyncio.to_thread(until, lambda: service.engine_thread.health()["running"] == 0)
        assert sum(each.startswith(b"event: token") for each in sent) == 1
        reads.set()
        await reader
        return sent

    with endless(service.engine_thread):
        sent = asyncio.run(read())
    tokens = [json.loads(each.partition(b"data: ")[2])["text"] for each in sent if each.startswith(b"event: token")]
    (done,) = (json.loads(each.partition(b"data: ")[2]) for each in sent if each.startswith(b"event: done"))
    assert len(tokens) == 2, "all that came meanwhile is one piece"
    assert "".join(tokens) == done["answer"]
    assert done["report"]["tokens"]["generated"] == 40


def test_a_client_that_reads_late_gets_the_whole_answer(service: Service) -> None:
    body = json.dumps({"question": QUESTIONS[0], "stream": True}).encode()
    head = "POST /v1/answers HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as line:
        line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(1)
        assert service.post("/v1/answers", {"question": QUESTIONS[2]}).status_code == 200
        received = b""
        while b"event: done" not in received:
            piece = line.recv(65536)
            assert piece, received[-300:]
            received += piece
    assert b"event: error" not in received


def test_text_that_a_slow_client_missed_comes_as_one_piece() -> None:
    async def read() -> list[str]:
        channel = AnswerChannel()
        seen = []
        channel.publish("Ada")
        await channel.news.wait()
        for text in ("Ada B", "Ada Bro", "Ada Brook"):  # while the reader is busy
            channel.publish(text)
        channel.acknowledge()
        seen.append(channel.text)
        assert not channel.news.is_set()
        channel.publish("Ada Brook of")
        await asyncio.wait_for(channel.news.wait(), 5)
        seen.append(channel.text)
        return seen

    assert asyncio.run(read()) == ["Ada Brook", "Ada Brook of"]


def test_a_channel_of_a_closed_loop_can_be_published_to() -> None:
    async def make() -> AnswerChannel:
        return AnswerChannel()

    channel = asyncio.run(make())
    channel.publish("into the void")
    assert channel.text == "into the void"


def test_all_pieces_together_are_the_answer(service: Service) -> None:
    async def ask() -> tuple[str, str]:
        never = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await never.wait()
            return {"type": "http.disconnect"}

        asked = AnswerStream(service.engine_thread, receive, QUESTIONS[0], AskOptions(), "", 60, True)
        await asked.prefilled()
        text = "".join([piece async for piece in asked.pieces()])
        answer = asked.answer()
        asked.cancel()
        return text, answer.answer

    text, answer = asyncio.run(ask())
    assert text == answer == "Ada Brook"
