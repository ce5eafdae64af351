"""`ingest`, `ls` and `rm` by a service (`--url`). `ask` uses `connected` only."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.cli.common import Progress, err, fail, out, printable, progress
from ragkv.errors import InputError, TooLarge

if TYPE_CHECKING:
    from ragkv.catalog import DocumentOrder
    from ragkv.client import Client, Job, RemoteChunk, RemoteDocument
    from ragkv.config import Settings
    from ragkv.ingest.source_files import SourceFile
    from ragkv.passages import SearchResult
    from ragkv.retrieval import SearchScope

BATCH_FILES, BATCH_BYTES = 50, 16 * 2**20
"""Limits of a batch of files that are sent together. A larger file is sent alone."""


@contextmanager
def connected(settings: Settings) -> Iterator[Client]:
    """Open a client of the service in the settings."""
    from ragkv.client import Client

    # The service refuses an answer that exceeds its deadline, so a slightly longer timeout is enough.
    with Client(settings.url, settings.key.get_secret_value(), timeout=settings.deadline + 30) as client:
        yield client


def ingest(settings: Settings, locations: Sequence[str], collection: str) -> int:
    """Send the files of all locations and print the outcome of every document. Returns the exit code."""
    from ragkv.ingest.folders import FolderFault
    from ragkv.ingest.sources import open_locations

    with connected(settings) as client, ExitStack() as stack:
        faults = list[FolderFault]()
        files = open_locations(locations, stack, faults.append)
        done, failed = send(client, files, collection, settings.max_document_bytes)
        failed += sum(fail(str(fault), 1) for fault in faults)
    if not (failed or done):
        return fail(f"nothing to ingest in {', '.join(locations)}", 1)
    err().print(f"{done} documents" + (f", {failed} failed" if failed else ""), style="dim")
    return 1 if failed else 0


def send(client: Client, files: Iterable[SourceFile], collection: str, limit: int) -> tuple[int, int]:
    """Send files, one job per batch, and print the outcome of every document.

    Args:
        client: Client of the service.
        files: The files.
        collection: Collection of the documents.
        limit: Most bytes of a file that is copied from elsewhere, where it is one document.

    Returns:
        How many documents are in, and how many failed.
    """
    failed = done = 0
    with progress() as report:
        for batch in _batches(files):
            with tempfile.TemporaryDirectory() as folder:
                fetched, refused = _fetch(batch, Path(folder), limit)
                failed += refused
                if not fetched:
                    continue
                paths, names, sources = zip(*fetched, strict=True)
                try:
                    id = client.upload(paths, names, collection=collection, sources=sources)
                except OSError as error:
                    failed += fail(error, 1)
                    continue
            for job in client.follow(id):
                _show_progress(report, job)
            job = client.job(id, all=True)
            failed += _show_outcomes(job)
            done += job.counts.completed + job.counts.unchanged
    return done, failed


def _fetch(batch: Sequence[SourceFile], folder: Path, limit: int) -> tuple[list[tuple[Path, str, str]], int]:
    """Return (path, name, source) of the files, copied below a folder where need be, and how many could not be read."""
    fetched, failed = list[tuple[Path, str, str]](), 0
    for number, file in enumerate(batch):
        own = folder / str(number)
        own.mkdir()
        try:
            if file.remote and file.size > limit and not file.lines:
                raise TooLarge(f"{file.name} has {file.size} bytes, the limit is {limit} (max_document_bytes)")
            fetched.append((file.fetch(own), file.name, file.source))
        except InputError as error:
            failed += fail(error, 1)
    return fetched, failed


def documents(settings: Settings, collection: str | None, order: DocumentOrder) -> list[RemoteDocument]:
    """List the documents of one collection, or of all."""
    with connected(settings) as client:
        names = [collection] if collection is not None else [each.name for each in client.collections()]
        found = [document for name in names for document in client.documents(name, q=order.words)]
    if order.sort != "id":  # by id, documents stay grouped by collection
        found.sort(key=lambda document: (getattr(document, order.sort), document.collection, document.id))
    return found[::-1] if order.descending else found


def show(settings: Settings, document_id: str, collection: str) -> tuple[RemoteDocument, list[RemoteChunk]]:
    """Return a document with its text, and its chunks. Raises Refused if there is none."""
    with connected(settings) as client:
        return client.document(document_id, collection, text=True), list(client.chunks(document_id, collection))


def search(settings: Settings, query: str, scope: SearchScope, top_k: int | None) -> SearchResult:
    """Search for passages."""
    with connected(settings) as client:
        return client.search(query, scope.collection, top_k, scope.filter, scope.documents)


def remove(settings: Settings, document_id: str, collection: str) -> None:
    """Remove a document from the service. Raises Refused if there is none."""
    with connected(settings) as client:
        client.remove(document_id, collection)


def _batches(files: Iterable[SourceFile]) -> Iterator[list[SourceFile]]:
    batch: list[SourceFile] = []
    size = 0
    for file in files:
        if batch and (len(batch) == BATCH_FILES or size + file.size > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += file.size
    if batch:
        yield batch


def _show_progress(report: Progress, job: Job) -> None:
    report(f"{job.counts.done} of {job.counts.total} documents  {job.stage}", job.counts.done, job.counts.total)


def _show_outcomes(job: Job) -> int:
    """Print a line for every document. Returns how many failed."""
    failed = 0
    for document in job.documents:
        if document.error is not None:
            failed += fail(document.error.message, 1)
        else:
            out().print(f"{document.status:<9}  {printable(document.id)}")
    return failed
