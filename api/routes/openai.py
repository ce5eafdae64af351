"""`/v1/chat/completions` and `/v1/models`: the OpenAI-compatible API with retrieval built in, and OpenAI's errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from ragkv.api.routes.chat_exchange import ChatExchangeDep
from ragkv.api.routes.chat_form import CompletionForm
from ragkv.api.routes.dependencies import EngineThreadDep, errors_as
from ragkv.api.routes.event_stream import SSE, describe_events
from ragkv.api.routes.openai_chat import id_of
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.schemas.openai import Chat, ChatCompletion, Model, Models, OpenAIError
from ragkv.engine.registry import BASELINES
from ragkv.errors import NotFound

router = APIRouter()
All = Annotated[bool, Query(description="List baselines, too.")]
ERRORS = errors_as(OpenAIError, 400, 401, 403, 404, 409, 413, 415, 429, 503, 504)
_EXAMPLE = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"tiny","choices":[{"index":0,'
    '"delta":{"content":"Ada"},"logprobs":null,"finish_reason":null}]}\n\ndata: [DONE]\n\n'
)
_CHUNKS = describe_events("A chunk, as JSON; the last one is `[DONE]`.", _EXAMPLE)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={**ERRORS, 200: {"description": "The answer", "content": {SSE: _CHUNKS}}},
)
async def chat_completions(chat: Chat, exchange: ChatExchangeDep) -> Response:
    """Answer what the user said last from the documents of a collection (`ragkv.collection`).

    `ragkv` in the request holds `collection`, `top_k`, `filter`, `method`, `prefill`, `decode` and `deadline_s`.
    `ragkv` in the response holds `citations` and `report`; in a stream it is in the chunk with `finish_reason`. `model`
    is the loaded model, or NAME:METHOD. Earlier questions and answers stand before the question as turns; the latest
    that fit are read. If the question refers to them ("And when was it built?"), they also decide what is searched for.
    System messages stand before the first turn. A last message of the assistant is how the answer begins; the response
    has what follows. Calls of tools and their results are accepted and not read. `temperature` is 0 by default.
    Parameters that would change the answer and are not supported are refused: tools that must be called, several
    choices, log probabilities, images. `response_format` gives JSON. In a stream, chunks with a member `event` name the
    cited documents, as Open WebUI shows them. Requests of chat programs for a title, tags or the like are answered by
    rules, without documents.
    """
    usage = chat.stream_options is not None and chat.stream_options.include_usage
    return await exchange.respond(chat, CompletionForm(chat.model, usage))


@router.get("/v1/models", response_model=Models, responses={status: ERRORS[status] for status in (400, 401, 403)})
async def models(request: Request, engine_thread: EngineThreadDep, all: All = False) -> Response:
    """List the valid values of `model`: the loaded model, alone or with a method. With `all` baselines are among them,
    which are there to compare methods with."""
    names = model_names(engine_thread, () if all else BASELINES)
    return JSONResponse({"object": "list", "data": _models(request, names)})


@router.get(
    "/v1/models/{model_id:path}",
    response_model=Model,
    responses={status: ERRORS[status] for status in (400, 401, 403, 404)},
)
async def model(model_id: str, request: Request, engine_thread: EngineThreadDep) -> Response:
    """Show one model."""
    for entry in _models(request, model_names(engine_thread, ())):
        if entry["id"] == model_id.removesuffix("/").replace(engine_thread.model, id_of(engine_thread.model), 1):
            return JSONResponse(entry)
    raise NotFound("there is no such model; see /v1/models")


def _models(request: Request, names: Sequence[str]) -> list[dict[str, Any]]:
    created = request.app.state.started
    return [{"id": name, "object": "model", "created": created, "owned_by": "ragkv"} for name in names]


def model_names(engine_thread: EngineThread, hidden: Sequence[str] = BASELINES) -> list[str]:
    """List the valid values of `model`, without the methods that are hidden."""
    name = id_of(engine_thread.model)
    return [name, *(f"{name}:{method}" for method in engine_thread.methods if method not in hidden)]
