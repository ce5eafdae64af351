"""Documents: what is there, what is sent, what goes. Ids may hold slashes, so nothing stands behind an id in a path."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from api import errors
from api.middleware.body_limit import UPLOAD_DOCUMENTS
from api.routes import job_responses as sent
from api.routes.dependencies import PROBLEMS, EngineThreadDep, TenantDep
from api.runtime.engine_thread import EngineThread
from api.runtime.tenants import Tenant
from api.schemas.common import DocumentIn, Documents, DocumentsIn, FilterText, Name, Queued
from api.schemas.documents import UPLOAD_FORM, Content, DocumentPage, ShownDocument, listed
from ingest.jobs import IngestJob
from ragkv.errors import NotFound
from ragkv.types import Document, Filter

router = APIRouter()
Wait = Annotated[bool, Query(description="Answer when the job is done, with its outcome.")]

_ADD = f"""Queue one document, or several of one collection, as a job. A document that is there is replaced.

A JSON body may have one MiB more than the largest document (`RAGKV_MAX_DOCUMENT_BYTES`, 16 MiB unless it is set), a
form with files {UPLOAD_DOCUMENTS} times as much, each file no more than a document. What cannot be read fails alone.
"""


@router.post(
    "/v1/documents",
    status_code=202,
    response_model=Queued,
    description=_ADD,
    responses={200: {"model": IngestJob, "description": "The job, done"}, **PROBLEMS},
    openapi_extra={"requestBody": {"content": {"multipart/form-data": UPLOAD_FORM}}},
)
async def add_documents(
    body: Documents, request: Request, worker: EngineThreadDep, tenant: TenantDep, wait: Wait = False
) -> Response:
    documents = [_document(given, tenant) for given in (body.documents if isinstance(body, DocumentsIn) else [body])]
    job_id = await sent.queue(documents, documents[0].collection, worker)
    if not wait:
        return sent.accepted(job_id)
    job = await sent.outcome(job_id, worker, request)
    return JSONResponse(sent.shown(job, tenant)) if job else sent.gone()


@router.put(
    "/v1/documents/{document_id:path}",
    response_model=ShownDocument,
    responses={202: {"model": Queued, "description": "It will be read, as a job"}, **PROBLEMS},
)
async def put_document(
    document_id: Name,
    body: Content,
    request: Request,
    worker: EngineThreadDep,
    tenant: TenantDep,
    collection: Name = "default",
    wait: Annotated[bool, Query(description="Answer when it has been read.")] = False,
) -> Response:
    """Have the document say this. Where it does already, nothing is done; else the new version takes the place of the
    old one at once when it has been read, and until then the old one answers."""
    given = Document(document_id, body.title or document_id, body.text, body.metadata, tenant.inside(collection))
    if await run_in_threadpool(worker.catalog_service.unchanged, given) is None:
        job_id = await sent.queue([given], given.collection, worker)
        if not wait:
            return sent.accepted(job_id)
        job = await sent.outcome(job_id, worker, request)
        if job is None:
            return sent.gone()
        if job.status != "completed":
            return errors.refusal(errors.of_job(job.error), request.scope)
    return await _shown(document_id, collection, worker, tenant)


@router.get("/v1/documents", response_model=DocumentPage, responses=PROBLEMS)
async def documents(
    worker: EngineThreadDep,
    tenant: TenantDep,
    collection: Name = "default",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str, Query(max_length=512, description="The `after` of the page before.")] = "",
    filter: Annotated[FilterText | None, Query(description="A filter, as JSON: see `POST /v1/answers`.")] = None,
) -> Response:
    """The documents of a collection, by id, a page at a time."""
    holdings = worker.catalog_service
    # One more than is shown tells whether there is another page.
    wanted = cast("Filter | None", filter)
    found = await run_in_threadpool(holdings.page, tenant.inside(collection), after, limit + 1, wanted)
    page = [listed(info, tenant, holdings.token_bytes) for info in found[:limit]]
    return JSONResponse({"documents": page, "after": found[limit - 1].id if len(found) > limit else None})


@router.get("/v1/documents/{document_id:path}", response_model=ShownDocument, responses=PROBLEMS)
async def document(
    document_id: Name,
    worker: EngineThreadDep,
    tenant: TenantDep,
    collection: Name = "default",
    text: Annotated[bool, Query(description="With its text.")] = False,
) -> Response:
    """One document: what is known of it."""
    return await _shown(document_id, collection, worker, tenant, text)


@router.delete("/v1/documents/{document_id:path}", status_code=204, responses=PROBLEMS)
async def remove_document(
    document_id: Name, worker: EngineThreadDep, tenant: TenantDep, collection: Name = "default"
) -> Response:
    """Forget a document, at any time: one that waits, is being read or has failed, too. No later answer cites it."""
    try:
        await run_in_threadpool(worker.catalog_service.remove, tenant.inside(collection), document_id)
    except NotFound:
        raise _missing(document_id, collection) from None
    worker.wake()
    return Response(status_code=204)


def _document(given: DocumentIn, tenant: Tenant) -> Document:
    return Document(given.id, given.title or given.id, given.text, given.metadata, tenant.inside(given.collection))


async def _shown(
    document_id: str, collection: str, worker: EngineThread, tenant: Tenant, with_text: bool = False
) -> Response:
    holdings = worker.catalog_service
    try:
        info, text = await run_in_threadpool(holdings.whole, tenant.inside(collection), document_id)
    except NotFound:
        raise _missing(document_id, collection) from None
    shown = {**listed(info, tenant, holdings.token_bytes), "bytes": len(text.encode())}
    return JSONResponse({**shown, "text": text} if with_text else shown)


def _missing(document_id: str, collection: str) -> NotFound:
    return NotFound(f"collection {collection!r} has no document {document_id!r}")
