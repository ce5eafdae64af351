"""OpenAI's chat completions and models, with retrieval built in. Errors here are OpenAI's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.responses import JSONResponse, Response

from api.errors import Gone
from api.routes.dependencies import EngineThreadDep, SettingsDep, TenantDep
from api.routes.event_stream import EventStream, described, ending, event
from api.routes.openai_chat import ChatReply, method_of, options_of, question_of
from api.runtime.answer_stream import AnswerStream
from api.schemas.openai import Chat, Completion, Model, Models, OpenAIError
from ragkv.errors import NotFound

router = APIRouter()

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": OpenAIError, "description": HTTPStatus(status).phrase}
    for status in (400, 401, 404, 409, 413, 429, 503, 504)
}
_EXAMPLE = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"demo","choices":[{"index":0,'
    '"delta":{"content":"Ada"},"logprobs":null,"finish_reason":null}]}\n\ndata: [DONE]\n\n'
)
_CHUNKS = described("A chunk, as JSON; the last one is `[DONE]`.", _EXAMPLE)


@router.post(
    "/v1/chat/completions",
    response_model=Completion,
    responses={**ERRORS, 200: {"description": "The answer", "content": {"text/event-stream": _CHUNKS}}},
)
async def chat_completions(
    chat: Chat, request: Request, worker: EngineThreadDep, tenant: TenantDep, settings: SettingsDep
) -> Response:
    """Answer the last user message from the documents of a collection (`ragkv.collection`).

    `ragkv` in the request says how: `collection`, `top_k`, `filter`, `method`, `prefill`, `decode`, `deadline_s`;
    `ragkv` in the response, in a stream in the chunk with `finish_reason`, holds `citations` and `report`. `model` is
    the loaded model, or NAME:METHOD. Where the last message points back ("And when was it built?") the latest question
    that stands alone is put in front, with its answer; system messages are not read. `temperature` is 0 unless it is
    given. What would change the answer and is not supported is refused: tools, several choices, log probabilities,
    penalties, formats, images.
    """
    question, method = question_of(chat), method_of(chat, worker.model)
    wanted = options_of(chat, method, tenant.inside(chat.ragkv.collection))

    seconds = min(settings.deadline, chat.ragkv.deadline_s or settings.deadline)
    asking = AnswerStream(worker, request.receive, question, wanted, tenant.name, seconds, bool(chat.stream))
    if not chat.stream:
        return JSONResponse(ChatReply(chat.model).completion(await asking.whole()))
    await asking.prefilled()
    usage = chat.stream_options is not None and chat.stream_options.include_usage
    return EventStream(asking, _chunks(asking, ChatReply(chat.model, usage)))


async def _chunks(asking: AnswerStream, replying: ChatReply) -> AsyncIterator[bytes]:
    yield event(replying.first())
    try:
        async for piece in asking.pieces():
            yield event(replying.piece(piece)) if piece else KEEPALIVE_COMMENT
        for chunk in replying.last(asking.answer()):
            yield event(chunk)
        yield format_sse_event(data_str="[DONE]")
    except Gone:
        raise
    except Exception as error:
        yield event(ending(error).openai())


@router.get("/v1/models", response_model=Models, responses={401: ERRORS[401]})
async def models(request: Request, worker: EngineThreadDep) -> Response:
    """What may be named as `model`: the loaded one, alone or with a method."""
    return JSONResponse({"object": "list", "data": _models(request, worker)})


@router.get("/v1/models/{model_id:path}", response_model=Model, responses={401: ERRORS[401], 404: ERRORS[404]})
async def model(model_id: str, request: Request, worker: EngineThreadDep) -> Response:
    """One of them."""
    for each in _models(request, worker):
        if each["id"] == model_id:
            return JSONResponse(each)
    raise NotFound("there is no such model here; see /v1/models")


def _models(request: Request, worker: EngineThreadDep) -> list[dict[str, Any]]:
    names = [worker.model, *(f"{worker.model}:{method}" for method in worker.methods)]
    created = request.app.state.started
    return [{"id": name, "object": "model", "created": created, "owned_by": "ragkv"} for name in names]
