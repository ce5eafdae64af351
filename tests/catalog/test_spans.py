"""A chunk's span names its place in the text, its heading and its page. Older catalogues get theirs when opened."""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragkv.catalog import Catalog, DocumentOrder, DocumentVersion
from ragkv.errors import InputError
from ragkv.ingest.chunker import split
from ragkv.passages import locate
from ragkv.types import Document, Key, TextSpan
from tests.catalog.test_catalog import WORDS, put
from tests.catalogs import undo_migrations


class WordPrompt:
    def chunk(self, title: str, text: str) -> tuple[int, ...]:
        return tuple(range(len(title.split()) + len(text.split()) + 2))


def test_every_chunk_of_a_split_document_is_a_slice_of_its_text() -> None:
    paragraphs = [f"Lamp {n} of Tarn was lit at dusk by keeper {n}, and put out at dawn." for n in range(12)]
    document = Document("lamps.txt", "Lamps", "\n\n".join([*paragraphs, *paragraphs]))  # every passage occurs twice
    chunks = split(document, WordPrompt(), 40)
    assert len(chunks) > 8
    spans = [chunk.span for chunk in chunks if chunk.span]
    assert [document.text[span.start : span.end] for span in spans] == [chunk.text for chunk in chunks]
    assert all(first.end <= second.start for first, second in itertools.pairwise(spans))


def test_the_heading_is_the_last_one_before_the_chunk_and_never_one_in_code() -> None:
    text = "Preface.\n\n# Lamps\n\nFirst lamp.\n\n```\n# no heading\n```\n\nSecond lamp.\n\n## Wicks #\n\nA wick."
    texts = ["Preface.", "# Lamps\n\nFirst lamp.", "Second lamp.", "A wick."]
    spans = locate(Document("a.md", "", text), texts)
    assert [span.heading for span in spans if span] == ["", "Lamps", "Lamps", "Wicks"]
    plain = locate(Document("a.txt", "", text), texts)
    assert {span.heading for span in plain if span} == {""}, "a plain text has no headings"


@pytest.mark.parametrize("format", [["markdown"], {"markdown": 1}, [], None, 1.5, True])
def test_a_format_that_is_no_name_marks_no_headings(format: Any) -> None:
    spans = locate(Document("a", "", "# Lamps\n\nA lamp.", {"format": format}), ["# Lamps\n\nA lamp."])
    assert [span.heading for span in spans if span] == [""]


def test_the_page_is_the_one_on_which_the_chunk_begins() -> None:
    document = Document("a.pdf", "", "one two\n\nthree four", pages=((0, 1), (9, 3)))
    assert list(locate(document, ["one", "two\n\nthree", "four"])) == [
        TextSpan(0, 3, "", 1),
        TextSpan(4, 14, "", 1, ((9, 3),)),
        TextSpan(15, 19, "", 3),
    ]
    assert list(locate(document, ["absent", "four"])) == [None, TextSpan(15, 19, "", 3)]


def test_a_file_of_the_release_before_gets_versions_sizes_and_spans(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    catalog = Catalog.open(path)
    put(catalog, "a.md", ["# Öl\none", "two", "one"])
    put(catalog, "b", ["only"])
    before = catalog.documents()
    catalog.close()
    with closing(sqlite3.connect(path)) as connection, connection:  # what the release before did not have
        for name in ("insert", "update"):
            connection.execute(f"DROP TRIGGER versions_{name}")
        connection.execute("DROP TABLE versions")
        connection.execute("DROP TABLE spans")
        undo_migrations(connection)
    connection.close()
    again = Catalog.open(path)
    try:
        assert again.documents() == before
        assert [(info.version, info.bytes) for info in before] == [(1, len("# Öl\none\ntwo\none".encode())), (1, 4)]
        spans = [chunk.span for chunk in again.chunks_of("default", "a.md")]
        assert spans == [TextSpan(0, 8, "Öl"), TextSpan(9, 12, "Öl"), TextSpan(13, 16, "Öl")]
        put(again, "a.md", ["new"])
        assert again.document("default", "a.md").version == 2
    finally:
        again.close()


def test_the_version_counts_contents_and_begins_anew_with_a_new_document(catalog_address: Path | str) -> None:
    catalog = Catalog.open(catalog_address)
    for texts in (["one"], ["one"], ["two", "three"]):
        put(catalog, "a", texts)
    info = catalog.document("default", "a")
    assert (info.version, info.bytes) == (2, len("two\nthree"))
    assert {chunk.version for chunk in catalog.chunks_of("default", "a")} == {2}
    catalog.remove("default", "a")
    put(catalog, "a", ["one"])
    assert catalog.document("default", "a").version == 1
    catalog.close()


def test_pages_and_spans_are_kept_with_the_document(catalog_address: Path | str) -> None:

    catalog = Catalog.open(catalog_address)
    document = Document("a.pdf", "t", "one\n\ntwo", {"format": "pdf"}, pages=((0, 2), (5, 3)))
    chunks = split(document, WordPrompt(), 40)
    vectors, keys = np.zeros((len(chunks), 4), np.float32), [Key(f"k{n}") for n in range(len(chunks))]
    catalog.put_document(DocumentVersion(document, "h", chunks, vectors, keys, WORDS, "r"))
    assert catalog.original("default", "a.pdf") == document
    assert [chunk.span for chunk in catalog.chunks_of("default", "a.pdf")] == [TextSpan(0, 8, "", 2, ((5, 3),))]
    catalog.close()


# Order and search


@pytest.mark.parametrize("sort", ["id", "title", "created", "updated", "bytes", "tokens", "chunks"])
@pytest.mark.parametrize("descending", [False, True])
def test_pages_in_any_order_are_the_sorted_list(catalog_address: Path | str, sort: str, descending: bool) -> None:
    catalog = Catalog.open(catalog_address)
    for n, name in enumerate(("d", "b", "a", "e", "c")):
        put(catalog, name, ["x" * (1 + n % 2)] * (1 + n % 3))
    put(catalog, "z", ["elsewhere"], "other")
    order = DocumentOrder(sort, descending)  # type: ignore[arg-type]
    listed, place = [], None
    while page := catalog.page("default", place, 2, order=order):
        listed += page
        place = order.place(page[-1])
    expected = sorted(catalog.documents("default"), key=order.place, reverse=descending)
    assert [info.id for info in listed] == [info.id for info in expected]
    assert [info.id for info in catalog.documents("default", order)] == [info.id for info in expected]
    catalog.close()


def test_a_page_follows_a_document_that_is_gone(catalog_address: Path | str) -> None:
    catalog = Catalog.open(catalog_address)
    for name in ("a", "b", "c"):
        put(catalog, name, [name * 3])
    order = DocumentOrder("created")
    place = order.place(catalog.document("default", "b"))
    catalog.remove("default", "b")
    assert [info.id for info in catalog.page("default", place, 9, order=order)] == ["c"]
    catalog.close()


def test_words_are_found_in_ids_and_titles_in_any_case(catalog_address: Path | str) -> None:
    catalog = Catalog.open(catalog_address)
    for name in ("notes/Ärger.md", "notes/tea_100%.md", "lamp"):
        put(catalog, name, ["x"])
    found = {
        words: [info.id for info in catalog.page("default", None, 9, order=DocumentOrder(words=words))]
        for words in ("ärger", "NOTES", "title lamp", "100%", "tea_", "teax", " ")
    }
    assert found == {
        "ärger": ["notes/Ärger.md"],
        "NOTES": ["notes/tea_100%.md", "notes/Ärger.md"],
        "title lamp": ["lamp"],
        "100%": ["notes/tea_100%.md"],
        "tea_": ["notes/tea_100%.md"],
        "teax": [],
        " ": ["lamp", "notes/tea_100%.md", "notes/Ärger.md"],
    }
    catalog.close()


def test_an_unknown_sort_field_is_refused_before_it_reaches_sql() -> None:
    with pytest.raises(InputError, match="cannot be sorted by 'text; DROP'"):
        DocumentOrder("text; DROP")  # type: ignore[arg-type]
