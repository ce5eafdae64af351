"""`POST /v1/search`: passages with scores, no generation."""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from ragkv.api.routes.dependencies import PROBLEMS, EngineThreadDep, SettingsDep, TenantDep
from ragkv.api.schemas.search import SearchIn
from ragkv.passages import SearchResult

router = APIRouter()


@router.post("/v1/search", response_model=SearchResult, responses=PROBLEMS)
async def search(body: SearchIn, engine_thread: EngineThreadDep, tenant: TenantDep, settings: SettingsDep) -> Response:
    """Search the documents of a collection for passages, by words and by meaning. Nothing is generated."""
    scope = body.scope(tenant.inside(body.collection))
    found = await engine_thread.passage_search.find(body.query, scope, body.top_k or settings.top_k)
    return JSONResponse(dataclasses.asdict(found))
