"""Questions about a user's documents know the place of their answer."""

from __future__ import annotations

from pathlib import Path
from random import Random

from ragkv.evaluation.questions import Asked
from ragkv.tune.contexts import Context, ProseSource, TextPassage
from ragkv.tune.document_sets import DocumentSetParams, document_sets

SAMPLES = sorted((Path(__file__).parents[2] / "ragkv" / "samples").glob("*.md"))


class Given:
    """One context again and again."""

    def __init__(self, context: Context):
        self._context = context

    def context(self, rng: Random, tokens: int) -> Context:
        return self._context


LAMP = ("Lamp", "The lamp of Tarn is kept by Ada Brook.")
BRIDGE = ("Bridge", "The bridge of Mell was painted green. Ada paid.")
ONE = DocumentSetParams(sets=1)


def samples() -> ProseSource:
    """The sample documents, a paragraph a chunk."""
    passages = [
        TextPassage("", path.stem, path.stem, paragraph)
        for path in SAMPLES
        for paragraph in path.read_text(encoding="utf-8").split("\n\n")
    ]
    return ProseSource(passages, lambda chunk: len(chunk[1].split()))


def test_every_answer_stands_where_the_question_says_and_nowhere_else() -> None:
    sets = document_sets(samples(), DocumentSetParams(sets=3, tokens=600))
    assert sum(len(each.questions) for each in sets) > 3
    for each in sets:
        whole = "\n".join(text for _, text in each.chunks)
        for question in each.questions:
            answer = each.chunks[question.chunk][1][question.start : question.end]
            assert answer
            assert whole.count(answer) == 1


def test_the_same_documents_give_the_same_questions() -> None:
    source = samples()
    assert document_sets(source, ONE) == document_sets(source, ONE)


def test_questions_without_one_place_are_left_out() -> None:
    asked = (
        Asked("Who keeps the lamp?", "Ada Brook", 0),
        Asked("Who paid?", "Ada", 1),  # stands in both chunks
        Asked("Who sings?", "unknown", -1, "absent"),
        Asked("Which is older?", "Lamp", 0, "compare"),
    )
    (found,) = document_sets(Given(Context((LAMP, BRIDGE), asked)), ONE)
    assert [each.text for each in found.questions] == ["Who keeps the lamp?"]
    (question,) = found.questions
    assert (question.chunk, LAMP[1][question.start : question.end]) == (0, "Ada Brook")


def test_a_context_without_questions_is_left_out() -> None:
    assert document_sets(Given(Context((LAMP,), ())), ONE) == []
