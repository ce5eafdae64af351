"""`/v1/documents/{document_id}/text`, `…/chunks` and `…/pages/{number}`: what a document consists of.

An id may contain slashes. A path that ends so means the part of a document. Where an id itself ends so, its last slash
is sent as `%2F`, and the path then means the document (documents.py).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from ragkv.api.routes.dependencies import PROBLEMS, EngineThreadDep, TenantDep
from ragkv.api.routes.documents import document_of_part
from ragkv.api.runtime.catalog_service import not_found
from ragkv.api.schemas.common import DocumentId, Name
from ragkv.api.schemas.documents import ChunkPage, DocumentText, to_chunk_page, to_document_text
from ragkv.errors import InputError, NotFound

MAX_OFFSET = 2**31
"""Larger than any offset into a text."""
MARKED, MARK, PAGES = "X-Ragkv-Marked", "X-Ragkv-Mark", "X-Ragkv-Pages"
"""Headers of a picture."""


class PartRoute(APIRoute):
    """Matches where the slashes before the part were sent as slashes, and not as parts of an id."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the request if its path, as it was sent, ends in a part."""
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        return super().matches(scope) if document_of_part(raw) is not None else (Match.NONE, {})


router = APIRouter(route_class=PartRoute)
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="Offset of the first character.")]
EndOffset = Annotated[
    int | None, Query(ge=0, le=MAX_OFFSET, description="Offset after the last character; by default the text's end.")
]

_PICTURE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The page",
        "content": {"image/png": {"schema": {"type": "string", "contentMediaType": "image/png"}}},
        "headers": {
            MARKED: {
                "description": "Whether the passage was found on the page.",
                "schema": {"enum": ["true", "false"]},
            },
            MARK: {
                "description": "Left, top, right and bottom of the box around all marks, in pixels; absent if none.",
                "schema": {"type": "string", "pattern": "^[0-9]+(,[0-9]+){3}$"},
            },
            PAGES: {"description": "How many pages the document has.", "schema": {"type": "integer"}},
        },
    }
}


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
    _check_order(start, end)
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


@router.get(
    "/v1/documents/{document_id:path}/pages/{number}",
    response_class=Response,
    responses={**_PICTURE, **PROBLEMS},
)
async def document_page(
    document_id: DocumentId,
    number: int,
    engine_thread: EngineThreadDep,
    tenant: TenantDep,
    collection: Name = "default",
    start: Offset = 0,
    end: Annotated[
        int | None,
        Query(ge=0, le=MAX_OFFSET, description="Offset after the last character; by default nothing is marked."),
    ] = None,
) -> Response:
    """Show a page of a PDF as a picture, with the characters from `start` to `end` of the document's text marked.

    Pages count from 1. Files are kept from their ingest on: a document that came otherwise has no pages.
    """
    _check_order(start, end)
    service, passage = engine_thread.catalog_service, (start, start if end is None else end)
    draw = partial(service.picture, tenant.inside(collection), document_id, number, passage)
    picture = await to_thread.run_sync(draw, limiter=service.drawing)
    if picture is None:
        raise not_found(document_id, collection)
    headers = {MARKED: "false", PAGES: str(picture.pages)}
    if picture.mark is not None:
        headers |= {MARKED: "true", MARK: ",".join(map(str, picture.mark))}
    return Response(picture.png, headers=headers, media_type="image/png")


def _check_order(start: int, end: int | None) -> None:
    if end is not None and end < start:
        raise InputError(f"end={end} is before start={start}")
