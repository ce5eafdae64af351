"""Questions through the engine that are begun one after another and decoded together."""

from __future__ import annotations

import gc
import weakref

import pytest

from ragkv.engine.batch import Batch
from ragkv.errors import NotFound, Outdated
from ragkv.ingest.pipeline import remove
from ragkv.types import AskOptions
from tests.engine.test_session_manager import METHODS, NAMES, QUESTIONS, fill, talk
from tests.quick import quick_engine

pytestmark = pytest.mark.usefixtures("one_thread")


def together(engine, questions):
    """Answers of questions, each with its options, that are decoded in one batch."""
    batch, begun = (
        Batch(engine.model),
        [engine.prefill(question, AskOptions(**options)) for question, options in questions],
    )
    for each in begun:
        batch.join(each.sequence)
    while batch.busy:
        batch.step()
    return [engine.finalize(each) for each in begun]


def test_answers_and_conversations_are_those_of_questions_asked_alone(tmp_path):
    asked = [
        [(question, {"conversation": f"talk {i}", "method": METHODS[i], "top_k": 2}) for i, question in enumerate(turn)]
        for turn in (QUESTIONS, QUESTIONS[::-1])
    ]
    with fill(quick_engine(tmp_path / "a")) as engine, fill(quick_engine(tmp_path / "b")) as other:
        for turn in asked:
            alone = [other.answer(question, AskOptions(**options)) for question, options in turn]
            for a, b in zip(together(engine, turn), alone, strict=True):
                assert a.answer == b.answer
                assert (a.report.tokens, a.report.chunks) == (b.report.tokens, b.report.chunks)
        for _, options in asked[0]:
            name = options["conversation"]
            kept, there = ([t.written for t in e.sessions.turns("default", name)] for e in (engine, other))
            assert kept == there


def test_the_time_of_decoding_counts_from_when_the_question_was_read(tmp_path):
    with fill(quick_engine(tmp_path)) as engine:
        for _ in range(5):  # another program may stretch the steps of the last one
            timings = [answer.report.timings_ms for answer in together(engine, [(q, {}) for q in QUESTIONS])]
            if timings[0].decode > timings[-1].decode:
                break
    assert timings[0].decode > timings[-1].decode, "it waited for the others to be read"
    for each in timings:
        steps = each.retrieve + each.open + each.plan + each.load + each.repair + each.prefill
        assert steps <= each.ttft <= each.total
        assert steps + each.decode <= each.total


def test_a_question_that_is_never_finished_leaves_its_conversation_as_it_was(tmp_path):
    with fill(quick_engine(tmp_path)) as engine:
        talk(engine, QUESTIONS[:1])
        batch, begun = (
            Batch(engine.model),
            engine.prefill(QUESTIONS[1], AskOptions(conversation="talk", method="scout", top_k=1)),
        )
        cache, id = weakref.ref(begun.sequence.cache), batch.join(begun.sequence)
        batch.step()
        assert batch.cancel(id) or not batch.busy
        del begun
        gc.collect()
        assert cache() is None
        assert len(engine.sessions.turns("default", "talk")) == 1
        (again,) = talk(engine, QUESTIONS[1:2])
        assert again.report.tokens.history == 0, "what was in memory went; the turns are read again"
        assert len(engine.sessions.turns("default", "talk")) == 2


def test_what_is_deleted_while_an_answer_is_decoded_is_neither_answered_nor_kept(tmp_path):
    with fill(quick_engine(tmp_path)) as engine:
        begun = engine.prefill(QUESTIONS[0], AskOptions(conversation="talk", top_k=1))
        for name in NAMES:
            remove(engine, "default", name)
        batch = Batch(engine.model)
        batch.join(begun.sequence)
        while batch.busy:
            batch.step()
        with pytest.raises(Outdated):
            engine.finalize(begun)
        assert engine.sessions.cache.get("default", "talk") is None
        with pytest.raises(NotFound):
            engine.sessions.turns("default", "talk")
