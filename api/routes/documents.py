"""`/v1/documents`: add, list, show and delete documents.

An id may contain slashes. Only `/text`, `/chunks` and `/pages/NUMBER` continue a path after an id (document_parts.py).
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from pydantic import AfterValidator
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from ragkv.api import errors
from ragkv.api.middleware.body_limit import UPLOAD_DOCUMENTS
from ragkv.api.routes import job_responses
from ragkv.api.routes.dependencies import PROBLEMS, CallerDep, EngineThreadDep, TenantDep, require_room
from ragkv.api.runtime.catalog_service import not_found
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.ingest_queue import enqueue
from ragkv.api.runtime.removal import remove_document_of
from ragkv.api.runtime.tenants import Tenant
from ragkv.api.schemas.common import DocumentId, DocumentIn, Documents, DocumentsIn, FilterText, Name, check_storable
from ragkv.api.schemas.documents import UPLOAD_FORM, Content, DocumentPage, ShownDocument, to_listed_document
from ragkv.api.schemas.paging import read_place, write_place
from ragkv.api.schemas.service import Queued
from ragkv.catalog import DocumentOrder, SortField
from ragkv.errors import InputError, NotFound
from ragkv.ingest.jobs import IngestJob
from ragkv.ingest.wrapping import unwrapped_in_place
from ragkv.types import Document, Filter

PARTS = (b"text", b"chunks")
"""Last segments of paths that name a part of a document (document_parts.py), beside a number behind PAGES."""
PAGES = b"pages"


def document_of_part(path: bytes) -> bytes | None:
    """Return the path of the document whose part a path names, as it was sent; None if it names none."""
    document, _, last = path.rpartition(b"/")
    if last.isdigit():
        document, _, last = document.rpartition(b"/")
        return document if last == PAGES else None
    return document if last in PARTS else None


class DocumentRoute(APIRoute):
    """Matches all paths below /v1/documents but those of a document's parts: these have no PUT and no DELETE."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the request unless its path, as it was sent, ends in a part's name behind an id."""
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        document = document_of_part(raw)
        is_part = document is not None and not document.endswith(b"/documents")
        return (Match.NONE, {}) if is_part else super().matches(scope)


router = APIRouter(route_class=DocumentRoute)
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
    dependencies=[Depends(require_room)],
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
    caller: CallerDep,
    collection: InCollection = None,
    wait: Wait = False,
) -> Response:
    """Queue documents or files, or wait for them. Its description in OpenAPI is `_ADD`."""
    bodies = body.documents if isinstance(body, DocumentsIn) else [body]
    documents = await run_in_threadpool(lambda: [_to_document(each, collection, tenant) for each in bodies])
    job_id = await enqueue(documents, documents[0].collection, engine_thread, caller)
    if not wait:
        return job_responses.accepted(job_id)
    job = await job_responses.wait_for_job(job_id, engine_thread, request)
    return job_responses.done(job, tenant, request.scope) if job else job_responses.client_closed()


@router.put(
    "/v1/documents/{document_id:path}",
    dependencies=[Depends(require_room)],
    response_model=ShownDocument,
    responses={202: {"model": Queued, "description": "Queued as a job"}, **PROBLEMS},
)
async def put_document(
    document_id: DocumentId,
    body: Content,
    request: Request,
    engine_thread: EngineThreadDep,
    caller: CallerDep,
    collection: Name = "default",
    wait: Annotated[bool, Query(description="Answer when the document is ingested.")] = False,
) -> Response:
    """Set the content of a document. Nothing is done if it has this content already. A new version replaces the old one
    at once when it is ingested; until then answers come from the old one."""
    text = await run_in_threadpool(unwrapped_in_place, body.text)  # the time grows with the text
    document = Document(document_id, body.title or document_id, text, body.metadata, caller.tenant.inside(collection))
    if await run_in_threadpool(engine_thread.catalog_service.unchanged, document) is None:
        job_id = await enqueue([document], document.collection, engine_thread, caller)
        if not wait:
            return job_responses.accepted(job_id)
        job = await job_responses.wait_for_job(job_id, engine_thread, request)
        if job is None:
            return job_responses.client_closed()
        if job.status != "completed":
            return errors.error_response(errors.fault_of_job(job.error), request.scope)
    return await _show(document_id, collection, engine_thread, caller.tenant)


def _order(
    sort: Annotated[SortField, Query(description="What the documents are sorted by; equal ones by id.")] = "id",
    order: Annotated[Literal["asc", "desc"], Query(description="Smallest first, or largest first.")] = "asc",
    q: Annotated[
        str,
        Query(
            max_length=512, description="Only documents whose id or title contains each of these words, in any case."
        ),
        AfterValidator(check_storable),
    ] = "",
) -> DocumentOrder:
    return DocumentOrder(sort, order == "desc", q)


OrderDep = Annotated[DocumentOrder, Depends(_order)]


@router.get("/v1/documents", response_model=DocumentPage, responses=PROBLEMS)
async def documents(
    engine_thread: EngineThreadDep,
    tenant: TenantDep,
    order: OrderDep,
    collection: Name = "default",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str, Query(max_length=4096, description="The `after` of the previous page.")] = "",
    filter: Annotated[FilterText | None, Query(description="A filter, as JSON: see `POST /v1/answers`.")] = None,
) -> Response:
    """List the documents of a collection, in pages."""
    service, inside = engine_thread.catalog_service, tenant.inside(collection)
    place, conditions = read_place(after, order), cast("Filter | None", filter)
    # One more than the limit is fetched, to know whether there is another page.
    found = await run_in_threadpool(service.page, inside, place, limit + 1, conditions, order)
    sizes = await run_in_threadpool(service.kv.documents, found[:limit])
    page = [to_listed_document(info, tenant, size) for info, size in zip(found, sizes, strict=False)]
    following = write_place(order.place(found[limit - 1]), order) if len(found) > limit else None
    return JSONResponse({"documents": page, "after": following})


@router.get("/v1/documents/{document_id:path}", response_model=ShownDocument, responses=PROBLEMS)
async def document(
    document_id: DocumentId,
    engine_thread: EngineThreadDep,
    tenant: TenantDep,
    collection: Name = "default",
    text: Annotated[bool, Query(description="Include the text.")] = False,
) -> Response:
    """Show one document."""
    return await _show(document_id, collection, engine_thread, tenant, text)


@router.delete("/v1/documents/{document_id:path}", status_code=204, responses=PROBLEMS)
async def remove_document(
    document_id: DocumentId, engine_thread: EngineThreadDep, caller: CallerDep, collection: Name = "default"
) -> Response:
    """Delete a document, also one that is queued, being ingested or failed. No later answer cites it."""
    await run_in_threadpool(remove_document_of, caller, collection, document_id, engine_thread)
    return Response(status_code=204)


def _to_document(body: DocumentIn, parameter: str | None, tenant: Tenant) -> Document:
    """Convert a document of a body. `parameter` is the collection that the query names, if it names one."""
    named = body.collection if "collection" in body.model_fields_set else None
    collection = one_collection(parameter, named, f"document {body.id!r}")
    text = unwrapped_in_place(body.text)
    return Document(body.id, body.title or body.id, text, body.metadata, tenant.inside(collection))


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
        raise not_found(document_id, collection) from None
    (size,) = await run_in_threadpool(service.kv.documents, [info])
    content = to_listed_document(info, tenant, size)
    return JSONResponse({**content, "text": text} if with_text else content)
