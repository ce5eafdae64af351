"""Spans: where each chunk stands in the text of its document, under which heading, and on which page.

A chunk's text is a piece of its document's text, and chunks are in order, so each is found behind the previous one.
Ingest computes spans when it splits a document. Chunks of a release that did not do so get theirs when the catalogue is
opened.
"""

from __future__ import annotations

import bisect
import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ragkv.types import Document, TextSpan

MARKED_FORMATS = frozenset({"markdown", "html", "docx", "pptx", "xlsx", "epub", "eml"})
"""Formats whose text marks headings with `#`."""
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.*?)[ \t]*#*[ \t]*$")
_FENCE = re.compile(r"^ {0,3}(```|~~~)")


def has_headings(document_id: str, metadata: Mapping[str, Any]) -> bool:
    """Whether `#` at the start of a line marks a heading in a document."""
    return metadata.get("format") in MARKED_FORMATS or PurePath(document_id).suffix.lower() == ".md"


def locate(document: Document, texts: Sequence[str]) -> list[TextSpan | None]:
    """Find the chunks of a document in its text.

    Args:
        document: The document.
        texts: Texts of its chunks, in order.

    Returns:
        One span for each text; None for a text that does not occur behind the previous one.
    """
    marked = has_headings(document.id, document.metadata)
    headings = list(_headings(document.text)) if marked else []
    heading_starts, page_starts = [start for start, _ in headings], [start for start, _ in document.pages]
    spans: list[TextSpan | None] = []
    position = 0
    for text in texts:
        start = document.text.find(text, position)
        if start < 0:
            spans.append(None)
            continue
        position = start + len(text)
        heading, page = bisect.bisect_right(heading_starts, start), bisect.bisect_right(page_starts, start)
        spans.append(
            TextSpan(
                start,
                position,
                headings[heading - 1][1] if heading else "",
                document.pages[page - 1][1] if page else None,
            )
        )
    return spans


def insert(connection: sqlite3.Connection, chunk: int, span: TextSpan | None) -> None:
    """Store the span of a chunk. chunk: its row."""
    columns = (None, None, "", None) if span is None else (span.start, span.end, span.heading, span.page)
    connection.execute("INSERT INTO spans VALUES (?, ?, ?, ?, ?)", (chunk, *columns))


def is_intact(connection: sqlite3.Connection) -> bool:
    """Return whether every chunk has a row."""
    sql = "SELECT EXISTS (SELECT 1 FROM chunks WHERE NOT EXISTS (SELECT 1 FROM spans WHERE chunk = chunks.row))"
    return not connection.execute(sql).fetchone()[0]


def rebuild(connection: sqlite3.Connection) -> None:
    """Locate the chunks of all documents of which some chunk has no row. Needs a write transaction."""
    sql = "SELECT DISTINCT document FROM chunks WHERE NOT EXISTS (SELECT 1 FROM spans WHERE chunk = chunks.row)"
    for (row,) in connection.execute(sql).fetchall():
        sql = "SELECT id, metadata, text, pages FROM documents JOIN versions ON document = row WHERE row = ?"
        document_id, metadata, text, pages = connection.execute(sql, (row,)).fetchone()
        starts = tuple((offset, number) for offset, number in json.loads(pages))
        document = Document(document_id, "", text, json.loads(metadata), pages=starts)
        chunks = connection.execute(
            "SELECT row, text FROM chunks WHERE document = ? ORDER BY ordinal", (row,)
        ).fetchall()
        connection.execute("DELETE FROM spans WHERE chunk IN (SELECT row FROM chunks WHERE document = ?)", (row,))
        for (chunk, _), span in zip(chunks, locate(document, [text for _, text in chunks]), strict=True):
            insert(connection, chunk, span)


def _headings(text: str) -> list[tuple[int, str]]:
    """Return (offset, text) of each Markdown heading outside of code."""
    found, fenced, start = list[tuple[int, str]](), "", 0
    for line in text.split("\n"):
        fence = _FENCE.match(line)
        if fence:
            fenced = "" if fenced == fence[1] else fenced or fence[1]
        elif not fenced and (heading := _HEADING.match(line)) and heading[1]:
            found.append((start, heading[1]))
        start += len(line) + 1
    return found
