"""`ragkv ingest`: files, folders and addresses become documents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli import remote
from ragkv.cli.common import Collection, Data, Device, Model, Store, Url, err, fail, opened, printable, settings_from
from ragkv.cli.documents import allowance, ingest_all_items
from ragkv.cli.folder_sync import sync_folders

if TYPE_CHECKING:
    from ingest.loader import Rejected
    from ragkv.types import Document

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
) -> int:
    """Read documents once, so that questions can be answered from them. Reading one again replaces it."""
    settings = settings_from(data, store, model, device, url=url)
    from ingest.sources import check_locations, load_locations, paths_among

    check_locations(paths)
    _tell_skipped(paths_among(paths))
    if sync:
        return sync_folders(settings, paths, collection)
    if settings.url:
        return remote.ingest(settings, paths, collection)
    items = load_locations(paths, settings.max_document_bytes, collection, allowance(settings))
    # Report unreadable files at once, before a model is loaded that may not be needed.
    failed, first = _first_document(items)
    if first is None:
        return 1 if failed else fail(f"nothing to ingest in {', '.join(paths)}", 1)
    with opened(settings, asks=False) as engine:
        return ingest_all_items(engine, itertools.chain([first], items), failed)


def _tell_skipped(paths: Sequence[Path]) -> None:
    """Name the files in the given folders that have no known format."""
    from ingest.loader import SUFFIXES, skipped

    names = [printable(str(path)) for path in skipped(paths)]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        files = f"{len(names)} file{'s' * (len(names) != 1)}"
        err().print(f"skipped {files} of other formats than {' '.join(SUFFIXES)}: {', '.join(names[:_NAMED])}{more}")


def _first_document(items: Iterator[Document | Rejected]) -> tuple[int, Document | None]:
    """(number of refused files before it, first document); every refusal is printed."""
    from ragkv.types import Document

    failed = 0
    for item in items:
        if isinstance(item, Document):
            return failed, item
        fail(item.error, 1)
        failed += 1
    return failed, None
