"""`/v1/conversations`: show the turns of a conversation, or delete it."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from ragkv.api.routes.dependencies import PROBLEMS, EngineThreadDep, PeersDep, TenantDep
from ragkv.api.schemas.common import Name
from ragkv.api.schemas.service import ConversationOut

router = APIRouter()


@router.get("/v1/conversations/{conversation_id:path}", response_model=ConversationOut, responses=PROBLEMS)
async def conversation(
    conversation_id: Name, engine_thread: EngineThreadDep, tenant: TenantDep, collection: Name = "default"
) -> Response:
    """Show the turns of a conversation."""
    session = (tenant.inside(collection), conversation_id)
    future = engine_thread.submit(lambda engine: engine.sessions.turns(*session), tenant=tenant.name)
    turns = [
        {
            "question": turn.question,
            "answer": turn.answer,
            "removed": turn.removed,
            "method": turn.method,
            "chunks": [chunk for _, chunk in turn.joined],
            "created": turn.created,
        }
        for turn in await asyncio.wrap_future(future)
    ]
    return JSONResponse({"conversation_id": conversation_id, "collection": collection, "turns": turns})


@router.delete("/v1/conversations/{conversation_id:path}", status_code=204, responses=PROBLEMS)
async def remove_conversation(
    conversation_id: Name,
    engine_thread: EngineThreadDep,
    peers: PeersDep,
    tenant: TenantDep,
    collection: Name = "default",
) -> Response:
    """Delete a conversation: its turns and what is kept of it in memory, including its recorded answers."""
    session = (tenant.inside(collection), conversation_id)
    await engine_thread.remove_conversation(session, tenant.name)
    await peers.drop_conversation(*session)
    return Response(status_code=204)
