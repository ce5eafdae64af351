"""The routes. Each reads like its contract: check at the edge (schemas), ask the worker, answer."""

from __future__ import annotations

from fastapi import APIRouter

from api.routes import answers, collections, conversations, documents, health, history, jobs, metrics, openai, uploads

router = APIRouter()
for each in (uploads, documents, jobs, collections, answers, history, conversations, openai, health, metrics):
    router.include_router(each.router)
