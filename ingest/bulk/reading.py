"""A datasource of Ray Data that reads and parses the files of an ingest. An item is a document or a refusal, as JSON.

It reads on the machine of the command only, because that machine has the files, git, and the credentials of S3. The
documents travel to the workers through Ray's object store.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from ragkv.ingest.bulk.listing import SourceListing
from ragkv.ingest.document_ids import DocumentIds, Rejected
from ragkv.ingest.groups import MOST_TOGETHER
from ragkv.ingest.sandbox import Allowance
from ragkv.ingest.sources import load_files
from ragkv.types import Document

if TYPE_CHECKING:
    from ragkv.ingest.source_files import SourceFile

COLUMN = "item"


@dataclass(frozen=True)
class ReadLimits:
    """How files are read.

    Attributes:
        document_bytes: Most bytes of a document.
        collection: Collection of the documents.
        allowed: What parsing a file in its own process may take.
    """

    document_bytes: int
    collection: str
    allowed: Allowance


class SourceDocuments(Datasource):  # type: ignore[misc]  # Ray is an optional package
    """The documents of a listing."""

    def __init__(self, listing: SourceListing, limits: ReadLimits):
        super().__init__()
        self._listing, self._limits = listing, limits

    @property
    def supports_distributed_reads(self) -> bool:
        """Files are read on the machine of the command."""
        return False

    def estimate_inmemory_data_size(self) -> int | None:
        """Ray Data need not know it."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return a task for each share, and one for all files that hold a document a line."""
        listing = self._listing
        tasks = [self._task(share, DocumentIds()) for share in listing.shares]
        if listing.lines:
            ids = DocumentIds()
            for name in listing.names:
                ids.reserve(name, name)
            tasks.append(self._task(listing.lines, ids))
        return tasks

    def _task(self, files: tuple[SourceFile, ...], ids: DocumentIds) -> ReadTask:
        size = sum(file.size for file in files)
        return ReadTask(partial(read_items, files, self._limits, ids), BlockMetadata(None, size, None, None))


def read_items(files: Iterable[SourceFile], limits: ReadLimits, ids: DocumentIds) -> Iterator[pyarrow.Table]:
    """Yield the items of files, some at a time."""
    items = list[str]()
    for item in load_files(files, limits.document_bytes, limits.collection, limits.allowed, ids):
        items.append(encode_item(item))
        if len(items) == MOST_TOGETHER:
            yield pyarrow.table({COLUMN: items})
            items = []
    if items:
        yield pyarrow.table({COLUMN: items})


def texts_of(table: pyarrow.Table) -> list[str]:
    """Return the texts of a block. A block of a file without documents has no column."""
    found: list[str] = table.column(COLUMN).to_pylist() if COLUMN in table.column_names else []
    return found


def encode_item(item: Document | Rejected) -> str:
    """Return an item as it travels to a worker."""
    if isinstance(item, Rejected):
        return json.dumps({"refused": str(item.error)})
    document = [item.id, item.title, item.text, dict(item.metadata), item.collection, item.pages]
    document += [item.source, b64encode(item.file).decode()]
    return json.dumps({"document": document})


def decode_item(text: str) -> Document | str:
    """Return the document, or why it is refused."""
    content = json.loads(text)
    if "refused" in content:
        return str(content["refused"])
    id, title, body, metadata, collection, pages, source, file = content["document"]
    starts = tuple((offset, number) for offset, number in pages)
    return Document(id, title, body, metadata, collection, starts, source, b64decode(file))
