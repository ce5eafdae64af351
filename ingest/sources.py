"""Where the files of an ingest are: folders and files of this machine, objects in S3, and Git repositories.

    notes/  paper.pdf                                  this machine
    s3://bucket/prefix                                 objects.py; needs `ragkv[sources]` and credentials of the user
    git+https://host/repository@branch#folder          repository.py; needs the program git
    git+file:///path  git+ssh://user@host/repository

Only commands of the user lead here. The HTTP API takes the bytes of documents and fetches no address.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ragkv.errors import InputError, TooLarge
from ragkv.ingest.document_ids import DocumentIds, Rejected
from ragkv.ingest.folders import FolderFault, OnFault
from ragkv.ingest.loader import load_file, rejected
from ragkv.ingest.objects import open_bucket
from ragkv.ingest.repository import GIT, open_repository
from ragkv.ingest.sandbox import USUAL, Allowance
from ragkv.ingest.source_files import SourceFile, local_files
from ragkv.types import Document

S3 = "s3://"


def is_address(place: str) -> bool:
    """Return whether a place is an address rather than a path of this machine."""
    return place.startswith((GIT, S3))


def paths_among(locations: Iterable[str]) -> list[Path]:
    """Return the paths of this machine among locations."""
    return [Path(place) for place in locations if not is_address(place)]


def check_locations(locations: Iterable[str]) -> None:
    """Raise InputError for an address of another kind than those that are known."""
    for place in locations:
        scheme, colon, _ = place.partition("://")
        if colon and not is_address(place) and scheme.isidentifier():
            raise InputError(
                f"{place}: documents are read from files, folders, s3://BUCKET/PREFIX and git+https://…; fetch others "
                "yourself"
            )


def open_locations(locations: Sequence[str], stack: ExitStack, on_fault: OnFault | None = None) -> Iterator[SourceFile]:
    """Yield the files of all locations in order, those of folders in sorted order.

    Args:
        locations: Paths and addresses.
        stack: Keeps what is open, such as a copy of a repository. The files are readable until it ends.
        on_fault: Called for each place in a folder that is not read.

    Raises:
        InputError: A place cannot be read.
        ConfigError: A package or a program is missing.
    """
    for place in locations:
        if place.startswith(S3):
            yield from open_bucket(place)
        elif place.startswith(GIT):
            yield from open_repository(place, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        else:
            yield from local_files([Path(place)], on_fault=on_fault)


def load_locations(
    locations: Sequence[str],
    limit: int,
    collection: str = "default",
    allowed: Allowance = USUAL,
    ids: DocumentIds | None = None,
) -> Iterator[Document | Rejected]:
    """Load the documents of all locations, as `ragkv.ingest.loader.load` does those of paths.

    Args:
        locations: Paths and addresses.
        limit: Most bytes of a document. What is larger is not fetched.
        collection: Collection of the documents.
        allowed: What parsing a file in its own process may take.
        ids: Gives the documents their ids.

    Raises:
        InputError: A place cannot be read.
        ConfigError: A package or a program is missing.
    """
    faults = list[FolderFault]()
    with ExitStack() as stack:
        yield from load_files(open_locations(locations, stack, faults.append), limit, collection, allowed, ids)
    yield from map(rejected, faults)


def load_files(
    files: Iterable[SourceFile], limit: int, collection: str, allowed: Allowance, ids: DocumentIds | None = None
) -> Iterator[Document | Rejected]:
    """Load the documents of files. See `load_locations`."""
    ids = ids or DocumentIds()
    for file in files:
        for item in _load(file, limit, collection, allowed):
            if isinstance(item, Document) and file.source:
                item = replace(item, source=file.source)
            yield ids.checked(item, file.name)


def _load(file: SourceFile, limit: int, collection: str, allowed: Allowance) -> Iterator[Document | Rejected]:
    if file.remote and file.size > limit and not file.lines:
        fault = TooLarge(f"{file.name}: it has {file.size} bytes, the limit is {limit} (max_document_bytes)")
        yield Rejected(file.name, fault)
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = file.fetch(Path(folder))
        except InputError as error:
            yield Rejected(file.name, error)
            return
        yield from load_file(path, file.name, limit, collection, allowed)
