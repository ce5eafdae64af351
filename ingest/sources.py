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
from pathlib import Path

from ingest.loader import Rejected, UniqueIds, load_file
from ingest.objects import open_bucket
from ingest.repository import GIT, open_repository
from ingest.sandbox import USUAL, Allowance
from ingest.source_files import SourceFile, local_files
from ragkv.errors import InputError, TooLarge
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


def open_locations(locations: Sequence[str], stack: ExitStack) -> Iterator[SourceFile]:
    """Yield the files of all locations in order, those of folders in sorted order.

    Args:
        locations: Paths and addresses.
        stack: Keeps what is open, such as a copy of a repository. The files are readable until it ends.

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
            yield from local_files([Path(place)])


def load_locations(
    locations: Sequence[str], limit: int, collection: str = "default", allowed: Allowance = USUAL
) -> Iterator[Document | Rejected]:
    """Load the documents of all locations, as `ingest.loader.load` does those of paths.

    Args:
        locations: Paths and addresses.
        limit: Most bytes of a document. What is larger is not fetched.
        collection: Collection of the documents.
        allowed: What parsing a file in its own process may take.

    Raises:
        InputError: A place cannot be read.
        ConfigError: A package or a program is missing.
    """
    with ExitStack() as stack:
        yield from load_files(open_locations(locations, stack), limit, collection, allowed)


def load_files(
    files: Iterable[SourceFile], limit: int, collection: str, allowed: Allowance, unique: UniqueIds | None = None
) -> Iterator[Document | Rejected]:
    """Load the documents of files. See `load_locations`. unique: holds ids that other files have used."""
    unique = unique or UniqueIds()
    for file in files:
        for item in _load(file, limit, collection, allowed):
            yield unique.checked(item, file.name)


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
