"""`/v1/embeddings` and `/v1/rerank`: the embedder and the reranker of the service, for texts of the request."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response

from ragkv.api.routes.dependencies import PROBLEMS, EngineThreadDep, TenantDep
from ragkv.api.routes.openai import ERRORS
from ragkv.api.runtime.rate_limits import RateLimiter
from ragkv.api.schemas.texts import EmbeddingsIn, EmbeddingsReply, RerankIn, RerankReply
from ragkv.errors import InputError

router = APIRouter()


@router.post("/v1/embeddings", response_model=EmbeddingsReply, responses=ERRORS)
async def embeddings(
    body: EmbeddingsIn, request: Request, engine_thread: EngineThreadDep, tenant: TenantDep
) -> Response:
    """Embed texts with the embedder that searches use, in OpenAI's format. Nothing is stored.

    `model` is the name of the embedder; the error for another name tells it. A text that is longer than the embedder's
    input is read in windows.
    """
    service = engine_thread.text_service
    if body.dimensions not in (None, service.dimension):
        raise InputError(f"dimensions: vectors of this service have {service.dimension}, and are not shortened")
    found = await service.embed(body.model, body.texts, body.input_type == "query")
    _charge(request, tenant.name, found.tokens)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format == "base64")}
        for index, vector in enumerate(found.vectors)
    ]
    return JSONResponse({"object": "list", "data": data, "model": found.model, "usage": _usage(found.tokens)})


@router.post("/v1/rerank", response_model=RerankReply, responses=PROBLEMS)
async def rerank(body: RerankIn, request: Request, engine_thread: EngineThreadDep, tenant: TenantDep) -> Response:
    """Order texts by how well they answer a query, with the reranker that searches use (`RAGKV_RERANKER`).

    The format is that of Cohere and Jina. Nothing is stored. 409 with code `no_reranker` where the service has none.
    """
    texts = body.texts
    found = await engine_thread.text_service.rank(body.model or "", body.query, texts)
    _charge(request, tenant.name, found.tokens)
    best = sorted(range(len(texts)), key=lambda index: -found.scores[index])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": found.scores[index]} for index in best]
    if body.return_documents:
        results = [{**each, "document": {"text": texts[each["index"]]}} for each in results]
    identity = f"rerank-{request.state.request_id}"
    return JSONResponse({"id": identity, "model": found.model, "results": results, "usage": _usage(found.tokens)})


def _charge(request: Request, tenant: str, tokens: int) -> None:
    limiter: RateLimiter = request.app.state.limiter
    limiter.charge(tenant, "tokens", tokens)


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _encoded(vector: NDArray[np.float32], as_base64: bool) -> list[float] | str:
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
