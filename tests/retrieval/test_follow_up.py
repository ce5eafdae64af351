"""What is searched for when a question refers to an earlier turn, and which documents come first then."""

from __future__ import annotations

import pytest

from ragkv.retrieval.follow_up import own_raised, refers_back, resolved, search_text
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


def test_a_pronoun_behind_a_name_is_that_name() -> None:
    assert not refers_back("How old was Ada Brook when she died?")
    assert not refers_back("What did Ada Brook sell to her sister?")
    assert refers_back("When did Ada Brook sell it?")
    assert refers_back("Who met her in Tarn?")


@pytest.mark.parametrize(
    ("asked", "question", "whole"),
    [
        ("When was Ubuntu Noble Numbat released?", "And Mantic Minotaur?", "When was Mantic Minotaur released?"),
        (WHO, "And of Orrin?", "Who built the harbour of Orrin?"),
        (WHO, "What about Orrin?", "Who built the harbour of Orrin?"),
        ("How many ducks were seen in 2022?", "And in 2023?", "How many ducks were seen in 2023?"),
        (
            "How many ducks were seen in Tarn in 2022?",
            "and what about 2023",
            "How many ducks were seen in Tarn in 2023?",
        ),
    ],
)
def test_a_question_that_is_nothing_but_a_name_asks_the_latest_question_of_it(
    asked: str, question: str, whole: str
) -> None:
    assert refers_back(question)
    assert resolved(question, [(asked, "x")]) == search_text(question, [(asked, "x")]) == whole
    again = [(asked, "x"), (question, "y")]
    assert resolved(question.replace("Orrin", "Lume"), again) == whole.replace("Orrin", "Lume")


def test_a_name_of_another_kind_takes_no_place() -> None:
    asked = [("When was Ada Brook born?", "1850")]
    assert resolved("And in Orrin?", asked) == "And in Orrin?"
    assert search_text("And in Orrin?", asked) == "When was Ada Brook born? 1850. And in Orrin?"
    assert resolved("And in 1900?", asked) == "And in 1900?"
    assert resolved("And Orrin?", []) == "And Orrin?"


def test_without_a_name_the_latest_question_that_stands_alone_is_searched_for_too() -> None:
    first, other = ("Who built the harbour?", "the sailors"), ("Who painted the bridge?", "the smiths.")
    assert search_text("When was it built?", [first]) == f"{first[0]} the sailors. When was it built?"
    assert search_text("And when?", [first, other]) == f"{other[0]} the smiths. And when?"
    assert search_text("And why not?", [first, ("Did she paint?", "No.")]) == f"{first[0]} the sailors. And why not?"
    assert search_text("And is it now?", [("Is it?", "No")]) == "And is it now?"
    assert search_text("When was it built?", [(first[0], "unknown")]) == f"{first[0]} When was it built?"
    assert search_text("When was it built?", [("x" * 3000 + " built a mill", "y")]) == "When was it built?"


@pytest.mark.parametrize(
    ("asked", "answer", "question", "whole"),
    [
        (WHO, "Ada Brook", "Where was she born?", "Where was Ada Brook born?"),
        (WHO, "Ada Brook", "When was it built?", "When was the harbour of Tarn built?"),
        (WHO, "unknown", "When was it built?", "When was the harbour of Tarn built?"),
        (
            "Who is the author of InkPDF?",
            "Orla Venn",
            "What is his e-mail address?",
            "What is Orla Venn's email?",
        ),
        (
            "Which ferry ran aground?",
            "the Pale Heron",
            "Which company owned it?",
            "Which company owned the Pale Heron?",
        ),
        ("Where was Ada Brook born?", "Lindmouth", "Whom did she marry?", "Whom did Ada Brook marry?"),
        (
            "Which country did Ada Brook move to?",
            "Canada",
            "What did her mother teach?",
            "What did Ada Brook's mother teach?",
        ),
        ("How old was Ada Brook when she died?", "81", "Where did she live?", "Where did Ada Brook live?"),
        ("Who owns the inn?", "Otto Lind", "Who met him in Tarn?", "Who met Otto Lind in Tarn?"),
        (WHO, "It was built by Ada Brook.", "Where was she born?", "Where was Ada Brook born?"),
        (WHO, "the engineer Ada Brook", "Where was she born?", "Where was Ada Brook born?"),
        ("Who leads the museum?", "Łukasz d'Arcy", "When was he born?", "When was Łukasz d'Arcy born?"),
        ("Whose boat sank?", "Otto Lind's", "When was he born?", "When was Otto Lind born?"),
        ("Who signed?", "Otto Lind and Ada Brook", "Where do they live?", "Where do Otto Lind and Ada Brook live?"),
        ("Who signed the lease?", "Otto Lind", "When did they sign?", "When did Otto Lind sign?"),
        ("Who owns the Tarn Mills?", "Ada Brook", "When were they built?", "When were the Tarn Mills built?"),
        ("Tell me about Ada Brook.", "An engineer.", "Where was she born?", "Where was Ada Brook born?"),
    ],
)
def test_a_name_takes_the_place_of_its_pronoun(asked: str, answer: str, question: str, whole: str) -> None:
    assert resolved(question, [(asked, answer)]) == whole
    assert search_text(question, [(asked, answer)]) == whole


@pytest.mark.parametrize(
    ("asked", "answer", "question"),
    [
        ("Who built the harbour?", "the sailors", "Where were they born?"),
        (WHO, "Ada Brook", "Who painted the bridge?"),
        (WHO, "Ada Brook", "And since when?"),
        (WHO, "Ada Brook", "How long does it take?"),
        (WHO, "Ada Brook", "Did Ada Brook sell her boat to him?"),
        (WHO, "unknown", "Where was she born?"),
        ("How many boats did Otto Lind own?", "12", "What were they called?"),
        ("What did Otto Lind design?", "the mill", "When was it built?"),
    ],
)
def test_a_question_without_a_name_to_put_in_stays_as_it_is(asked: str, answer: str, question: str) -> None:
    assert resolved(question, [(asked, answer)]) == question


def test_a_turn_with_a_pronoun_stands_alone_once_a_name_took_its_place() -> None:
    turns = [("When was the harbour of Tarn built?", "1889"), ("Who built it?", "Ada Brook")]
    assert resolved("When was she born?", turns) == "When was Ada Brook born?"
    assert resolved("What did it cost?", turns) == "What did the harbour of Tarn cost?"
    turns.append(("When was she born?", "1850"))
    assert search_text("And why?", turns) == "When was Ada Brook born? 1850. And why?"


def hit(document: str, number: int = 0) -> Hit:
    return Hit(Chunk(f"{document}#{number}", document, number, document, "", ()), 0.0, 0)


def test_documents_of_the_conversation_rise_and_the_best_new_one_stays() -> None:
    hits = [hit(name) for name in ("new", "newer", "newest", "old", "older", "last")]
    found = [each.chunk.document_id for each in own_raised(hits, {"old", "older"}, 4)]
    assert found == ["new", "newer", "old", "newest"]
    assert [each.chunk.document_id for each in own_raised(hits, set(), 2)] == ["new", "newer"]
