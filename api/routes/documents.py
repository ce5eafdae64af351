"""`/v1/documents`: add, list, show and delete documents.

An id may contain slashes, so no path continues after an id.
"""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from api import errors
from api.middleware.body_limit import UPLOAD_DOCUMENTS
from api.routes import job_responses
from api.routes.dependencies import PROBLEMS, EngineThreadDep, TenantDep
from api.runtime.engine_thread import EngineThread
from api.runtime.tenants import Tenant
from api.schemas.common import DocumentIn, Documents, DocumentsIn, FilterText, Name, Queued
from api.schemas.documents import UPLOAD_FORM, Content, DocumentPage, ShownDocument, to_listed_document
from ingest.jobs import IngestJob
from ragkv.errors import InputError, NotFound
from ragkv.types import Document, Filter

router = APIRouter()
Wait = Annotated[bool, Query(description="Answer when the job is done, with its outcome.")]
InCollection = Annotated[Name | None, Query(description="Collection of all documents that name none themselves.")]

_ADD = f"""Queue one document, or several of one collection, as a job. A document with the same id is replaced.

A JSON body may be one MiB larger than the largest document (`RAGKV_MAX_DOCUMENT_BYTES`, 16 MiB by default). A form with
files may be {UPLOAD_DOCUMENTS} times as large, and each file may be as large as one document. A document that cannot be
read fails alone.

With `wait` the response comes when the job is done: 200 if every document is in, 207 if some of several are not, and
the error of the document if it is the only one.
"""


@router.post(
    "/v1/documents",
    status_code=202,
    response_model=Queued,
    description=_ADD,
    responses={
        200: {"model": IngestJob, "description": "The job, done: every document is in"},
        207: {"model": IngestJob, "description": "The job, done; `documents` lists those that failed, with the reason"},
        **PROBLEMS,
    },
    openapi_extra={"requestBody": {"content": {"multipart/form-data": UPLOAD_FORM}}},
)
async def add_documents(
    body: Documents,
    request: Request,
    engine_thread: EngineThreadDep,
    tenant: TenantDep,
    collection: InCollection = None,
    wait: Wait = False,
) -> Response:
    bodies = body.documents if isinstance(body, DocumentsIn) else [body]
    documents = [_to_document(each, collection, tenant) for each in bodies]
    job_id = await job_responses.enqueue(documents, documents[0].collection, engine_thread)
    if not wait:
        return job_responses.accepted(job_id)
    job = await job_responses.wait_for_job(job_id, engine_thread, request)
    return job_responses.done(job, tenant, request.scope) if job else job_responses.client_closed()


@router.put(
    "/v1/documents/{document_id:path}",
    response_model=ShownDocument,
    responses={202: {"model": Queued, "description": "Queued as a job"}, **PROBLEMS},
)
async def put_document(
    document_id: Name,
    body: Content,
    request: Request,
    engine_thread: EngineThreadDep,
    tenant: TenantDep,
    collection: Name = "default",
    wait: Annotated[bool, Query(description="Answer when the document is ingested.")] = False,
) -> Response:
    """Set the content of a document. Nothing is done if it has this content already. A new version replaces the old one
    at once when it is ingested; until then answers come from the old one."""
    document = Document(document_id, body.title or document_id, body.text, body.metadata, tenant.inside(collection))
    if await run_in_threadpool(engine_thread.catalog_service.unchanged, document) is None:
        job_id = await job_responses.enqueue([document], document.collection, engine_thread)
        if not wait:
            return job_responses.accepted(job_id)
        job = await job_responses.wait_for_job(job_id, engine_thread, request)
        if job is None:
            return job_responses.client_closed()
        if job.status != "completed":
            return errors.error_response(errors.fault_of_job(job.error), request.scope)
    return await _show(document_id, collection, engine_thread, tenant)


@router.get("/v1/documents", response_model=DocumentPage, responses=PROBLEMS)
async def documents(
    engine_thread: EngineThreadDep,
    tenant: TenantDep,
    collection: Name = "default",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str, Query(max_length=512, description="The `after` of the previous page.")] = "",
    filter: Annotated[FilterText | None, Query(description="A filter, as JSON: see `POST /v1/answers`.")] = None,
) -> Response:
    """List the documents of a collection by id, in pages."""
    service = engine_thread.catalog_service
    conditions = cast("Filter | None", filter)
    # One more than the limit is fetched, to know whether there is another page.
    found = await run_in_threadpool(service.page, tenant.inside(collection), after, limit + 1, conditions)
    page = [to_listed_document(info, tenant, service.token_bytes) for info in found[:limit]]
    return JSONResponse({"documents": page, "after": found[limit - 1].id if len(found) > limit else None})


@router.get("/v1/documents/{document_id:path}", response_model=ShownDocument, responses=PROBLEMS)
async def document(
    document_id: Name,
    engine_thread: EngineThreadDep,
    tenant: TenantDep,
    collection: Name = "default",
    text: Annotated[bool, Query(description="Include the text.")] = False,
) -> Response:
    """Show one document."""
    return await _show(document_id, collection, engine_thread, tenant, text)


@router.delete("/v1/documents/{document_id:path}", status_code=204, responses=PROBLEMS)
async def remove_document(
    document_id: Name, engine_thread: EngineThreadDep, tenant: TenantDep, collection: Name = "default"
) -> Response:
    """Delete a document, also one that is queued, being ingested or failed. No later answer cites it."""
    try:
        await run_in_threadpool(engine_thread.catalog_service.remove, tenant.inside(collection), document_id)
    except NotFound:
        raise _not_found(document_id, collection) from None
    engine_thread.wake()
    return Response(status_code=204)


def _to_document(body: DocumentIn, parameter: str | None, tenant: Tenant) -> Document:
    """Convert a document of a body. `parameter` is the collection that the query names, if it names one."""
    named = body.collection if "collection" in body.model_fields_set else None
    collection = one_collection(parameter, named, f"document {body.id!r}")
    return Document(body.id, body.title or body.id, body.text, body.metadata, tenant.inside(collection))


def one_collection(parameter: str | None, named: str | None, where: str) -> str:
    """Return the collection that a request names: as its query parameter, in its body, or not at all (`default`).

    Args:
        parameter: Value of the query parameter.
        named: Value in the body.
        where: Part of the body that names it, for the error.

    Raises:
        InputError: Both are there and differ.
    """
    if parameter is not None and named is not None and parameter != named:
        raise InputError(f"the parameter collection={parameter!r} and {where} ({named!r}) differ; send one of them")
    return parameter or named or "default"


async def _show(
    document_id: str, collection: str, engine_thread: EngineThread, tenant: Tenant, with_text: bool = False
) -> Response:
    service = engine_thread.catalog_service
    try:
        info, text = await run_in_threadpool(service.whole, tenant.inside(collection), document_id)
    except NotFound:
        raise _not_found(document_id, collection) from None
    content = {**to_listed_document(info, tenant, service.token_bytes), "bytes": len(text.encode())}
    return JSONResponse({**content, "text": text} if with_text else content)


def _not_found(document_id: str, collection: str) -> NotFound:
    return NotFound(f"collection {collection!r} has no document {document_id!r}")
