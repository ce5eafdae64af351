"""Ids of the documents of files: two files are two documents, and one file is one, whatever path it was given by.

The id is the name of the file: its path, relative to the working folder or to what was named. Where another file has
this id, the folders above it are put before the name until no other file has the id. The catalogue knows the file of
each document, so a file that is given by another path keeps the id of its document.

Of a document of an earlier release, or one that was sent without a file, the file is not known. The file with its name
becomes its file. So does a file that has the same content, where the end of the file's path is the id.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Protocol

from ragkv.catalog import DocumentInfo
from ragkv.errors import InputError, InvalidDocument, NotFound
from ragkv.normalisation import normal_id, visible
from ragkv.types import Document


@dataclass(frozen=True)
class Rejected:
    """A document that cannot be ingested.

    Attributes:
        source: Its file, or its file and line.
        error: Why it is rejected.
    """

    source: str
    error: InputError


class StoredDocuments(Protocol):
    """The part of `ragkv.catalog.Catalog` that ids need."""

    def find(self, collection: str, document_id: str) -> DocumentInfo | None: ...

    def document_from(self, collection: str, path: str) -> str | None: ...

    def original(self, collection: str, document_id: str) -> Document: ...


class DocumentIds:
    """Gives the documents of one ingest their ids, and rejects one whose id an earlier document of it has."""

    def __init__(
        self, stored: StoredDocuments | None = None, collection: str = "default", sees_files: bool = True
    ) -> None:
        """Begin an ingest.

        Args:
            stored: The documents that are there; None: there are none, or `look_up` tells them.
            collection: Collection of the documents.
            sees_files: Whether the files are on this machine.
        """
        self._stored, self._collection, self._sees_files = stored, collection, sees_files
        self._names: dict[str, str] = {}
        self._sources: dict[str, str] = {}

    def checked(self, item: Document | Rejected, name: str) -> Document | Rejected:
        """Return an item of the file `name` under its id, or why it is rejected."""
        if isinstance(item, Rejected):
            return item
        item = self._placed(item)
        return self.reserve(item.id, name, item.source) or item

    def reserve(self, id: str, name: str, source: str = "") -> Rejected | None:
        """Let the file `name` use an id. Returns the refusal if an earlier document has it."""
        if id in self._names:
            fault = InvalidDocument(f"{name}: document id {id!r} was already used by {self._names[id]}")
            return Rejected(name, fault)
        self._names[id], self._sources[id] = name, source
        return None

    def look_up(self, stored: StoredDocuments, document: Document) -> Document:
        """Look ids up from now on. Returns the only document so far, under its id."""
        self._stored, name = stored, self._names.pop(document.id)
        del self._sources[document.id]
        placed = self._placed(document)
        self.reserve(placed.id, name, placed.source)
        return placed

    def id_of(self, name: str, source: str) -> str:
        """Return the id for a file by its path alone.

        Args:
            name: Name of the file.
            source: See `ragkv.ingest.folders.source_of`.
        """
        known = self._stored.document_from(self._collection, source) if self._stored else None
        ids = (*([known] if known else []), name, *longer_names(name, source))
        return next((id for id in ids if self._is_free(id, source)), ids[-1])

    def _placed(self, document: Document) -> Document:
        if not document.source:
            return document
        id = self.id_of(document.id, document.source)
        return replace(document, id=self._earlier_id(replace(document, id=id)) or id)

    def _is_free(self, id: str, source: str) -> bool:
        """Whether no other file has an id, as far as is known."""
        if id in self._sources:
            return self._sources[id] == source
        found = self._stored.find(self._collection, id) if self._stored else None
        return found is None or found.source in ("", source)

    def _earlier_id(self, document: Document) -> str | None:
        """Return the id under which a new document is there already, from a file that is not known or was moved."""
        if self._stored is None or self._stored.find(self._collection, document.id) is not None:
            return None
        parts = PurePosixPath(document.source).parts[1:]
        for count in range(len(parts), 0, -1):
            id = "/".join(parts[-count:])
            found = self._stored.find(self._collection, id) if id not in self._names else None
            if found is not None and self._is_left(found.source):
                with suppress(NotFound):
                    if _content(self._stored.original(self._collection, id)) == _content(document):
                        return id
        return None

    def _is_left(self, source: str) -> bool:
        return not source or (self._sees_files and not os.path.lexists(source))


def _content(document: Document) -> tuple[str, str, dict[str, Any]]:
    """Return what makes documents equal, also where an earlier release stored characters that nobody sees."""
    return normal_id(document.title), visible(document.text), dict(document.metadata)


def longer_names(name: str, source: str) -> Iterator[str]:
    """Yield the name of a file with more and more of the folders above it, at last its whole path."""
    parts = PurePosixPath(source).parts[1:]
    for count in range(len(PurePosixPath(name).parts) + 1, len(parts) + 1):
        yield "/".join(parts[-count:])
