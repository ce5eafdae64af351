"""`ragkv ingest`: files, folders and addresses become documents."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli import remote
from ragkv.cli.common import Collection, Data, Device, Model, Store, Url, err, fail, opened, printable, settings_from
from ragkv.cli.documents import allowance
from ragkv.cli.folder_sync import sync_folders
from ragkv.cli.ingest_output import IngestOutput, Workload, ingest_all_items

if TYPE_CHECKING:
    from ragkv.ingest.document_ids import Rejected
    from ragkv.types import Document

_SETTINGS = "Settings (also RAGKV_* and ragkv.toml)"
_NAMED = 10
"""Skipped files that are named."""


def ingest(
    paths: Annotated[
        list[str],
        typer.Argument(help="Files, folders, s3://BUCKET/PREFIX, git+https://HOST/REPOSITORY.", metavar="PATH..."),
    ],
    collection: Collection = "default",
    data: Data = None,
    store: Store = None,
    model: Model = None,
    device: Device = None,
    url: Url = None,
    sync: Annotated[bool, typer.Option("--watch", help="Follow what changes in the folders until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object a document, and one with the sums.")] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Ingest with several workers on Ray, or on the cluster of RAY_ADDRESS.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=0, max=10_000, help="With --ray: workers; 0: one a GPU, else one a processor, at most 4.")
    ] = 0,
) -> int:
    """Read documents once, so that questions can be answered from them. Reading one again replaces it."""
    settings = settings_from(data, store, model, device, url=url)
    if (ray or as_json) and (sync or settings.url):
        raise typer.BadParameter(
            "this goes neither with --watch nor with --url", param_hint="--ray" if ray else "--json"
        )
    from ragkv.ingest.document_ids import DocumentIds
    from ragkv.ingest.sources import check_locations, load_locations, paths_among

    check_locations(paths)
    _tell_skipped(paths_among(paths))
    output = IngestOutput(as_json)
    if ray:
        from ragkv.cli.bulk_ingest import ingest_bulk

        return ingest_bulk(settings, paths, collection, workers, output)
    if sync:
        return sync_folders(settings, paths, collection)
    if settings.url:
        return remote.ingest(settings, paths, collection)
    ids = DocumentIds(collection=collection)
    items = load_locations(paths, settings.max_document_bytes, collection, allowance(settings), ids)
    # Report unreadable files at once, before a model is loaded that may not be needed.
    first = _first_document(items, output)
    if first is None:
        return output.end(0, 0) if output.done else fail(f"nothing to ingest in {', '.join(paths)}", 1)
    with opened(settings, asks=False) as engine:
        first = ids.look_up(engine.catalog, first)
        return ingest_all_items(engine, itertools.chain([first], items), output, Workload.of(paths_among(paths)))


def _tell_skipped(paths: Sequence[Path]) -> None:
    """Name the files in the given folders that have no known format.

    Those whose names tell no format come first, because they may be texts; the others are counted where there are many.
    """
    from ragkv.ingest.folders import SUFFIXES, skipped

    files = list(skipped(paths))
    if not files:
        return
    untold = [path for path in files if not path.suffix[1:].isalpha()]
    others = [path for path in files if path.suffix[1:].isalpha()]
    named = [printable(str(path)) for path in [*untold, *(others if len(files) <= _NAMED else ())]]
    counts = Counter(path.suffix.lower() for path in others) if len(files) > _NAMED else {}
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    told = [", ".join(named[:_NAMED]) + more] if named else []
    told += [f"{count} × {printable(suffix)}" for suffix, count in counts.items()]
    hint = "; a text needs the suffix .txt" if untold else ""
    count = f"{len(files)} file{'s' * (len(files) != 1)}"
    err().print(f"skipped {count} of other formats than {' '.join(SUFFIXES)}: {', '.join(told)}{hint}")


def _first_document(items: Iterator[Document | Rejected], output: IngestOutput) -> Document | None:
    """Return the first document, or None; every refusal before it is printed."""
    from ragkv.types import Document

    for item in items:
        if isinstance(item, Document):
            return item
        output.refuse(item.error)
    return None
