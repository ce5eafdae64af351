"""`ragkv show`: one document with its metadata, its text or its chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli import remote
from ragkv.cli.common import Collection, Data, Url, moment, no_document, out, printable, settings_from

if TYPE_CHECKING:
    from ragkv.config import Settings

_FIELDS = (
    *("id", "collection", "title", "metadata", "chunks", "tokens", "bytes", "file_bytes", "version", "hash"),
    *("created", "updated"),
)
_CHUNK_FIELDS = ("chunk_id", "chunk", "heading", "page", "start", "end", "tokens", "text")


def show(
    document_id: Annotated[str, typer.Argument(help="Id of the document, as `ragkv ls` shows it.", metavar="ID")],
    collection: Collection = "default",
    text: Annotated[bool, typer.Option("--text", help="Print the text, too.")] = False,
    chunks: Annotated[bool, typer.Option("--chunks", help="Print the chunks, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    data: Data = None,
    url: Url = None,
) -> int:
    """Show a document: title, metadata, sizes, version and times; with options its text and its chunks."""
    from ragkv.normalisation import normal_id

    settings, document_id = settings_from(data, url=url), normal_id(document_id)
    if settings.url:
        document, pieces = remote.show(settings, document_id, collection)
        whole = document.text or ""
        shown = {name: getattr(document, name) for name in _FIELDS}
        parts = [{name: getattr(piece, name) for name in _CHUNK_FIELDS} for piece in pieces]
    else:
        shown, whole, parts = _stored(settings, document_id, collection)
    if as_json:
        more = {**({"text": whole} if text else {}), **({"chunks": parts} if chunks else {})}
        typer.echo(json.dumps({"document": shown, **more}, ensure_ascii=False))
    else:
        _print(shown, whole if text else "", parts if chunks else ())
    return 0


def _stored(settings: Settings, document_id: str, collection: str) -> tuple[dict[str, Any], str, list[dict[str, Any]]]:
    """Read (document, text, chunks) from the catalogue, without a model. Raises NotFound."""
    from ragkv.catalog import Catalog
    from ragkv.errors import NotFound

    where = settings.catalog_address
    if isinstance(where, Path) and not settings.data.exists():
        raise NotFound(f"there are no documents in {settings.data}; add some with `ragkv ingest`")
    catalog = Catalog.open(where)
    try:
        if catalog.find(collection, document_id) is None:
            raise no_document(catalog, collection, document_id)
        info, document = catalog.info_and_original(collection, document_id)
        chunks = catalog.chunks_of(collection, document_id)
    finally:
        catalog.close()
    shown = {name: getattr(info, "content_hash" if name == "hash" else name) for name in _FIELDS}
    parts = []
    for chunk in chunks:
        span = chunk.span
        heading, page = ((span.heading or None), span.page) if span else (None, None)
        start, end = (span.start, span.end) if span else (None, None)
        values = (chunk.id, chunk.ordinal, heading, page, start, end, len(chunk.tokens), chunk.text)
        parts.append(dict(zip(_CHUNK_FIELDS, values, strict=True)))
    return {**shown, "metadata": dict(info.metadata)}, document.text, parts


def _print(shown: dict[str, Any], text: str, chunks: Sequence[dict[str, Any]]) -> None:
    from rich.text import Text

    console = out()
    for name, value in shown.items():
        if name in ("created", "updated"):
            value = moment(value)
        line = json.dumps(value, ensure_ascii=False) if name == "metadata" else str(value)
        console.print(Text(f"{name:<11}{printable(line)}"))
    if text:
        console.print(Text(f"\n{printable(text)}"))
    for chunk in chunks:
        console.print(Text(f"\n{printable(place(chunk))}", style="bold"))
        console.print(Text(printable(chunk["text"])))


def place(chunk: dict[str, Any]) -> str:
    """Describe where a passage is: chunk, heading or page, and characters."""
    from ragkv.passages import page_name

    document_id = chunk["chunk_id"].rpartition("#")[0]
    parts = [chunk["chunk_id"], *filter(None, (page_name(document_id, chunk["page"]), chunk["heading"]))]
    parts += [f"characters {chunk['start']}-{chunk['end']}"] if chunk["start"] is not None else []
    return " · ".join(parts)
