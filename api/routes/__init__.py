"""The HTTP routes. Each one validates at the edge (schemas), calls the engine thread and builds the response."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from ragkv.api.routes import (
    answers,
    anthropic,
    collections,
    conversations,
    document_parts,
    documents,
    hand_over,
    health,
    history,
    jobs,
    metrics,
    ollama,
    openai,
    openai_completions,
    openai_responses,
    search,
    texts,
    uploads,
)
from ragkv.api.routes.dependencies import refuse_unknown_parameters

router = APIRouter(dependencies=[Depends(refuse_unknown_parameters)])
router.include_router(uploads.router)
router.include_router(document_parts.router)  # before the documents, whose paths match its paths, too
for module in (
    documents,
    jobs,
    collections,
    search,
    answers,
    history,
    conversations,
    openai,
    openai_completions,
    openai_responses,
    ollama,
    anthropic,
    texts,
    hand_over,
    health,
    metrics,
):
    router.include_router(module.router)
