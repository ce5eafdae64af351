"""Turns of conversations lose their answers in the transaction that deletes or replaces a document which they read."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from ragkv.catalog import Catalog, DocumentVersion, StoredTurn
from ragkv.errors import Outdated
from ragkv.types import Chunk, Document, Key
from tests.catalog.test_catalog import WORDS, put


def read(catalog: Catalog, *documents: str, collection: str = "default") -> tuple[tuple[int, str], ...]:
    """What a turn joins that reads the first chunks of these documents."""
    rows = {passage.row: passage for passage in catalog.passages()}
    chunks = {chunk.document_id: (row, chunk.id) for row, chunk in catalog.chunks(collection, rows).items()}
    return tuple(chunks[document] for document in documents)


def talk(catalog: Catalog, name: str, *turns: tuple[tuple[int, str], ...], collection: str = "default") -> None:
    rows = list[int]()
    for number, joined in enumerate(turns):
        turn = StoredTurn(f"Who {number}?", f"Ada {number}", (1,), (2, 3), joined, "full", "model")
        row = catalog.add_turn(collection, name, rows, turn, [row for row, _ in joined])
        assert row is not None
        rows.append(row)


def answers(catalog: Catalog, name: str, collection: str = "default") -> list[str]:
    return [turn.answer for turn in catalog.turns(collection, name)]


CHANGES: dict[str, Callable[[Catalog], object]] = {
    "deleted": lambda catalog: catalog.remove("default", "b"),
    "replaced": lambda catalog: put(catalog, "b", ["other"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_answers_from_a_document_and_those_after_them_go_with_it(catalog: Catalog, change: str) -> None:
    for name in "abc":
        put(catalog, name, [f"text of {name}"])
    put(catalog, "b", ["text of b"], "other")
    talk(catalog, "talk", read(catalog, "a"), read(catalog, "b"), (), read(catalog, "c"))
    talk(catalog, "apart", read(catalog, "a", "c"))
    talk(catalog, "talk", read(catalog, "b", collection="other"), collection="other")
    CHANGES[change](catalog)
    turns = catalog.turns("default", "talk")
    assert [(turn.answer, turn.written, turn.removed) for turn in turns] == [
        ("Ada 0", (2, 3), False),
        *[("", (), True)] * 3,
    ]
    assert [turn.question for turn in turns] == ["Who 0?", "Who 1?", "Who 2?", "Who 3?"]
    assert answers(catalog, "apart") == ["Ada 0"]
    assert answers(catalog, "talk", "other") == ["Ada 0"], "a document of that id in another collection"


def test_a_document_that_is_stored_again_unchanged_takes_no_answer_until_it_goes(
    catalog: Catalog,
) -> None:
    put(catalog, "a", ["text"])
    talk(catalog, "talk", read(catalog, "a"))
    put(catalog, "a", ["text"])
    assert answers(catalog, "talk") == ["Ada 0"]
    catalog.remove("default", "a")
    assert answers(catalog, "talk") == [""]


def test_a_turn_from_a_chunk_that_is_gone_is_not_stored(catalog: Catalog) -> None:
    put(catalog, "a", ["text"])
    joined = read(catalog, "a")
    put(catalog, "a", ["other"])
    with pytest.raises(Outdated):
        talk(catalog, "talk", joined)
    assert catalog.turns("default", "talk") == []


def test_nothing_of_a_removed_answer_stays_when_turns_and_changes_come_together(catalog: Catalog) -> None:
    """Whoever commits first: the turn is not stored, or it is and loses its answer."""
    put(catalog, "a", ["text 0"])
    over, kept = threading.Event(), threading.Event()

    def replace() -> None:
        for version in range(1, 40):
            put(catalog, "a", [f"text {version}"])
            if version % 4 == 0:  # a pause, so that a turn is stored however slow the catalogue is
                kept.clear()
                kept.wait(timeout=30)
        over.set()

    thread = threading.Thread(target=replace)
    thread.start()
    stored = number = 0
    while not over.is_set():
        number += 1
        try:
            talk(catalog, f"talk {number}", read(catalog, "a"))
        except (Outdated, KeyError):  # KeyError: between two reads of the test itself
            continue
        stored += 1
        kept.set()
    thread.join()
    catalog.remove("default", "a")
    assert stored
    assert {text for each in range(number + 1) for text in answers(catalog, f"talk {each}")} == {""}


def test_which_chunks_are_standing_is_known_by_row_and_collection(catalog: Catalog) -> None:
    put(catalog, "a", ["one", "two"])
    put(catalog, "b", ["three"], "other")
    rows = [passage.row for passage in catalog.passages()]
    assert catalog.standing("default", rows) == set(rows[:2])
    catalog.remove("default", "a")
    assert catalog.standing("default", rows) == set()
    assert catalog.standing("other", [*rows, 999]) == {rows[2]}


def test_a_failed_replacement_takes_no_answer(catalog: Catalog) -> None:
    put(catalog, "a", ["text"])
    talk(catalog, "talk", read(catalog, "a"))
    document = Document("a", "Title", "other")
    chunk = Chunk("a#0", "a", 0, "Title", "other", (1,))
    vectors = np.ones((1, WORDS.dimension), np.float32)
    version = DocumentVersion(document, "another hash", [chunk], vectors, [Key("k")], WORDS)

    def refuse(tokens: int, file_bytes: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        catalog.put_document(version, admit=refuse)
    assert answers(catalog, "talk") == ["Ada 0"]
