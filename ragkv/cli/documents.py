"""`ragkv ls`, `rm`, `reindex`: the documents of the service."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

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
    err,
    fail,
    moment,
    opened,
    out,
    printable,
    progress,
    settings_from,
)
from ragkv.errors import InputError, without_password

if TYPE_CHECKING:
    from ragkv.catalog import Catalog, DocumentInfo
    from ragkv.client import RemoteDocument
    from ragkv.config import Settings
    from ragkv.engine.engine import Engine
    from ragkv.ingest.document_ids import DocumentIds, Rejected
    from ragkv.ingest.sandbox import Allowance
    from ragkv.types import Document


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
    from ragkv.errors import NotFound
    from ragkv.ingest.jobs import Jobs
    from ragkv.ingest.pipeline import remove

    with _catalog(settings) as catalog:
        queued = Jobs(catalog, settings.max_document_bytes).withdraw(collection, document_id)
        known = catalog.find(collection, document_id) is not None
    if not known and not queued:
        raise NotFound(f"collection {collection!r} has no document {document_id!r}; `ragkv ls` lists them")
    if known:
        with opened(settings, asks=False) as engine:
            remove(engine, collection, document_id)
    out().print(f"removed {printable(document_id)}")
    return 0


def reindex(data: Data = None, store: Store = None, model: Model = None, device: Device = None) -> int:
    """Embed every chunk again, and ingest again what was ingested with another model or chunk size."""
    settings = settings_from(data, store, model, device)
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


class IngestOutput:
    """What an ingest prints: a line for each document on stdout, and the sums on stderr at the end.

    As JSON it is an object for each document, refused ones included, and at last one with the sums.
    """

    def __init__(self, as_json: bool = False):
        """Choose the form."""
        self._json, self._console, self._started = as_json, out(), time.monotonic()
        self._console.file = self._file = sys.stdout  # `ingest_bulk` puts standard error in its place
        self._counts: Counter[str] = Counter()

    def show(self, document_id: str, status: str, chunks: int, tokens: int, warnings: Sequence[str] = ()) -> None:
        """Print what became of a document, and what its reader warns of."""
        self._counts[status] += 1
        for warning in warnings:
            fail(f"{document_id}: {warning}", 0)
        if self._json:
            done = {"document_id": document_id, "status": status, "chunks": chunks, "tokens": tokens}
            self._print(done | ({"warnings": list(warnings)} if warnings else {}))
        else:
            size = f"{chunks} chunk{'s' * (chunks != 1)}, {tokens} tokens"
            self._console.print(f"{status:<9}  {printable(document_id)}  ({size})")

    def refuse(self, error: Exception | str, document_id: str = "") -> None:
        """Print why a document is refused."""
        self._counts["failed"] += 1
        fail(error, 1)
        if self._json:
            self._print({"document_id": document_id or None, "status": "failed", "error": str(error)})

    def end(self, workers: int, encoded: int) -> int:
        """Print the sums. Returns the exit code.

        Args:
            workers: Processes that encoded.
            encoded: Chunks that they encoded. Those that the store had already do not count.
        """
        if self._json:
            sums = {status: self._counts[status] for status in ("added", "replaced", "unchanged", "failed")}
            seconds = round(time.monotonic() - self._started, 3)
            self._print({**sums, "encoded_chunks": encoded, "workers": workers, "seconds": seconds})
        err().print(", ".join(f"{count} {status}" for status, count in self._sorted()), style="dim")
        return 1 if self._counts["failed"] else 0

    @property
    def done(self) -> int:
        """Documents so far."""
        return self._counts.total()

    def _sorted(self) -> list[tuple[str, int]]:
        return sorted(self._counts.items(), key=lambda each: (each[0] == "failed", each[0]))

    def _print(self, content: dict[str, Any]) -> None:
        typer.echo(json.dumps(content, ensure_ascii=False), file=self._file)


def ingest_all_items(engine: Engine, items: Iterable[Document | Rejected], output: IngestOutput) -> int:
    """Ingest in order. A bad document is reported and the others continue. Returns the exit code."""
    from ragkv.ingest.groups import ingest_all

    before = engine.chunks.encoded
    with progress() as report:
        for document, outcome in ingest_all(
            engine, _documents(items, output), functools.partial(_report_progress, report, "")
        ):
            if isinstance(outcome, InputError):
                output.refuse(outcome, document.id)
            else:
                warnings = reader_warnings(document.metadata)
                output.show(document.id, outcome.status, outcome.chunks, outcome.tokens, warnings)
    engine.retriever.save()
    return output.end(1, engine.chunks.encoded - before)


def reader_warnings(metadata: Mapping[str, Any]) -> list[str]:
    """Return what the reader of a file found worth telling, a line each. metadata: of its document."""
    if not metadata.get("format"):  # what a sender calls so is not the reader's
        return []
    encoding = metadata.get("encoding")
    told = [f"read as {encoding}, because it is not UTF-8; save it as UTF-8 if letters are wrong"] if encoding else []
    found = metadata.get("warnings")
    return [*told, *map(str, found if isinstance(found, list) else [])]


def _documents(items: Iterable[Document | Rejected], output: IngestOutput) -> Iterator[Document]:
    """Yield the documents. Print why the others are refused."""
    from ragkv.types import Document

    for item in items:
        if isinstance(item, Document):
            yield item
        else:
            output.refuse(item.error)


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


_COLUMNS = ("id", "title", "chunks", "tokens", "collection")
_LONG = ("bytes", "version", "created", "updated")
_FIELDS = (*_COLUMNS, *_LONG, "metadata", "source")


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
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for name in columns:
        number = name in ("chunks", "tokens", "bytes", "version")
        table.add_column(name, overflow="fold", justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table, soft_wrap=False)
