"""What is searched for when a question refers to an earlier turn, and which documents come first then."""

from __future__ import annotations

import pytest

from ragkv.retrieval.follow_up import own_raised, refers_back, search_text
from ragkv.types import Chunk, Hit

WHO = "Who built the harbour of Tarn?"


@pytest.mark.parametrize(
    "question",
    ["And when was it built?", "Where was she born?", "Why?", "since when", "And how long?", "Is it?", "Is s\xadhe?"],
)
def test_some_questions_refer_back(question: str) -> None:
    assert refers_back(question)


@pytest.mark.parametrize("question", [WHO, "And who built the bridge?", "The tower?", "Which items are sold?"])
def test_others_stand_alone(question: str) -> None:
    assert not refers_back(question)
    assert search_text(question, [("Who painted the bridge?", "Otto")]) == question


def test_the_latest_question_that_stands_alone_is_searched_for_too() -> None:
    first, other = (WHO, "Ada Brook"), ("Who painted the bridge of Mell?", "Otto Lindqvist.")
    assert search_text("When was it built?", [first]) == f"{WHO} Ada Brook. When was it built?"
    assert search_text("And when?", [first, other]) == f"{other[0]} Otto Lindqvist. And when?"
    assert search_text("And why not?", [first, ("Did she paint?", "No.")]) == f"{WHO} Ada Brook. And why not?"
    assert search_text("And is it now?", [("Is it?", "No")]) == "And is it now?"
    assert search_text("When was it built?", [(WHO, "unknown")]) == f"{WHO} When was it built?"
    assert search_text("When was it built?", [("x" * 3000 + " built a mill", "y")]) == "When was it built?"


def hit(document: str, number: int = 0) -> Hit:
    return Hit(Chunk(f"{document}#{number}", document, number, document, "", ()), 0.0, 0)


def test_documents_of_the_conversation_rise_and_the_best_new_one_stays() -> None:
    hits = [hit(name) for name in ("new", "newer", "newest", "old", "older", "last")]
    found = [each.chunk.document_id for each in own_raised(hits, {"old", "older"}, 4)]
    assert found == ["new", "newer", "old", "newest"]
    assert [each.chunk.document_id for each in own_raised(hits, set(), 2)] == ["new", "newer"]
