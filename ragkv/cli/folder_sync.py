"""`ragkv ingest FOLDER --watch`: documents follow the files of folders until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Protocol

from ragkv.cli import remote
from ragkv.cli.common import err, fail, opened, out, printable
from ragkv.cli.documents import allowance
from ragkv.cli.ingest_output import IngestOutput, ingest_all_items
from ragkv.errors import Busy, InputError, NotFound, Refused, StoreError, Unreachable

if TYPE_CHECKING:
    from ragkv.client import Client
    from ragkv.config import Settings
    from ragkv.engine.engine import Engine
    from ragkv.ingest.source_files import SourceFile

SECONDS = 1.0
"""Time between two scans."""
PATIENCE = 10.0
"""Time after which what could not be followed is tried again."""


class WatchTarget(Protocol):
    """Where the documents of watched folders go."""

    def documents(self) -> list[tuple[str, str]]:
        """Return id and source of each document of the collection; "" for a source that is not known."""

    def put(self, files: Sequence[SourceFile]) -> None:
        """Ingest files."""

    def remove(self, document_id: str) -> None:
        """Remove a document. Raises NotFound, or Refused with status 404."""


class OwnEngine:
    """An engine in this process."""

    def __init__(self, engine: Engine, settings: Settings, collection: str):
        self._engine, self._settings, self._collection = engine, settings, collection

    def documents(self) -> list[tuple[str, str]]:
        """Return id and source of each document of the collection; "" for a source that is not known."""
        return [(info.id, info.source) for info in self._engine.catalog.documents(self._collection)]

    def put(self, files: Sequence[SourceFile]) -> None:
        """Ingest files."""
        from ragkv.ingest.document_ids import DocumentIds
        from ragkv.ingest.sources import load_files

        limit, allowed = self._settings.max_document_bytes, allowance(self._settings)
        ids = DocumentIds(self._engine.catalog, self._collection)
        ingest_all_items(self._engine, load_files(files, limit, self._collection, allowed, ids), IngestOutput())

    def remove(self, document_id: str) -> None:
        """Remove a document. Raises NotFound."""
        from ragkv.ingest.jobs import Jobs
        from ragkv.ingest.pipeline import remove

        Jobs(self._engine.catalog, self._settings.max_document_bytes).withdraw(self._collection, document_id)
        remove(self._engine, self._collection, document_id)


class RemoteService:
    """A service at an address."""

    def __init__(self, client: Client, settings: Settings, collection: str):
        self._client, self._settings, self._collection = client, settings, collection

    def documents(self) -> list[tuple[str, str]]:
        """Return id and source of each document of the collection; "" for a source that is not known."""
        return [(document.id, document.source or "") for document in self._client.documents(self._collection)]

    def put(self, files: Sequence[SourceFile]) -> None:
        """Ingest files."""
        remote.send(self._client, files, self._collection, self._settings.max_document_bytes)

    def remove(self, document_id: str) -> None:
        """Remove a document. Raises Refused."""
        self._client.remove(document_id, self._collection)


def sync_folders(settings: Settings, locations: Sequence[str], collection: str) -> int:
    """Follow folders until Ctrl-C. Returns the exit code. Raises InputError if a place is no folder."""
    from ragkv.ingest.folder_changes import FolderScanner

    folders = [Path(place) for place in locations]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: only folders of this machine can be watched")
    with _open_target(settings, collection) as target:
        watch, lines, told = FolderScanner(folders), dict[str, set[str]](), set[str]()
        watch.assume(_earlier(target.documents(), folders))
        err().print(f"ragkv: watching {', '.join(map(printable, locations))}; Ctrl-C ends", style="dim")
        try:
            while True:
                wait = SECONDS
                changes = watch.scan()
                for fault in {str(fault) for fault in changes.faults} - told:
                    told.add(fault)
                    fail(fault, 1)
                if changes:
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


def _earlier(documents: Sequence[tuple[str, str]], folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files of the folders that documents came from.

    Of documents of an earlier release the ids tell whether they came from there. A folder that no id names has none.
    """
    from ragkv.ingest.folders import SUFFIXES, name_of

    names = [name_of(folder, folder, Path.cwd()) for folder in folders]
    starts = tuple(f"{name}/" for name in names if name != ".")
    for id, source in documents:
        for folder in folders if source else ():
            if (below := Path(source)).is_relative_to(whole := folder.resolve()):
                path = folder / below.relative_to(whole)
                yield name_of(path, folder, Path.cwd()), path
        if not source and starts and id.startswith(starts) and PurePath(id).suffix.lower() in SUFFIXES:
            yield id, Path()


def _put(target: WatchTarget, changed: Mapping[str, Path], lines: dict[str, set[str]], settings: Settings) -> None:
    """Ingest files, and remove the documents of lines that are no longer in them.

    lines: ids of the documents of each .jsonl file.
    """
    from ragkv.ingest.loader import load_file
    from ragkv.ingest.source_files import local_file
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


def _remove(target: WatchTarget, files: Mapping[str, Path], lines: dict[str, set[str]]) -> None:
    """Remove the documents of files that are gone: those that came from there, or that have the name and no source."""
    from ragkv.ingest.folders import source_of

    sources = dict(target.documents()) if files.keys() - lines.keys() else {}
    for name, path in files.items():
        source = "" if path == Path() else source_of(path)
        came = {id for id, known in sources.items() if source and known == source}
        _remove_all(target, lines.pop(name, came or ({name} if not sources.get(name) else set())))


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
