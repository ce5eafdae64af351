"""Uploads: `POST /v1/documents` with files. The files are spooled to disk and gone when the answer is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

import anyio
from fastapi import APIRouter, Form, Request, UploadFile
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from api.middleware.body_limit import is_form
from api.routes import job_responses as sent
from api.routes.dependencies import EngineThreadDep, TenantDep
from api.routes.documents import Wait
from api.runtime.catalog_service import CatalogService
from api.schemas.common import MAX_DOCUMENTS, MetadataText, Name
from ingest.loader import Rejected, read
from ragkv.errors import InputError, InvalidDocument, TooLarge
from ragkv.types import Document


class FormRoute(APIRoute):
    """Takes forms only: JSON that is sent to the same path is the business of another route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See Starlette."""
        match, child = super().matches(scope)
        return (match, child) if match is Match.FULL and is_form(scope) else (Match.NONE, {})


router = APIRouter(route_class=FormRoute)


@router.post("/v1/documents", include_in_schema=False)  # it stands beside the JSON body of documents.py
async def upload_documents(
    files: list[UploadFile],
    request: Request,
    worker: EngineThreadDep,
    tenant: TenantDep,
    collection: Annotated[Name, Form()] = "default",
    metadata: Annotated[MetadataText | None, Form()] = None,
    wait: Wait = False,
) -> Response:
    """Queue the documents of files as a job. A file that cannot be read fails alone in it."""
    inside = tenant.inside(collection)
    said = cast("Mapping[str, Any]", metadata or {})
    items = await anyio.to_thread.run_sync(
        _read_all, files, said, inside, worker.catalog_service, limiter=worker.catalog_service.parsing
    )
    job_id = await sent.queue(items, inside, worker)
    if not wait:
        return sent.accepted(job_id)
    job = await sent.outcome(job_id, worker, request)
    return JSONResponse(sent.shown(job, tenant)) if job else sent.gone()


def _read_all(
    files: Sequence[UploadFile], metadata: Mapping[str, Any], collection: str, holdings: CatalogService
) -> list[Document | Rejected]:
    """The documents of all files, in order; an id that comes twice is rejected the second time.

    Raises InputError when there are too many.
    """
    items: list[Document | Rejected] = []
    seen: dict[str, str] = {}
    for file in files:
        name = file.filename or ""
        for item in _read(file, name, collection, holdings):
            if len(items) == MAX_DOCUMENTS:
                raise InputError(f"a request may hold {MAX_DOCUMENTS} documents, these files hold more; send several")
            if isinstance(item, Rejected):
                items.append(item)
            elif item.id in seen:
                fault = f"{name}: document id {item.id!r} was already used by {seen[item.id]}"
                items.append(Rejected(name, InvalidDocument(fault)))
            else:
                seen[item.id] = name
                items.append(Document(item.id, item.title, item.text, {**item.metadata, **metadata}, collection))
    return items


def _read(file: UploadFile, name: str, collection: str, holdings: CatalogService) -> Iterator[Document | Rejected]:
    limit = holdings.max_document_bytes
    data = file.file.read(limit + 1)
    if len(data) > limit:
        size = f"{file.size or len(data)} bytes"
        yield Rejected(name, TooLarge(f"{name} has {size}, the limit is {limit} (max_document_bytes)"))
    else:
        yield from read(data, name, limit, collection, holdings.allowed)
