"""What a bulk ingest reads: the files of all sources, in shares, and about how many documents they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ragkv.ingest.document_ids import DocumentIds, Rejected
from ragkv.ingest.folders import FolderFault
from ragkv.ingest.loader import rejected
from ragkv.ingest.source_files import SourceFile, absolute
from ragkv.ingest.sources import open_locations

SHARE_FILES = 64
"""Files of a share at most."""
SHARE_BYTES = 2**18
"""Bytes of a share at most, unless it is one file."""
SAMPLE = 2**20
"""Bytes of a .jsonl file whose lines are counted."""


@dataclass(frozen=True)
class SourceListing:
    """The files of an ingest.

    Attributes:
        shares: Files with one document each, those together that one task reads.
        lines: Files with a document a line. One task reads them in order, so that an id is used once.
        refused: Files whose name an earlier file has, and folders that were not read.
        documents: How many documents there are; None where that is unknown, as for a .jsonl file in S3.
        exact: Whether `documents` is no estimate.
    """

    shares: tuple[tuple[SourceFile, ...], ...]
    lines: tuple[SourceFile, ...]
    refused: tuple[Rejected, ...]
    documents: int | None
    exact: bool

    @property
    def empty(self) -> bool:
        """Whether there is nothing to read."""
        return not (self.shares or self.lines or self.refused)

    @property
    def names(self) -> Iterator[str]:
        """Names of the files with one document each, which are the ids of these documents."""
        return (file.name for share in self.shares for file in share)


def list_files(locations: Sequence[str], stack: ExitStack, ids: DocumentIds | None = None) -> SourceListing:
    """List the files of all locations without reading them.

    Args:
        locations: Paths and addresses.
        stack: Keeps what is open, such as a copy of a repository. The files are readable until it ends.
        ids: Gives the files the ids of their documents.

    Raises:
        InputError: A place cannot be read.
        ConfigError: A package or a program is missing.
    """
    ids, refused, faults = ids or DocumentIds(), list[Rejected](), list[FolderFault]()
    single, lines = list[SourceFile](), list[SourceFile]()
    for file in map(absolute, open_locations(locations, stack, faults.append)):
        if file.lines:
            lines.append(file)
            continue
        if file.source:
            file = replace(file, name=ids.id_of(file.name, file.source))
        fault = ids.reserve(file.name, file.name, file.source)
        if fault is None:
            single.append(file)
        else:
            refused.append(fault)
    refused += map(rejected, faults)
    counts = [_line_count(file) for file in lines]
    known = [count for count, _ in counts if count is not None]
    total = len(single) + len(refused) + sum(known) if len(known) == len(counts) else None
    exact = all(exact for _, exact in counts)
    return SourceListing(tuple(_shares(single)), tuple(lines), tuple(refused), total, exact)


def _shares(files: Iterable[SourceFile]) -> Iterator[tuple[SourceFile, ...]]:
    share, size = list[SourceFile](), 0
    for file in files:
        if share and (len(share) == SHARE_FILES or size + file.size > SHARE_BYTES):
            yield tuple(share)
            share, size = [], 0
        share.append(file)
        size += file.size
    if share:
        yield tuple(share)


def _line_count(file: SourceFile) -> tuple[int | None, bool]:
    """Return how many lines a file has, and whether that is no estimate. Of a file elsewhere nothing is known."""
    if file.remote:
        return None, False
    try:
        with file.fetch(Path()).open("rb") as opened:
            sample = opened.read(SAMPLE)
    except OSError:
        return 1, True  # its refusal
    count = sample.count(b"\n") + (not sample.endswith(b"\n"))
    if len(sample) < SAMPLE:
        return count, True
    return max(1, round(count * file.size / len(sample))), False
