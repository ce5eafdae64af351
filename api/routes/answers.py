"""Answers: a question, and what is said to it."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.sse import KEEPALIVE_COMMENT
from starlette.responses import JSONResponse, Response

from api.errors import Gone
from api.routes.dependencies import PROBLEMS, EngineThreadDep, SettingsDep, TenantDep
from api.routes.event_stream import EventStream, described, ending, event
from api.runtime.answer_channel import RetrievalDone
from api.runtime.answer_stream import AnswerStream
from api.schemas.common import QuestionIn
from ragkv.report import Answer
from ragkv.types import AskOptions

router = APIRouter()

_EVENTS = """Server-sent events, each with JSON as its data:

- `retrieval` {"citations", "timings_ms"}: the question was read
- `token` {"text"}: the answer goes on; all texts together are exactly the answer
- `citation`: one of the answer's citations
- `report`: the report
- `done`: the whole answer, as without `stream`
- `error`: problem details; nothing comes after it

Lines that begin with a colon only keep the connection open."""
_EXAMPLE = (
    'event: retrieval\ndata: {"citations":[{"document_id":"tarn","chunk_id":"tarn#0","title":"Tarn","score":0.03}],'
    '"timings_ms":{"retrieve":9.1,"open":0.4,"plan":1.2,"load":0.8,"repair":0.0,"prefill":21.5}}\n\n'
    'event: token\ndata: {"text":"Ada"}\n\nevent: token\ndata: {"text":" Brook"}\n\n'
    'event: done\ndata: {"question":"Who built the harbour?","answer":"Ada Brook","citations":[…],"report":{…}}\n\n'
)
_STREAM = described(_EVENTS, _EXAMPLE, ("retrieval", "token", "citation", "report", "done", "error"))


@router.post(
    "/v1/answers",
    response_model=Answer,
    responses={**PROBLEMS, 200: {"description": "The answer", "content": {"text/event-stream": _STREAM}}},
)
async def answer(
    question: QuestionIn, request: Request, worker: EngineThreadDep, tenant: TenantDep, settings: SettingsDep
) -> Response:
    """Answer a question from the documents of a collection, with citations and the report; with `stream` as
    server-sent events.

    `conversation_id`: the question goes on with this conversation of the collection, or begins it. An answer that is
    not there in time (`deadline_s`, or the service's own limit where that is shorter) is a 504. For a while the answer
    is remembered under the id of its request: `GET /v1/answers/{answer_id}`.
    """
    collection = tenant.inside(question.collection)

    given = question.model_dump(include={"top_k", "filter", "method", "prefill", "decode", "max_tokens"})
    options = AskOptions(collection=collection, conversation=question.conversation_id, **given)
    seconds = min(settings.deadline, question.deadline_s or settings.deadline)
    asking = AnswerStream(worker, request.receive, question.question, options, tenant.name, seconds, question.stream)
    if not question.stream:
        return JSONResponse(dataclasses.asdict(await asking.whole()))
    return EventStream(asking, _events(asking, await asking.prefilled(), request.state.request_id))


async def _events(asking: AnswerStream, known: RetrievalDone, request_id: str) -> AsyncIterator[bytes]:
    yield event(dataclasses.asdict(known), "retrieval")
    try:
        async for piece in asking.pieces():
            yield event({"text": piece}, "token") if piece else KEEPALIVE_COMMENT
        for each in _told(asking.answer()):
            yield each
    except Gone:
        raise
    except Exception as error:
        yield event(ending(error).problem(request_id), "error")


def _told(answer: Answer) -> list[bytes]:
    whole: dict[str, Any] = dataclasses.asdict(answer)
    citations = [event(citation, "citation") for citation in whole["citations"]]
    return [*citations, event(whole["report"], "report"), event(whole, "done")]
