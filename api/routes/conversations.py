"""Conversations: what was said, and forgetting it."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from api.routes.dependencies import PROBLEMS, EngineThreadDep, TenantDep
from api.schemas.common import ConversationOut, Name

router = APIRouter()


@router.get("/v1/conversations/{conversation_id:path}", response_model=ConversationOut, responses=PROBLEMS)
async def conversation(
    conversation_id: Name, worker: EngineThreadDep, tenant: TenantDep, collection: Name = "default"
) -> Response:
    """The turns of a conversation."""
    turn = (tenant.inside(collection), conversation_id)
    turns = await asyncio.wrap_future(worker.submit(lambda engine: engine.sessions.turns(*turn), tenant=tenant.name))
    said = [
        {
            "question": turn.question,
            "answer": turn.answer,
            "method": turn.method,
            "chunks": [chunk for _, chunk in turn.joined],
            "created": turn.created,
        }
        for turn in turns
    ]
    return JSONResponse({"conversation_id": conversation_id, "collection": collection, "turns": said})


@router.delete("/v1/conversations/{conversation_id:path}", status_code=204, responses=PROBLEMS)
async def remove_conversation(
    conversation_id: Name, worker: EngineThreadDep, tenant: TenantDep, collection: Name = "default"
) -> Response:
    """Forget a conversation: its turns, and what is in memory of it, remembered answers among that."""
    turn = (tenant.inside(collection), conversation_id)
    await asyncio.wrap_future(worker.submit(lambda engine: engine.sessions.remove(*turn), turn, tenant.name))
    worker.history.forget(lambda each: (each.collection, each.conversation) == turn)
    return Response(status_code=204)
