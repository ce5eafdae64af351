"""Questions made by rules: what each rule gives, and what holds for every question."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.evaluation.clauses import Span, sentences
from ragkv.evaluation.facts import ask, facts
from ragkv.evaluation.noun_phrases import counted, person
from ragkv.evaluation.parse import read
from ragkv.evaluation.questions import UNKNOWN, Asked, QuestionShape, questions

CHUNKS = [
    (
        "Jargon File",
        "In 1984, Eric Raymond published the Jargon File in Boston. "
        "The Jargon File was written by Raphael Finkel in 1975 at Stanford.",
    ),
    (
        "Richard Stallman",
        "Richard Stallman founded the GNU Project in September 1983. He was born in New York in 1953. "
        "The GNU Project was announced on 27 September 1983.",
    ),
    (
        "Harbours: Tarn",
        "The harbour of Tarn was built by Ada Brook in 1889. Ada Brook was born in Lindmouth. "
        "The harbour of Tarn has seven piers.",
    ),
    (
        "Parallaxis",
        "A procedural programming language developed by Thomas Braeunl at the University of Stuttgart. "
        "It was released in 1989 for parallel computers.",
    ),
    (
        "Notes",
        "The Free Software Foundation (FSF) is a charity in Boston. "
        "The pivot table, formerly known as DataPilot, combines large tables. "
        "Anarchists oppose the principle of authority because it is the basis of domination. "
        "The Spanish established five missions in Chumash land.",
    ),
]
ABSENT = [("Mars", "Mars was observed by Tycho Brahe in 1572. Phobos was discovered by Asaph Hall in 1877.")]
PLAIN = QuestionShape(unknown=0, two=0, compare=0, keyword=0, lower=0, unmarked=0)


def made(title: str, text: str) -> dict[str, str]:
    """Everything that the rules ask about a chunk, with the answers."""
    chunk = facts(title, text)
    return {draft.text: draft.answer.text for seed in range(40) for draft in ask(random.Random(seed), chunk)}


@pytest.mark.parametrize(
    ("chunk", "question", "answer"),
    [
        (0, "When did Eric Raymond publish the Jargon File", "1984"),
        (0, "Who published the Jargon File in Boston", "Eric Raymond"),
        (0, "Who was the author of the Jargon File", "Raphael Finkel"),
        (0, "Who authored the Jargon File", "Raphael Finkel"),
        (0, "Where was the Jargon File written in 1975", "Stanford"),
        (1, "What year was Richard Stallman born", "1953"),
        (1, "Where was Richard Stallman born", "New York"),
        (1, "Who was the founder of the GNU Project", "Richard Stallman"),
        (1, "The GNU Project was announced on what date", "27 September 1983"),
        (2, "By whom was the harbour of Tarn built", "Ada Brook"),
        (2, "How many piers does the harbour of Tarn have", "seven"),
        (3, "Who developed Parallaxis", "Thomas Braeunl"),
        (3, "When was Parallaxis released", "1989"),
        (3, "What kind of thing is Parallaxis", "procedural programming language"),
        (4, "What does FSF stand for", "Free Software Foundation"),
        (4, "What is another name for the pivot table", "DataPilot"),
        (4, "Why do anarchists oppose the principle of authority", "it is the basis of domination"),
        (4, "How many missions did the Spanish establish in Chumash land", "five"),
    ],
)
def test_every_rule_asks_what_its_sentence_says(chunk: int, question: str, answer: str) -> None:
    assert made(*CHUNKS[chunk]).get(question) == answer


def test_answers_are_spans_of_their_chunks() -> None:
    for seed in range(20):
        for asked in questions(random.Random(seed), CHUNKS, 12, ABSENT):
            if asked.answer == UNKNOWN:
                assert asked.chunk == -1
            elif asked.kind != "compare":
                assert asked.answer in CHUNKS[asked.chunk][1]


def test_the_answer_fits_the_question_word() -> None:
    found = [asked for seed in range(20) for asked in questions(random.Random(seed), CHUNKS, 12, shape=PLAIN)]
    for asked in found:
        if asked.text.startswith(("When", "In what year", "In which year", "What year")):
            assert re.search(r"\d{4}", asked.answer)
        if asked.text.startswith("How many"):
            assert counted(f"{asked.answer} things")
        if asked.text.startswith(("Who ", "By whom")):
            assert person(asked.answer) or asked.answer in ("Spanish", "Anarchists", "Raphael Finkel", "Ada Brook")


def test_a_seed_decides_everything() -> None:
    first = questions(random.Random(7), CHUNKS, 15, ABSENT)
    assert first == questions(random.Random(7), CHUNKS, 15, ABSENT)
    assert first != questions(random.Random(8), CHUNKS, 15, ABSENT)
    assert len({asked.text.lower() for asked in first}) == len(first)


def test_seeds_give_many_questions_about_one_chunk() -> None:
    assert len({a.text for seed in range(20) for a in questions(random.Random(seed), CHUNKS[:1], 5)}) > 15


def test_two_sentences_are_bridged() -> None:
    shape = QuestionShape(unknown=0, two=1, compare=0, keyword=0, lower=0, unmarked=0)
    found = {a.text: a for seed in range(30) for a in questions(random.Random(seed), CHUNKS, 8, shape=shape)}
    assert found["Where was the builder of the harbour of Tarn born?"] == Asked(
        "Where was the builder of the harbour of Tarn born?", "Lindmouth", 2, "two"
    )
    assert found["When was the founder of the GNU Project born?"].answer == "1953"


def test_two_chunks_are_compared() -> None:
    chunks = [("A", "Alpha Tower was built in 1901."), ("B", "Beta Tower was built in 1950.")]
    shape = QuestionShape(unknown=0, two=0, compare=1, keyword=0, lower=0, unmarked=0)
    found = {a.text: a.answer for seed in range(10) for a in questions(random.Random(seed), chunks, 4, shape=shape)}
    assert found["Which was built first, Alpha Tower or Beta Tower?"] == "Alpha Tower"
    assert found["Were Alpha Tower and Beta Tower built in the same year?"] == "no"


def test_absent_chunks_are_not_answered() -> None:
    shape = QuestionShape(unknown=1, keyword=0)
    found = [a for seed in range(10) for a in questions(random.Random(seed), CHUNKS, 6, ABSENT, shape)]
    assert {a.kind for a in found} == {"absent", "twisted"}
    text = " ".join(text for _, text in CHUNKS).lower()
    for asked in found:
        assert asked.answer == UNKNOWN
        if asked.kind == "absent":
            names = re.findall(r"\b(?:mars|phobos|asaph hall|tycho brahe)\b", asked.text.lower())
            assert names
            assert not any(name in text for name in names)


def test_a_question_that_a_chunk_answers_is_never_absent() -> None:
    found = [
        a for seed in range(10) for a in questions(random.Random(seed), CHUNKS, 6, CHUNKS, QuestionShape(unknown=1))
    ]
    assert not [a for a in found if a.kind == "absent"]


def test_a_twist_says_what_no_sentence_says() -> None:
    said = {f"{text}?" for chunk in CHUNKS for text in made(*chunk)}
    for seed in range(20):
        for asked in questions(
            random.Random(seed), CHUNKS, 8, shape=QuestionShape(unknown=1, keyword=0, lower=0, unmarked=0)
        ):
            assert asked.text not in said


@pytest.mark.parametrize(
    "sentence",
    [
        "This is the same thing that we have said above.",
        "If the program stops, the user must start it again.",
        "It was his own idea, and he did it.",
        "There is nothing to be said about the other one.",
        "What was built in 1889 by Ada Brook, you ask?",
    ],
)
def test_vague_sentences_give_no_clause_with_a_name(sentence: str) -> None:
    assert not facts("", sentence).told


def test_sentences_do_not_end_at_initials_and_titles() -> None:
    text = "Dr. Knuth met J. R. Tolkien in the U.S. capital. They talked."
    assert [each.text for each in sentences(text)] == [
        "Dr. Knuth met J. R. Tolkien in the U.S. capital.",
        "They talked.",
    ]


def test_a_clause_has_its_parts() -> None:
    (clause,) = read(Span("In 1889 the harbour of Tarn was built by Ada Brook, who was rich.", 0))
    assert (clause.subject.text, clause.auxiliary, clause.tense) == ("the harbour of Tarn", "was", "passive")
    assert [(each.preposition, each.body.text, each.kind) for each in clause.phrases] == [
        ("by", "Ada Brook", "agent"),
        ("in", "1889", "date"),
    ]


_WORDS = st.sampled_from(
    "The the a In 1984 , . ; Ada Brook was is built by founded and because ( ) harbour of Tarn who which has seven "
    "piers He It \n\n \" FSF - don't born New York called also known as 3.5 because to write writes".split(" ")
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.text(max_size=200), st.lists(_WORDS, max_size=60).map(" ".join)), min_size=1, max_size=4),
    st.integers(0, 1000),
)
def test_any_text_gives_only_spans(texts: list[str], seed: int) -> None:
    chunks = [(text[:20], text) for text in texts]
    for asked in questions(random.Random(seed), chunks, 6, chunks[:1]):
        assert asked.text.strip()
        if asked.answer not in (UNKNOWN, "yes", "no"):
            assert asked.answer in chunks[asked.chunk][1]
            assert asked.answer == asked.answer.strip()


def test_a_date_with_a_comma_stays_whole() -> None:
    found = made("", "On March 28th, 1918, Leon Trotsky gave a long report to the Moscow Conference.")
    assert found["When did Leon Trotsky give a long report to the Moscow Conference"] == "March 28th, 1918"


def test_questions_without_an_answer_keep_to_their_share() -> None:
    shape = QuestionShape(unknown=0.2)
    found = [a for seed in range(40) for a in questions(random.Random(seed), CHUNKS, 12, CHUNKS, shape)]
    assert 0.05 < sum(each.answer == "unknown" for each in found) / len(found) <= 0.21
