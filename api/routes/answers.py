"""`POST /v1/answers`: answer a question, whole or as server-sent events."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.sse import KEEPALIVE_COMMENT
from starlette.responses import JSONResponse, Response

from ragkv.api.errors import Gone
from ragkv.api.routes.dependencies import PROBLEMS, EngineThreadDep, SettingsDep, TenantDep
from ragkv.api.routes.event_stream import EventStream, describe_events, encode_event, stream_fault
from ragkv.api.runtime.answer_channel import RetrievalDone
from ragkv.api.runtime.answer_stream import AnswerStream
from ragkv.api.schemas.common import QuestionIn
from ragkv.report import Answer

router = APIRouter()

_EVENTS = """Server-sent events, each with JSON as its data:

- `retrieval` {"citations", "timings_ms"}: retrieval and prefill are done; no citation has marks yet
- `token` {"text"}: the next piece of the answer; all pieces together are exactly the answer
- `citation`: one of the answer's citations
- `report`: the report
- `done`: the whole answer, as without `stream`
- `error`: problem details; the stream ends after it

Lines that start with a colon only keep the connection open."""
_EXAMPLE = (
    'event: retrieval\ndata: {"citations":[{"document_id":"tarn","chunk_id":"tarn#0","title":"Tarn","score":0.03}],'
    '"timings_ms":{"retrieve":9.1,"open":0.4,"plan":1.2,"load":0.8,"repair":0.0,"prefill":21.5}}\n\n'
    'event: token\ndata: {"text":"Ada"}\n\nevent: token\ndata: {"text":" Brook"}\n\n'
    'event: done\ndata: {"question":"Who built the harbour?","answer":"Ada Brook","citations":[…],"report":{…}}\n\n'
)
_STREAM = describe_events(_EVENTS, _EXAMPLE, ("retrieval", "token", "citation", "report", "done", "error"))


@router.post(
    "/v1/answers",
    response_model=Answer,
    responses={**PROBLEMS, 200: {"description": "The answer", "content": {"text/event-stream": _STREAM}}},
)
async def answer(
    question: QuestionIn, request: Request, engine_thread: EngineThreadDep, tenant: TenantDep, settings: SettingsDep
) -> Response:
    """Answer a question from the documents of a collection, with citations and the report. With `stream` the answer
    comes as server-sent events.

    `conversation_id` continues this conversation of the collection, or starts it. An answer that is not complete in
    time (`deadline_s`, or the limit of the service if that is shorter) is a 504. The service keeps the answer for a
    while under the id of its request: `GET /v1/answers/{answer_id}`.
    """
    options = question.options(tenant.inside(question.collection))
    seconds = min(settings.deadline, question.deadline_s or settings.deadline)
    stream = AnswerStream(
        engine_thread,
        request.receive,
        question.question,
        options,
        tenant.name,
        seconds,
        question.stream,
    )
    if not question.stream:
        return JSONResponse(dataclasses.asdict(await stream.whole()))
    return EventStream(stream, _events(stream, await stream.prefilled(), request.state.request_id))


async def _events(stream: AnswerStream, retrieval: RetrievalDone, request_id: str) -> AsyncIterator[bytes]:
    yield encode_event(dataclasses.asdict(retrieval), "retrieval")
    try:
        async for piece in stream.pieces():
            yield encode_event({"text": piece}, "token") if piece else KEEPALIVE_COMMENT
        for event in _final_events(stream.answer()):
            stream.check()  # a slow client may take its time between two events
            yield event
    except Gone:
        raise
    except Exception as error:
        yield encode_event(stream_fault(error).to_problem(request_id), "error")


def _final_events(answer: Answer) -> list[bytes]:
    whole: dict[str, Any] = dataclasses.asdict(answer)
    citations = [encode_event(citation, "citation") for citation in whole["citations"]]
    return [*citations, encode_event(whole["report"], "report"), encode_event(whole, "done")]
