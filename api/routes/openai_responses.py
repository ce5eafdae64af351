"""`/v1/responses`: OpenAI's Responses API with retrieval built in, on the conversations of this service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, TypeVar

from fastapi import APIRouter, Path
from starlette.responses import JSONResponse, Response

from ragkv.api.routes.chat_exchange import ChatExchange, ChatExchangeDep
from ragkv.api.routes.dependencies import EngineThreadDep, PeersDep, TenantDep
from ragkv.api.routes.event_stream import SSE, describe_events
from ragkv.api.routes.openai import ERRORS
from ragkv.api.routes.openai_chat import method_of, options_of, turns_of
from ragkv.api.routes.openai_tasks import task_reply
from ragkv.api.routes.response_form import EVENTS, ResponseForm, empty_response, output_message, output_text
from ragkv.api.runtime.response_chain import ResponseId, earlier_turns, next_response, turn_of
from ragkv.api.schemas.common import Name
from ragkv.api.schemas.openai import Chat
from ragkv.api.schemas.openai_messages import Message
from ragkv.api.schemas.openai_responses import ResponseDeleted, ResponseObject, ResponseRequest
from ragkv.engine.engine import Engine
from ragkv.engine.registry import ALONE
from ragkv.engine.service_rules import rule_of

router = APIRouter()
T = TypeVar("T")

_EXAMPLE = (
    'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":4,"item_id":'
    '"msg_1","content_index":0,"output_index":0,"delta":"Ada","logprobs":[]}\n\n'
)
_STREAM = describe_events("An event of OpenAI's responses, as JSON.", _EXAMPLE, EVENTS)
Id = Annotated[str, Path(max_length=128)]


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses={**ERRORS, 200: {"description": "The response", "content": {SSE: _STREAM}}},
)
async def create_response(body: ResponseRequest, exchange: ChatExchangeDep) -> Response:
    """Answer the input from the documents of a collection, as OpenAI's Responses API does.

    `previous_response_id` continues a response of the same collection: its conversation is read, and its KV reused. The
    annotations of the text name the cited documents. `ragkv` in the request and in the response is as in
    `POST /v1/chat/completions`; in a stream it is in the last event. Items that are no messages are not read.
    """
    chat = body.chat()
    turns, method = turns_of(chat), method_of(chat, exchange.engine_thread.model)
    holds = (method or exchange.settings.method).partition(":")[0] not in ALONE or body.store is True
    stored = body.store is not False and holds and not turns.history and task_reply(turns.question) is None
    options = options_of(chat, turns, method, exchange.tenant.inside(chat.ragkv.collection))
    extractive = exchange.engine_thread.profile.extractive
    by_rule = options.answer_schema is None and bool(rule_of(turns.question, extractive))
    id = ResponseId.after(ResponseId().key, 0, by_rule)
    if body.previous_response_id is not None:
        previous = ResponseId.parse(body.previous_response_id)
        if stored:
            id = await _on_chain(exchange, chat, previous, partial(next_response, by_rule=by_rule))
        else:
            earlier = await _on_chain(exchange, chat, previous, earlier_turns)
            chat = chat.model_copy(update={"messages": [*_messages(earlier), *chat.messages]})
    return await exchange.respond(chat, ResponseForm(body, str(id), stored), id.conversation if stored else None)


async def _on_chain(
    exchange: ChatExchange, chat: Chat, previous: ResponseId, work: Callable[[Engine, str, ResponseId], T]
) -> T:
    """Call `work` for a response in the thread of the engine, when no question of its conversation is answered."""
    collection = exchange.tenant.inside(chat.ragkv.collection)
    working = exchange.engine_thread.submit(
        lambda engine: work(engine, collection, previous), (collection, previous.conversation), exchange.tenant.name
    )
    return await asyncio.wrap_future(working)


def _messages(turns: Sequence[tuple[str, str]]) -> Iterator[Message]:
    for question, answer in turns:
        yield Message(role="user", content=question)
        yield Message(role="assistant", content=answer)


@router.get("/v1/responses/{response_id}", response_model=ResponseObject, responses=ERRORS)
async def read_response(
    response_id: Id, engine_thread: EngineThreadDep, tenant: TenantDep, collection: Name = "default"
) -> Response:
    """Show a stored response: its text and its time, without usage, citations and report."""
    id, of = ResponseId.parse(response_id), tenant.inside(collection)
    reading = engine_thread.submit(lambda engine: turn_of(engine, of, id), tenant=tenant.name)
    turn = await asyncio.wrap_future(reading)
    message = output_message(f"msg_{id.key}", output_text(turn.answer, []))
    shown = empty_response(response_id, engine_thread.model, turn.created)
    return JSONResponse(shown | {"status": "completed", "output": [message]})


@router.delete("/v1/responses/{response_id}", response_model=ResponseDeleted, responses=ERRORS)
async def remove_response(
    response_id: Id, engine_thread: EngineThreadDep, peers: PeersDep, tenant: TenantDep, collection: Name = "default"
) -> Response:
    """Delete a stored response with its conversation: the responses before and after it go, too, but not branches."""
    session = (tenant.inside(collection), ResponseId.parse(response_id).conversation)
    await engine_thread.remove_conversation(session, tenant.name)
    await peers.drop_conversation(*session)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})
