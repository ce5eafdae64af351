"""The routes. Each reads like its contract: check at the edge (schemas), ask the worker, answer."""

from __future__ import annotations

import asyncio
import dataclasses
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from api.errors import MEDIA_TYPE
from api.schemas import DocumentIn, Documents, DocumentsIn, Problem, Question, Queued
from api.worker import Worker
from ingest.jobs import Job
from ragkv.engine import Engine
from ragkv.errors import Stopping
from ragkv.report import Answer
from ragkv.types import Document

POLL_SECONDS = 0.1

router = APIRouter()


def _worker(request: Request) -> Worker:
    worker: Worker = request.app.state.worker
    return worker


TheWorker = Annotated[Worker, Depends(_worker)]
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}}
    for status in (404, 409, 413, 422, 429, 503, 507)
}


@router.post("/v1/documents", status_code=202, response_model=Queued, responses={200: {"model": Job}, **_PROBLEMS})
async def add_documents(
    body: Documents,
    worker: TheWorker,
    wait: Annotated[bool, Query(description="Answer when the job is done, with its outcome.")] = False,
) -> Response:
    """Queue one document, or several of one collection, as a job. A document that is there is replaced."""
    if worker.stopping:
        raise Stopping("the service is shutting down")
    documents = [_document(given) for given in (body.documents if isinstance(body, DocumentsIn) else [body])]
    job_id = await run_in_threadpool(worker.jobs.submit, documents)
    worker.wake()
    if wait:
        return JSONResponse(await _outcome(worker, job_id))
    return JSONResponse({"job_id": job_id}, 202, {"Location": f"/v1/jobs/{job_id}"})


@router.get("/v1/jobs/{job_id}", response_model=Job, responses=_PROBLEMS)
async def job(job_id: str, worker: TheWorker) -> Response:
    """How far a job is. `stage`, `done` and `total` are of the document being read."""
    return JSONResponse(dataclasses.asdict(await run_in_threadpool(worker.jobs.get, job_id)))


@router.post("/v1/answers", response_model=Answer, responses=_PROBLEMS)
async def answer(question: Question, request: Request, worker: TheWorker) -> Response:
    """Answer a question from the documents of a collection, with citations and the report."""

    def task(engine: Engine) -> dict[str, Any]:
        given = question.model_dump(include={"collection", "top_k", "method", "max_tokens"})
        return dataclasses.asdict(engine.answer(question.question, **given))

    answering = asyncio.wrap_future(worker.submit(task))
    while not (await asyncio.wait({answering}, timeout=POLL_SECONDS))[0]:
        if await request.is_disconnected():
            answering.cancel()  # still in the line: it never runs
            return Response(status_code=499)
    return JSONResponse(answering.result())


@router.get("/healthz")
async def healthz(worker: TheWorker) -> Response:
    """Liveness: 200 as long as the service answers; `status` is ok, or degraded when answers take longer."""
    health = worker.health()
    return JSONResponse(health, 503 if health["status"] == "failed" else 200)


def _document(given: DocumentIn) -> Document:
    return Document(given.id, given.title or given.id, given.text, given.metadata, given.collection)


async def _outcome(worker: Worker, job_id: str) -> dict[str, Any]:
    """The job once it is finished. Raises Stopping when the service ends first: the next start takes the job up."""
    while True:
        found = await run_in_threadpool(worker.jobs.get, job_id)
        if found.finished is not None:
            return dataclasses.asdict(found)
        if worker.stopping:
            raise Stopping(f"the service is shutting down; job {job_id} goes on when it is back")
        await asyncio.sleep(POLL_SECONDS)
