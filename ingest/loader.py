"""Load documents from files and folders.

Text files are read here: .txt, .md, and .jsonl with one {"id", "text", "title"?, "metadata"?} a line. The formats of
`ingest/formats` (FORMATS) are parsed in a process of their own.

A fault concerns one document. `load` and `read` return it as a Rejected and go on; `parse` raises it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path, PurePath
from typing import BinaryIO, NoReturn

from ragkv.catalog.limits import MAX_NAME, MAX_TITLE, check_metadata, fitting
from ragkv.errors import InputError, InvalidDocument, TooLarge
from ragkv.ingest import sandbox
from ragkv.ingest.document_ids import DocumentIds
from ragkv.ingest.document_ids import Rejected as Rejected
from ragkv.ingest.folders import SUFFIXES, FolderFault, named
from ragkv.ingest.formats.base import Parsed
from ragkv.ingest.formats.charsets import decode_plain
from ragkv.ingest.sandbox import FORMATS, USUAL, Allowance
from ragkv.ingest.text import check_replacements, check_text, decode
from ragkv.ingest.wrapping import unwrapped, unwrapped_in_place
from ragkv.normalisation import normal_id, visible
from ragkv.passages import fence_of, heading_of, shortened
from ragkv.types import Document

_UNDERLINE = re.compile(r"^ {0,3}(=+|-+)[ \t]*$")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n.*?\n---[ \t]*\n", re.DOTALL)
SHOWN = frozenset({".pdf"})
"""Formats whose pages can be shown (page_pictures.py)."""
MOST_KEPT = 50 * 2**20
"""Bytes of the largest file that is kept for that."""
_HEADING_WITHIN = 65536
"""Characters at the start of a text that are searched for a heading."""


def load(
    paths: Iterable[Path],
    limit: int,
    collection: str = "default",
    root: Path | None = None,
    allowed: Allowance = USUAL,
) -> Iterator[Document | Rejected]:
    """Load the documents of files and folders in the given order. Folders are walked in sorted order.

    Files that the caller names must have a known suffix. In folders, hidden files and files with other suffixes are
    skipped. The id of a file's document is its path, so that ingesting the file again replaces the document. An id that
    occurs twice is rejected the second time.

    Args:
        paths: Files and folders.
        limit: Most bytes of a document, checked before it is read, and of its text.
        collection: Collection of the documents.
        root: Ids are relative to this folder, by default the working folder. Outside of it they are relative to the
            folder that holds the named path.
        allowed: What parsing a file in its own process may take.
    """
    ids, faults = DocumentIds(), list[FolderFault]()
    for path, name in named(paths, root, faults.append):
        for item in load_file(path, name, limit, collection, allowed):
            yield ids.checked(item, name)
    yield from map(rejected, faults)


def rejected(fault: FolderFault) -> Rejected:
    """Return a place that was not read as a rejected document."""
    return Rejected(str(fault.path), InvalidDocument(str(fault)))


def parse(
    data: bytes, name: str, limit: int, collection: str = "default", allowed: Allowance = USUAL
) -> list[Document]:
    """Parse an uploaded file. Any thread may call this, and several at a time.

    Args:
        data: The bytes of the file.
        name: Name of the file. It selects the format and becomes the id; it is never opened.
        limit: Most bytes of a document and of its text.
        collection: Collection of the documents.
        allowed: What parsing the file in its own process may take.

    Raises:
        InvalidDocument: The file or a document in it cannot be ingested.
        TooLarge: The file or a document in it is longer than `limit`.
    """
    documents = []
    for item in read(data, name, limit, collection, allowed):
        if isinstance(item, Rejected):
            raise item.error
        documents.append(item)
    return documents


def read(
    data: bytes, name: str, limit: int, collection: str = "default", allowed: Allowance = USUAL
) -> list[Document | Rejected]:
    """Parse an uploaded file as `parse` does, but return faults instead of raising them."""
    return list(_read(io.BytesIO(data), len(data), name, limit, collection, allowed))


def checked(document: Document, limit: int) -> Document:
    """Return the document as it is ingested: without invisible characters, and with the one form of its id.

    Raises:
        InvalidDocument: It cannot be ingested.
        TooLarge: Its text is longer than `limit`.
    """
    document = _visible_document(document)
    label = f"document {document.id!r}"
    for name, value in (("id", document.id), ("collection", document.collection)):
        if not value.strip() or len(value) > MAX_NAME or not value.isprintable():
            raise InvalidDocument(f"{label}: the {name} must be 1 to {MAX_NAME} printable characters")
    if not document.text.strip():
        raise InvalidDocument(f"{label} is empty")
    if len(document.title) > MAX_TITLE:
        raise InvalidDocument(f"{label}: its title may have {MAX_TITLE} characters, but it has {len(document.title)}")
    for part, value in (("title", document.title), ("text", document.text)):
        try:
            check_text(value)
            if part == "text":
                check_replacements(value)
        except InvalidDocument as error:
            raise InvalidDocument(f"{label}: its {part}: {error}") from None
    size = len(document.text.encode())
    if size > limit:
        raise TooLarge(f"{label} has {size} bytes, the limit is {limit} (max_document_bytes)")
    try:
        check_metadata(document.metadata)
    except ValueError as error:
        raise InvalidDocument(f"{label}: its metadata {error}") from None
    return document


def _visible_document(document: Document) -> Document:
    title, text, pages = visible(document.title), visible(document.text), document.pages
    if pages and len(text) != len(document.text):
        starts = [start for start, _ in pages]
        parts = [visible(document.text[start:end]) for start, end in pairwise([0, *starts, len(document.text)])]
        text = "".join(parts)
        ends = accumulate(map(len, parts))
        pages = tuple((end, number) for end, (_, number) in zip(ends, pages, strict=False))
    new = replace(document, id=normal_id(document.id), title=title, text=text, pages=pages)
    return document if new == document else new


def load_file(path: Path, name: str, limit: int, collection: str, allowed: Allowance) -> Iterator[Document | Rejected]:
    """Load the documents of one file. See `load`. name: selects the format, and is the id of a file's document."""
    try:
        if not path.is_file():
            raise InvalidDocument(f"{path}: there is no such file")
        with path.open("rb") as file:
            yield from _read(file, path.stat().st_size, name, limit, collection, allowed)
    except InputError as error:
        yield Rejected(name, error)
    except OSError as error:
        yield Rejected(name, InvalidDocument(f"{path} cannot be read: {error.strerror}"))


def _read(
    file: BinaryIO, size: int, name: str, limit: int, collection: str, allowed: Allowance
) -> Iterator[Document | Rejected]:
    """Yield the documents of one open file. The suffix of its name selects the format."""
    suffix = PurePath(name).suffix.lower()
    if suffix == ".jsonl":
        yield from _lines(file, name, limit, collection)
        return
    try:
        parsed = _parsed(file, size, suffix, limit, allowed)
    except InputError as error:
        yield Rejected(name, type(error)(f"{name}: {error}"))
        return
    try:
        title, metadata = shortened(parsed.title or PurePath(name).stem, MAX_TITLE), fitting(parsed.metadata)
        kept = _kept(file, size, suffix)
        yield checked(Document(name, title, parsed.text, metadata, collection, parsed.pages, file=kept), limit)
    except InputError as error:
        yield Rejected(name, error)


def _kept(file: BinaryIO, size: int, suffix: str) -> bytes:
    """Return the bytes of a file whose pages can be shown; b"" for others."""
    if suffix not in SHOWN or size > MOST_KEPT:
        return b""
    file.seek(0)
    return file.read(size)


def _parsed(file: BinaryIO, size: int, suffix: str, limit: int, allowed: Allowance) -> Parsed:
    """Parse a file of any format but .jsonl. Raises InvalidDocument and TooLarge without the file's name."""
    if suffix not in SUFFIXES:
        raise InvalidDocument(f"unknown format {suffix or 'without a suffix'}; known: {', '.join(SUFFIXES)}")
    if size > limit:
        raise TooLarge(f"it has {size} bytes, the limit is {limit} (max_document_bytes)")
    if suffix in FORMATS:
        try:
            return sandbox.parse(file, suffix, limit, allowed)
        except OSError as error:
            raise InvalidDocument(f"no process can be started to read it: {error.strerror}; try again later") from None
    text, encoding = decode_plain(file.read(limit + 1), "save it as UTF-8")
    text = visible(text)  # before lines are joined: a soft hyphen divides a word
    said = {} if encoding == "utf-8" else {"encoding": encoding}
    if suffix == ".md":
        return Parsed(_heading(text), unwrapped(text, markdown=True), {"format": "markdown", **said})
    return Parsed("", unwrapped(text), {"format": "text", **said} if said else {})


def _lines(file: BinaryIO, name: str, limit: int, collection: str) -> Iterator[Document | Rejected]:
    # JSON may escape every character of a text, which takes six bytes for one.
    longest = 6 * limit + 65536
    number, documents = 0, False
    while line := file.readline(longest + 1):
        number += 1
        where = f"{name}, line {number}"
        try:
            if len(line) > longest:
                while line and not line.endswith(b"\n"):
                    line = file.readline(longest + 1)
                raise TooLarge(f"{where} has over {longest} bytes; a document may have {limit} (max_document_bytes)")
            text = decode(line)
            if text.strip():
                documents = True
                yield checked(_line(text, where, collection), limit)
        except InputError as error:
            documents = True
            yield Rejected(where, error if where in str(error) else type(error)(f"{where}: {error}"))
    if not documents:
        yield Rejected(name, InvalidDocument(f"{name} is empty"))


def _line(text: str, where: str, collection: str) -> Document:
    """Parse one .jsonl line. Keys other than the four are ignored."""
    try:
        entry = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidDocument(f"{where} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise InvalidDocument(f"{where} is not a JSON object")
    for key, needed in (("id", True), ("text", True), ("title", False)):
        value = entry.get(key)
        if not (isinstance(value, str) or (value is None and not needed)):
            raise InvalidDocument(f'{where}: "{key}" must be a string')
    metadata = entry.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise InvalidDocument(f'{where}: "metadata" must be an object')
    text = unwrapped_in_place(str(entry["text"]).replace("\r\n", "\n").replace("\r", "\n"))
    return Document(entry["id"], entry.get("title") or entry["id"], text, metadata, collection)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _heading(text: str) -> str:
    """Return the text of the first Markdown heading outside of code; "" when there is none."""
    fenced, before = "", ""
    for line in _FRONT_MATTER.sub("", text[:_HEADING_WITHIN]).split("\n"):
        fence = fence_of(line)
        if fence:
            fenced = "" if fenced == fence else fenced or fence
        elif not fenced and (heading := heading_of(line)):
            return heading
        elif not fenced and before.strip() and _UNDERLINE.match(line):
            return before.strip()
        before = "" if fence or fenced else line
    return ""
