"""`/v1/documents/{document_id}/text` and `…/chunks`: what a document consists of.

An id may contain slashes. A path that ends in `/text` or `/chunks` means the part of a document. Where an id itself
ends so, its last slash is sent as `%2F`, and the path then means the document (documents.py).
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from ragkv.api.routes.dependencies import PROBLEMS, EngineThreadDep, TenantDep
from ragkv.api.runtime.catalog_service import not_found
from ragkv.api.schemas.common import DocumentId, Name
from ragkv.api.schemas.documents import ChunkPage, DocumentText, to_chunk_page, to_document_text
from ragkv.errors import InputError, NotFound

MAX_OFFSET = 2**31
"""Larger than any offset into a text."""


class PartRoute(APIRoute):
    """Matches where the slash before the last segment was sent as a slash, and not as a part of an id."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the request if its path, as it was sent, ends as the route does."""
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        ending = self.path_format.rpartition("/")[2].encode()
        return super().matches(scope) if raw.rpartition(b"/")[2] == ending else (Match.NONE, {})


router = APIRouter(route_class=PartRoute)
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="Offset of the first character.")]
EndOffset = Annotated[
    int | None, Query(ge=0, le=MAX_OFFSET, description="Offset after the last character; by default the text's end.")
]


@router.get("/v1/documents/{document_id:path}/text", response_model=DocumentText, responses=PROBLEMS)
async def document_text(
    document_id: DocumentId,
    engine_thread: EngineThreadDep,
    tenant: TenantDep,
    collection: Name = "default",
    start: Offset = 0,
    end: EndOffset = None,
) -> Response:
    """Show the text of a document, or its characters from `start` to `end`, as a citation names them."""
    if end is not None and end < start:
        raise InputError(f"end={end} is before start={start}")
    service = engine_thread.catalog_service
    try:
        info, text = await run_in_threadpool(service.whole, tenant.inside(collection), document_id)
    except NotFound:
        raise not_found(document_id, collection) from None
    return JSONResponse(to_document_text(info, tenant, text, start, end))


@router.get("/v1/documents/{document_id:path}/chunks", response_model=ChunkPage, responses=PROBLEMS)
async def document_chunks(
    document_id: DocumentId,
    engine_thread: EngineThreadDep,
    tenant: TenantDep,
    collection: Name = "default",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[int, Query(ge=-1, le=MAX_OFFSET, description="The `after` of the previous page.")] = -1,
) -> Response:
    """Show the chunks of a document in order, in pages."""
    service = engine_thread.catalog_service
    try:
        info, chunks = await run_in_threadpool(
            service.chunk_page, tenant.inside(collection), document_id, after, limit + 1
        )
    except NotFound:
        raise not_found(document_id, collection) from None
    return JSONResponse(to_chunk_page(info, tenant, chunks, limit))
