"""`POST /v1/documents` with files as a multipart form. The files are spooled to disk and removed with the response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Annotated, Any, cast

import anyio
from fastapi import APIRouter, Depends, Form, Request, UploadFile
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from ragkv.api.middleware.body_limit import is_form
from ragkv.api.routes import job_responses
from ragkv.api.routes.dependencies import CallerDep, EngineThreadDep, require_room
from ragkv.api.routes.documents import InCollection, Wait, one_collection
from ragkv.api.runtime.catalog_service import CatalogService
from ragkv.api.runtime.ingest_queue import enqueue
from ragkv.api.schemas.common import MAX_DOCUMENTS, MetadataText, Name, SourcesText
from ragkv.errors import InputError, TooLarge
from ragkv.ingest.document_ids import DocumentIds, Rejected
from ragkv.ingest.loader import read
from ragkv.types import Document


class FormRoute(APIRoute):
    """Matches multipart forms only. Another route handles JSON at the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the request if its body is a form."""
        match, child = super().matches(scope)
        return (match, child) if match is Match.FULL and is_form(scope) else (Match.NONE, {})


def _collection(named: Annotated[Name | None, Form(alias="collection")] = None, collection: InCollection = None) -> str:
    return one_collection(collection, named, "the field collection of the form")


def _sourced(
    files: list[UploadFile], sources: Annotated[SourcesText | None, Form()] = None
) -> list[tuple[UploadFile, str]]:
    """Return each file with what tells it from all others."""
    came = cast("Sequence[str]", sources or [""] * len(files))
    if len(came) != len(files):
        raise InputError(f"the field sources names {len(came)} sources of {len(files)} files")
    return list(zip(files, came, strict=True))


CollectionDep = Annotated[str, Depends(_collection)]
SourcedFilesDep = Annotated[list[tuple[UploadFile, str]], Depends(_sourced)]
router = APIRouter(route_class=FormRoute)


@router.post(
    "/v1/documents", include_in_schema=False, dependencies=[Depends(require_room)]
)  # documents.py describes it next to its JSON body
async def upload_documents(
    files: SourcedFilesDep,
    request: Request,
    engine_thread: EngineThreadDep,
    caller: CallerDep,
    collection: CollectionDep,
    metadata: Annotated[MetadataText | None, Form()] = None,
    wait: Wait = False,
) -> Response:
    """Queue the documents of files as a job. A file that cannot be read fails alone."""
    inside = caller.tenant.inside(collection)
    attributes = cast("Mapping[str, Any]", metadata or {})
    service = engine_thread.catalog_service
    items = await anyio.to_thread.run_sync(_parse_all, files, attributes, inside, service, limiter=service.parsing)
    job_id = await enqueue(items, inside, engine_thread, caller)
    if not wait:
        return job_responses.accepted(job_id)
    job = await job_responses.wait_for_job(job_id, engine_thread, request)
    return job_responses.done(job, caller.tenant, request.scope) if job else job_responses.client_closed()


def _parse_all(
    files: Sequence[tuple[UploadFile, str]], metadata: Mapping[str, Any], collection: str, service: CatalogService
) -> list[Document | Rejected]:
    """Return the documents of all files, each with its source, in order. The second use of an id is rejected.

    Raises:
        InputError: There are more documents than one request may hold.
    """
    items: list[Document | Rejected] = []
    ids = DocumentIds(service, collection, sees_files=False)
    for file, source in files:
        name = file.filename or ""
        own = "" if PurePath(name).suffix.lower() == ".jsonl" else source
        for item in _parse(file, name, collection, service):
            if len(items) == MAX_DOCUMENTS:
                raise InputError(f"a request may hold {MAX_DOCUMENTS} documents, these files hold more; send several")
            if isinstance(item, Document):
                attributes = {**item.metadata, **metadata}
                item = replace(item, metadata=attributes, collection=collection, source=own)
            items.append(ids.checked(item, name))
    return items


def _parse(file: UploadFile, name: str, collection: str, service: CatalogService) -> Iterator[Document | Rejected]:
    limit = service.max_document_bytes
    data = file.file.read(limit + 1)
    if len(data) > limit:
        size = f"{file.size or len(data)} bytes"
        yield Rejected(name, TooLarge(f"{name} has {size}, the limit is {limit} (max_document_bytes)"))
    else:
        yield from read(data, name, limit, collection, service.allowed)
