"""`ragkv ls`, `rm`, `reindex`: the documents of the service."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ragkv.cli import remote
from ragkv.cli.common import (
    Collection,
    Data,
    Device,
    Model,
    Progress,
    Store,
    Url,
    check_documents,
    err,
    moment,
    no_document,
    opened,
    out,
    printable,
    progress,
    settings_from,
)
from ragkv.errors import without_password

if TYPE_CHECKING:
    from ragkv.catalog import Catalog, DocumentInfo
    from ragkv.client import RemoteDocument
    from ragkv.config import Settings
    from ragkv.ingest.document_ids import DocumentIds
    from ragkv.ingest.sandbox import Allowance


def ls(
    collection: Annotated[str | None, typer.Option("--collection", "-c", help="Only this collection.")] = None,
    sort: Annotated[str, typer.Option(help="id, title, created, updated, bytes, tokens or chunks.")] = "id",
    descending: Annotated[bool, typer.Option("--desc", help="The largest or latest first.")] = False,
    search: Annotated[str, typer.Option(help="Only documents whose id or title has these words.")] = "",
    long: Annotated[bool, typer.Option("--long", "-l", help="Bytes, version and times, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a document.")] = False,
    data: Data = None,
    url: Url = None,
) -> int:
    """List the documents: id, title, chunks, tokens, collection."""
    settings = settings_from(data, url=url)
    from ragkv.catalog import DocumentOrder, SortField

    order = DocumentOrder(cast("SortField", sort), descending, search)  # refuses a wrong word
    found: Sequence[DocumentInfo | RemoteDocument]
    if settings.url:
        found = remote.documents(settings, collection, order)
    elif not settings.data.exists():
        found = []
    else:
        with _catalog(settings) as catalog:
            found = catalog.documents(collection, order)
    if not found:
        hint = "try other words" if search else "add some with `ragkv ingest`"
        err().print(f"no documents in {without_password(settings.url or str(settings.data))}; {hint}", style="dim")
        return 0
    if as_json:
        for info in found:
            typer.echo(json.dumps({name: getattr(info, name) for name in _FIELDS}, ensure_ascii=False))
    else:
        _list(found, long)
    return 0


def rm(
    document_id: Annotated[str, typer.Argument(help="Id of the document, as `ragkv ls` shows it.", metavar="ID")],
    collection: Collection = "default",
    data: Data = None,
    store: Store = None,
    model: Model = None,
    device: Device = None,
    url: Url = None,
) -> int:
    """Remove a document: its text, its vectors, its KV, and its place in the queue."""
    from ragkv.normalisation import normal_id

    settings, document_id = settings_from(data, store, model, device, url=url), normal_id(document_id)
    if settings.url:
        remote.remove(settings, document_id, collection)
        out().print(f"removed {printable(document_id)}")
        return 0
    from ragkv.ingest.jobs import Jobs
    from ragkv.ingest.pipeline import remove

    with _catalog(settings) as catalog:
        queued = Jobs(catalog, settings.max_document_bytes).withdraw(collection, document_id)
        known = catalog.find(collection, document_id) is not None
        if not known and not queued:
            raise no_document(catalog, collection, document_id)
    if known:
        with opened(settings, asks=False) as engine:
            remove(engine, collection, document_id)
    out().print(f"removed {printable(document_id)}")
    return 0


def reindex(data: Data = None, store: Store = None, model: Model = None, device: Device = None) -> int:
    """Embed every chunk again, and ingest again what was ingested with another model or chunk size."""
    settings = settings_from(data, store, model, device)
    check_documents(settings)
    from ragkv.ingest.pipeline import reindex as again

    with opened(settings, asks=False) as engine, progress() as report:
        done = again(engine, functools.partial(_report_progress, report, "all documents"))
    out().print(f"{done.embedded} chunks embedded again, {done.reread} documents read again")
    return 0


def allowance(settings: Settings) -> Allowance:
    """Return what parsing a file may take. Raises MissingPackage."""
    from ragkv.config import IngestSettings
    from ragkv.ingest.sandbox import allowance_of

    return allowance_of(settings.part(IngestSettings))


def _report_progress(report: Progress, document_id: str, stage: str, done: int, total: int) -> None:
    report(f"{stage:<6} {document_id[-40:]}", done, total)


@contextmanager
def _catalog(settings: Settings) -> Iterator[Catalog]:
    """Open the catalogue alone, without a model. KV on its disk gives way to it."""
    from ragkv.catalog import Catalog
    from ragkv.catalog.database import nothing_gives_way
    from ragkv.store import open_store

    on_disk = settings.store == "disk"
    give_way = open_store("disk", settings.data, settings.store_timeout).give_way if on_disk else nothing_gives_way
    catalog = Catalog.open(settings.catalog_address, give_way)
    try:
        yield catalog
    finally:
        catalog.close()


@contextmanager
def document_ids(settings: Settings, collection: str) -> Iterator[DocumentIds]:
    """Open what gives documents their ids, before there is an engine."""
    from ragkv.ingest.document_ids import DocumentIds

    if isinstance(where := settings.catalog_address, Path) and not where.exists():
        yield DocumentIds(collection=collection)
        return
    with _catalog(settings) as catalog:
        yield DocumentIds(catalog, collection)


LEAST_TITLE = 6
"""Columns of a terminal that a title keeps where ids are long."""
_COLUMNS = ("id", "title", "chunks", "tokens", "collection")
_LONG = ("bytes", "version", "created", "updated")
_FIELDS = (*_COLUMNS, *_LONG, "metadata", "source", "file_bytes")


def _cells(info: DocumentInfo | RemoteDocument, long: bool) -> tuple[str, ...]:
    cells = (printable(info.id), printable(info.title), str(info.chunks), str(info.tokens), printable(info.collection))
    if not long:
        return cells
    return (*cells, str(info.bytes or 0), str(info.version), moment(info.created), moment(info.updated))


def _list(found: Iterable[DocumentInfo | RemoteDocument], long: bool) -> None:
    """Print a table on a terminal, elsewhere tab-separated lines that no width cuts, below the names of the columns."""
    console, columns = out(), (*_COLUMNS, *(_LONG if long else ()))
    rows = [_cells(info, long) for info in found]
    if not console.is_terminal:
        for row in [columns, *rows]:
            typer.echo("\t".join(" ".join(cell.split()) for cell in row))  # rich would widen the tabs
        return
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    widest = [max(map(cell_len, column)) for column in zip(columns, *rows, strict=True)]
    room = console.width - sum(widest) - 3 * len(columns) - 1  # three blanks a column
    for name, width in zip(columns, widest, strict=True):
        if name == "title":  # gives way to the others
            table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=max(LEAST_TITLE, width + min(0, room)))
            continue
        number = name in ("chunks", "tokens", "bytes", "version")
        table.add_column(name, overflow="fold", justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table, soft_wrap=False)
