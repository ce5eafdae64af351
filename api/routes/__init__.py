"""The HTTP routes. Each one validates at the edge (schemas), calls the engine thread and builds the response."""

from __future__ import annotations

from fastapi import APIRouter

from api.routes import answers, collections, conversations, documents, health, history, jobs, metrics, openai, uploads

router = APIRouter()
for module in (uploads, documents, jobs, collections, answers, history, conversations, openai, health, metrics):
    router.include_router(module.router)
