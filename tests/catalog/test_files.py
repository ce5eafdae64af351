"""The file of a document is kept with it, replaced with it and removed with it, in each kind of database."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ragkv.catalog import Catalog, DocumentVersion, EmbedderIdentity
from ragkv.types import Chunk, Document, Key
from tests.postgres_server import PostgresServer

EMBEDDER = EmbedderIdentity("words", 2)
SHEET = Document("plan.pdf", "Plan", "The first sheet.", {}, "default", ((0, 1),), file=b"%PDF- one")


def store(catalog: Catalog, document: Document, content_hash: str = "one") -> None:
    chunk = Chunk(f"{document.id}#0", document.id, 0, document.title, document.text, (1, 2))
    key = Key(f"{document.collection} {document.id}")
    catalog.put_document(DocumentVersion(document, content_hash, [chunk], np.ones((1, 2), "f4"), [key], EMBEDDER))


def kept(catalog: Catalog, collection: str = "default") -> bytes:
    info, document = catalog.with_file(collection, "plan.pdf")
    assert info.file_bytes == len(document.file)
    assert [each.file_bytes for each in catalog.documents(collection)] == [len(document.file)]
    return document.file


def files_in(catalog: Catalog) -> int:
    with catalog.read() as transaction:
        return int(transaction.exec_driver_sql("SELECT count(*) FROM files").fetchone()[0])


def test_a_file_is_kept_and_replaced_with_its_document(catalog: Catalog) -> None:
    store(catalog, SHEET)
    assert kept(catalog) == b"%PDF- one"
    assert catalog.original("default", "plan.pdf") == replace(SHEET, file=b""), "it is read only where it is wanted"
    store(catalog, replace(SHEET, text="Another sheet.", file=b"%PDF- another"), "two")
    assert kept(catalog) == b"%PDF- another"


def test_other_content_without_a_file_leaves_none(catalog: Catalog) -> None:
    store(catalog, SHEET)
    store(catalog, replace(SHEET, text="Typed in.", file=b""), "two")
    assert (kept(catalog), files_in(catalog)) == (b"", 0)


def test_a_document_that_is_read_again_keeps_its_file(catalog: Catalog) -> None:
    store(catalog, SHEET)
    store(catalog, catalog.original("default", "plan.pdf"))
    assert kept(catalog) == SHEET.file


def test_the_sizes_of_files_are_added_up_by_collection(catalog: Catalog) -> None:
    for number, collection in enumerate(("default", "default", "other")):
        store(catalog, replace(SHEET, id=f"{number}.pdf", collection=collection, file=b"%" * (number + 1)))
    store(catalog, replace(SHEET, id="typed", collection="bare", file=b""))
    assert {each.name: each.file_bytes for each in catalog.collections()} == {"default": 3, "other": 3, "bare": 0}
    assert [catalog.held(*named)[1] for named in (("default",), ("default", "1.pdf"), ("bare",))] == [3, 1, 0]


def test_each_collection_has_its_own_file(catalog: Catalog) -> None:
    store(catalog, SHEET)
    store(catalog, replace(SHEET, collection="red:default", file=b"%PDF- of red"))
    assert (kept(catalog), kept(catalog, "red:default")) == (b"%PDF- one", b"%PDF- of red")


@pytest.mark.parametrize("whole", [False, True], ids=["a document", "a collection"])
def test_a_file_is_removed_with(catalog: Catalog, whole: bool) -> None:
    store(catalog, SHEET)
    store(catalog, replace(SHEET, collection="other"))
    if whole:
        catalog.clear("default")
    else:
        catalog.remove("default", "plan.pdf")
    assert files_in(catalog) == 1, "that of the other collection"
    assert kept(catalog, "other") == SHEET.file


def test_a_document_that_is_there_gets_its_file(catalog: Catalog) -> None:
    store(catalog, replace(SHEET, file=b""))
    catalog.keep_file(SHEET)
    assert kept(catalog) == SHEET.file
    catalog.keep_file(replace(SHEET, file=b"%PDF- saved again"))
    assert kept(catalog) == b"%PDF- saved again"
    catalog.keep_file(replace(SHEET, id="gone.pdf"))
    assert files_in(catalog) == 1


def test_a_copy_of_the_catalogue_has_the_files(path: Path) -> None:
    catalog = Catalog.open(path)
    store(catalog, SHEET)
    copy = path.with_name("copy.sqlite")
    catalog.copy(copy)
    catalog.close()
    copied = Catalog.open(copy)
    assert kept(copied) == SHEET.file
    copied.close()


@pytest.mark.scale
def test_files_move_to_postgresql(path: Path, postgres: PostgresServer) -> None:
    source, target = Catalog.open(path), Catalog.open(postgres.database())
    store(source, SHEET)
    for number in range(9):  # more than are in memory at a time
        store(source, replace(SHEET, collection=f"c{number}", file=b"%%PDF- %d" % number))
    target.take_over(source)
    assert [kept(target, f"c{number}") for number in range(9)] == [b"%%PDF- %d" % number for number in range(9)]
    assert kept(target) == SHEET.file
    source.close()
    target.close()
