"""`/v1/handovers`: questions that another server answers over the KV of this one, such as vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from ragkv.api.routes.dependencies import PROBLEMS, EngineThreadDep, TenantDep
from ragkv.api.runtime.rate_limits import RateLimiter
from ragkv.api.schemas.hand_over import HandOverIn, HandOverOut, RowsIn, told
from ragkv.engine.engine import Engine
from ragkv.engine.hand_over import HandedRows, HandOver, KeptChunk, hand_over, handed_rows
from ragkv.engine.passes import run_alone
from ragkv.types import AskOptions

router = APIRouter()

MEDIA_TYPE = "application/octet-stream"
_ROWS = {"description": "safetensors: tokens [n], k and v [L, n, Hkv, d]", "content": {MEDIA_TYPE: {}}}


@router.post("/v1/handovers", response_model=HandOverOut, responses=PROBLEMS)
async def hand_over_question(
    body: HandOverIn, request: Request, engine_thread: EngineThreadDep, tenant: TenantDep
) -> Response:
    """Choose what a question reads, and return the prompt with which vLLM answers it (`ragkv.integrations.vllm`).

    Members are those of vLLM's `POST /v1/completions`, beside `method` and `citations`. Nothing is generated here, and
    nothing is kept: the rows that are handed over are loaded when vLLM asks for them.
    """
    task = partial(_hand_over, question=body.question, options=body.options(tenant.inside(body.collection)))
    over = await asyncio.wrap_future(engine_thread.submit(task, tenant=tenant.name))
    limiter: RateLimiter = request.app.state.limiter
    limiter.charge(tenant.name, "tokens", len(over.tokens))
    citations = [dataclasses.asdict(citation) for citation in over.citations]
    return JSONResponse({**told(over, body.collection), "citations": citations})


@router.post("/v1/handovers/rows", response_class=Response, responses={**PROBLEMS, 200: _ROWS})
async def rows(body: RowsIn, engine_thread: EngineThreadDep, tenant: TenantDep) -> Response:
    """Return K and V of the rows that a hand-over names, in the format of safetensors.

    404 where a document of them was removed or replaced, or belongs to another tenant.
    """
    task = partial(_rows, collection=tenant.inside(body.collection), kept=body.kept, salt=body.cache_salt)
    found = await asyncio.wrap_future(engine_thread.submit(task, tenant=tenant.name))
    return Response(await run_in_threadpool(found.encode), media_type=MEDIA_TYPE)


def _hand_over(engine: Engine, question: str, options: AskOptions) -> HandOver:
    return run_alone(engine.model, hand_over(engine, question, options))


def _rows(engine: Engine, collection: str, kept: list[KeptChunk], salt: str) -> HandedRows:
    return run_alone(engine.model, handed_rows(engine, collection, kept, salt))
