"""`ragkv ingest FOLDER --watch`: documents follow the files of folders until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Protocol

from ragkv.cli import remote
from ragkv.cli.common import err, fail, opened, out, printable
from ragkv.cli.documents import IngestOutput, allowance, ingest_all_items
from ragkv.errors import Busy, InputError, NotFound, Refused, StoreError, Unreachable

if TYPE_CHECKING:
    from ingest.source_files import SourceFile
    from ragkv.client import Client
    from ragkv.config import Settings
    from ragkv.engine.engine import Engine

SECONDS = 1.0
"""Time between two scans."""
PATIENCE = 10.0
"""Time after which what could not be followed is tried again."""


class WatchTarget(Protocol):
    """Where the documents of watched folders go."""

    def ids(self) -> list[str]:
        """Return the ids of the collection's documents."""

    def put(self, files: Sequence[SourceFile]) -> None:
        """Ingest files."""

    def remove(self, document_id: str) -> None:
        """Remove a document. Raises NotFound, or Refused with status 404."""


class OwnEngine:
    """An engine in this process."""

    def __init__(self, engine: Engine, settings: Settings, collection: str):
        self._engine, self._settings, self._collection = engine, settings, collection

    def ids(self) -> list[str]:
        """Return the ids of the collection's documents."""
        return [info.id for info in self._engine.catalog.documents(self._collection)]

    def put(self, files: Sequence[SourceFile]) -> None:
        """Ingest files."""
        from ingest.sources import load_files

        limit, allowed = self._settings.max_document_bytes, allowance(self._settings)
        ingest_all_items(self._engine, load_files(files, limit, self._collection, allowed), IngestOutput())

    def remove(self, document_id: str) -> None:
        """Remove a document. Raises NotFound."""
        from ingest.jobs import Jobs
        from ingest.pipeline import remove

        Jobs(self._engine.catalog, self._settings.max_document_bytes).withdraw(self._collection, document_id)
        remove(self._engine, self._collection, document_id)


class RemoteService:
    """A service at an address."""

    def __init__(self, client: Client, settings: Settings, collection: str):
        self._client, self._settings, self._collection = client, settings, collection

    def ids(self) -> list[str]:
        """Return the ids of the collection's documents."""
        return [document.id for document in self._client.documents(self._collection)]

    def put(self, files: Sequence[SourceFile]) -> None:
        """Ingest files."""
        remote.send(self._client, files, self._collection, self._settings.max_document_bytes)

    def remove(self, document_id: str) -> None:
        """Remove a document. Raises Refused."""
        self._client.remove(document_id, self._collection)


def sync_folders(settings: Settings, locations: Sequence[str], collection: str) -> int:
    """Follow folders until Ctrl-C. Returns the exit code. Raises InputError if a place is no folder."""
    from ingest.folder_changes import FolderScanner

    folders = [Path(place) for place in locations]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: only folders of this machine can be watched")
    with _open_target(settings, collection) as target:
        watch, lines = FolderScanner(folders), dict[str, set[str]]()
        watch.assume(_earlier(target.ids(), folders))
        err().print(f"ragkv: watching {', '.join(map(printable, locations))}; Ctrl-C ends", style="dim")
        try:
            while True:
                wait = SECONDS
                if changes := watch.scan():
                    try:
                        _put(target, changes.changed, lines, settings)
                        _remove(target, changes.removed, lines)
                        watch.accept(changes)
                    except (Busy, StoreError, Unreachable) as error:
                        fail(f"{error}; trying again in {PATIENCE:g} s", 1)
                        wait = PATIENCE
                time.sleep(wait)
        except KeyboardInterrupt:
            return 0


def _earlier(ids: Sequence[str], folders: Sequence[Path]) -> Iterator[str]:
    """Yield the documents that come from files of the folders, by their ids. A folder that ids do not name has none."""
    from ingest.loader import SUFFIXES, name_of

    names = [name_of(folder, folder, Path.cwd()) for folder in folders]
    starts = tuple(f"{name}/" for name in names if name != ".")
    for id in ids:
        if starts and id.startswith(starts) and PurePath(id).suffix.lower() in SUFFIXES:
            yield id


def _put(target: WatchTarget, changed: Mapping[str, Path], lines: dict[str, set[str]], settings: Settings) -> None:
    """Ingest files, and remove the documents of lines that are no longer in them.

    lines: ids of the documents of each .jsonl file.
    """
    from ingest.loader import load_file
    from ingest.source_files import local_file
    from ragkv.types import Document

    files = [local_file(path, name) for name, path in changed.items()]
    if not files:
        return
    # Read before the ingest: a file that changes in between is a change of the next scan, which finds what is gone.
    found = dict[str, set[str]]()
    for file in files:
        if file.lines:
            path, limit = changed[file.name], settings.max_document_bytes
            items = list(load_file(path, file.name, limit, "default", allowance(settings)))
            found[file.name] = {item.id for item in items if isinstance(item, Document)}
            if len(found[file.name]) < len(items):  # a line that cannot be read may be that of an earlier document
                found[file.name] |= lines.get(file.name, set())
    target.put(files)
    for name, ids in found.items():
        _remove_all(target, lines.get(name, set()) - ids)
        lines[name] = ids


def _remove(target: WatchTarget, names: Sequence[str], lines: dict[str, set[str]]) -> None:
    for name in names:
        _remove_all(target, lines.pop(name, {name}))


def _remove_all(target: WatchTarget, ids: set[str]) -> None:
    for id in sorted(ids):
        with suppress(NotFound):
            try:
                target.remove(id)
            except Refused as error:
                if error.status != 404:
                    raise
                continue
            out().print(f"removed    {printable(id)}")


@contextmanager
def _open_target(settings: Settings, collection: str) -> Iterator[WatchTarget]:
    if settings.url:
        with remote.connected(settings) as client:
            yield RemoteService(client, settings, collection)
    else:
        with opened(settings, asks=False) as engine:
            yield OwnEngine(engine, settings, collection)
