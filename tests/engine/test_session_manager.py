"""Conversations through the engine: what stays, what is read again, and what leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ragkv.engine.decoding import generate
from ragkv.engine.engine import Engine
from ragkv.engine.session_cache import MAX_NAME
from ragkv.errors import InputError, NotFound, Outdated
from ragkv.ingest.pipeline import ingest, remove
from ragkv.types import AskOptions, Document
from tests.interrupted import Interrupted
from tests.quick import quick_engine

NAMES = ("harbour", "bridge", "mill", "tower")
QUESTIONS = ("Who built the harbour?", "And who built the bridge?", "When was the mill built?", "The tower?")
METHODS = ("full", "scout", "samkv-fusion", "cacheblend")


def fill(engine, names=NAMES):
    for name in names:
        text = f"The {name} of Tarn was built in 1889 by Ada {name.title()}. " * 3
        ingest(engine, Document(name, name.title(), text))
    return engine


def talk(engine, questions, name="talk", method="scout", **options):
    return [engine.answer(q, AskOptions(conversation=name, method=method, top_k=1, **options)) for q in questions]


def cache(engine, name="talk"):
    """Positions and values of the first layer of a state in memory, by position."""
    kept = engine.sessions.cache.get("default", name).state.stitch.cache
    order = kept.positions(1).argsort()
    return kept.positions(1)[order], kept.v(1)[order]


def same(a, b):
    assert torch.equal(a[0], b[0])
    torch.testing.assert_close(a[1], b[1], rtol=0, atol=1e-10)


def test_later_turns_find_the_earlier_ones_in_the_cache(tmp_path):
    with fill(quick_engine(tmp_path)) as engine:
        first, second, third = (a.report for a in talk(engine, (*QUESTIONS[:2], QUESTIONS[0]), method="full"))
    assert [len(r.chunks) for r in (first, second, third)] == [1, 2, 2], "a chunk that is there does not join again"
    assert (first.tokens.history, first.tokens.prefilled) == (0, first.tokens.context + first.tokens.question)
    answered = first.tokens.generated
    assert first.tokens.prefilled + answered - 1 == second.tokens.history
    joined = second.tokens.context - first.tokens.context
    assert second.tokens.prefilled == joined + 2 + second.tokens.question, (
        "the last token of the answer, and a new line"
    )
    assert third.tokens.prefilled == 2 + third.tokens.question
    assert (third.tokens.recomputed, third.tokens.context) == (0, second.tokens.context)


@pytest.mark.parametrize("method", METHODS)
def test_the_first_turn_is_answered_as_a_question_without_a_conversation(tmp_path, method):
    with fill(quick_engine(tmp_path)) as engine:
        (first,) = talk(engine, QUESTIONS[:1], method=method)
        alone = engine.answer(QUESTIONS[0], AskOptions(method=method, top_k=1))
    assert (first.answer, first.report.tokens, first.report.chunks) == (
        alone.answer,
        alone.report.tokens,
        alone.report.chunks,
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", ["restart", "eviction"])
def test_a_state_that_is_lost_is_read_again_from_the_turns(tmp_path, method, loss):
    with fill(quick_engine(tmp_path / "kept")) as engine:
        kept = talk(engine, QUESTIONS, method=method)
        expected = cache(engine)
    settings = {"conversation_bytes": 0} if loss == "eviction" else {}
    with fill(quick_engine(tmp_path / "lost", **settings)) as engine:
        lost = talk(engine, QUESTIONS[:3], method=method)
    with quick_engine(tmp_path / "lost") as engine:
        lost += talk(engine, QUESTIONS[3:], method=method)
        same(cache(engine), expected)
    assert [a.answer for a in lost] == [a.answer for a in kept]
    assert lost[3].report.tokens.history == 0
    assert lost[3].report.tokens.prefilled > 2 * kept[3].report.tokens.prefilled
    assert [c.chunk_id for c in lost[3].report.chunks] == [c.chunk_id for c in kept[3].report.chunks]
    assert lost[3].report.bytes.loaded >= kept[3].report.bytes.loaded


def test_the_least_recently_used_states_make_room(tmp_path):
    with fill(quick_engine(tmp_path)) as engine:
        for name in "aba":
            talk(engine, QUESTIONS[:1], name)
        engine.sessions.cache.limit = sum(state.state.bytes for state in engine.sessions.cache.sessions())
        talk(engine, QUESTIONS[:1], "c")
        assert [state.name for state in engine.sessions.cache.sessions()] == ["a", "c"]


def test_another_method_reads_the_conversation_again_as_if_it_had_been_asked_with_it(tmp_path):
    with fill(quick_engine(tmp_path)) as engine:
        talk(engine, QUESTIONS[:2], method="full")
        changed = talk(engine, QUESTIONS[2:3], method="reuse")[0].report
        assert (changed.tokens.history, changed.method, len(changed.chunks)) == (0, "reuse", 3)
        assert changed.cache.hits.store == 3
        state = engine.sessions.cache.get("default", "talk")
        assert (state.method, len(state.turns)) == ("reuse", 3)
        assert talk(engine, QUESTIONS[2:3], method="reuse")[0].report.tokens.history > 0


@pytest.mark.parametrize("method", ["full", "scout"])
@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_document_that_goes_between_turns_is_in_no_later_one(tmp_path, method, change):
    with fill(quick_engine(tmp_path)) as engine:
        talk(engine, QUESTIONS[:2], method=method)
        if change == "removed":
            remove(engine, "default", "harbour")
        else:
            ingest(engine, Document("harbour", "Harbour", "It was pulled down."))
        assert engine.sessions.cache.get("default", "talk") is None, "what it said is gone from memory at once"
        report = talk(engine, QUESTIONS[2:3], method=method)[0].report
        assert [chunk.document_id for chunk in report.chunks] == ["mill"], "nor is what the second turn read beside it"
        assert (report.tokens.history, report.removed_turns) == (0, 2)
        remove(engine, "default", "mill")
        last = talk(engine, QUESTIONS[3:], method=method)[0].report
        assert [chunk.document_id for chunk in last.chunks][-1] in ("tower", "harbour")
        assert last.removed_turns == 3
        turns = engine.sessions.turns("default", "talk")
        assert [turn.removed for turn in turns] == [True, True, True, False]


@pytest.mark.parametrize("method", ["full", "scout"])
def test_a_conversation_goes_on_as_if_the_turns_that_read_a_removed_document_had_not_been(tmp_path, method):
    with fill(quick_engine(tmp_path / "with")) as engine:
        talk(engine, QUESTIONS[:3], method=method)
        remove(engine, "default", "bridge")
        after = talk(engine, QUESTIONS[3:], method=method)[0]
        state = cache(engine)
        first, *others = engine.sessions.turns("default", "talk")
    with fill(quick_engine(tmp_path / "without"), [name for name in NAMES if name != "bridge"]) as engine:
        talk(engine, QUESTIONS[:1], method=method)
        expected = talk(engine, QUESTIONS[3:], method=method)[0]
        same(cache(engine), state)
    assert (after.answer, after.report.chunks) == (expected.answer, expected.report.chunks)
    assert first.answer, "the turn before it stays"
    assert [(turn.answer, turn.written) for turn in others[:2]] == [("", ())] * 2
    assert [turn.question for turn in others] == list(QUESTIONS[1:]), "what was asked stays"


def test_a_document_that_is_ingested_again_unchanged_removes_no_turn(tmp_path):
    with fill(quick_engine(tmp_path)) as engine:
        (first,) = talk(engine, QUESTIONS[:1])
    with fill(quick_engine(tmp_path, chunk_tokens=64)) as engine:  # all chunks are made anew
        report = talk(engine, QUESTIONS[1:2])[0].report
        assert report.removed_turns == 0
        assert engine.sessions.turns("default", "talk")[0].answer == first.answer.strip()
        remove(engine, "default", "harbour")
        assert talk(engine, QUESTIONS[2:3])[0].report.removed_turns == 2, "they still belong to the document"


@pytest.mark.parametrize("name", [None, "talk"])
def test_an_answer_whose_document_goes_while_it_is_decoded_is_given_without_it(tmp_path, name):
    options = AskOptions(conversation=name, method="scout", top_k=1)
    with fill(quick_engine(tmp_path)) as engine, quick_engine(tmp_path) as other:
        request = engine.prefill(QUESTIONS[0], options)
        remove(other, "default", "harbour")
        for _ in generate(engine.model, request.sequence):
            pass
        with pytest.raises(Outdated):
            engine.finalize(request)
        assert engine.catalog.turns("default", "talk") == []
        passes, changes = engine.prefill_passes, ["bridge", "mill"]

        def interrupted(request):
            yield from passes(request)
            if changes:
                remove(other, "default", request.hits[0].chunk.document_id)
                changes.pop()
            return request

        engine.prefill_passes = interrupted
        answer = engine.answer(QUESTIONS[0], options)
        assert len(answer.report.chunks) == 1
        assert len(engine.catalog.documents()) == 1, "two went, and the third attempt was answered from what is left"


def test_another_process_may_remove_a_document_and_go_on_with_the_conversation(tmp_path):
    with fill(quick_engine(tmp_path)) as engine, quick_engine(tmp_path) as other:
        talk(engine, QUESTIONS[:2])
        remove(other, "default", "harbour")
        talk(other, QUESTIONS[2:3])
        report = talk(engine, QUESTIONS[3:])[0].report
        assert [chunk.document_id for chunk in report.chunks] == ["mill", "tower"]
        assert report.removed_turns == 2
        assert [turn.question for turn in engine.sessions.turns("default", "talk")] == list(QUESTIONS)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_a_turn_that_fails_leaves_the_conversation_as_it_was(tmp_path, fault):
    def fail():
        raise fault

    with fill(quick_engine(tmp_path / "a")) as engine:
        expected = talk(engine, QUESTIONS[:2])[1].answer
        state = cache(engine)
    with fill(quick_engine(tmp_path / "b")) as engine:
        talk(engine, QUESTIONS[:1])
        broken = Interrupted(engine, 1, fail)
        with pytest.raises(fault):
            talk(engine, QUESTIONS[1:2])
        assert broken.happened
        assert len(engine.sessions.turns("default", "talk")) == 1
        assert talk(engine, QUESTIONS[1:2])[0].answer == expected
        same(cache(engine), state)


def test_a_refused_question_costs_no_state(tmp_path):
    with fill(quick_engine(tmp_path)) as engine:
        talk(engine, QUESTIONS[:1])
        with pytest.raises(InputError, match=r"after 1 turns .* start a new conversation"):
            talk(engine, QUESTIONS[1:2], max_tokens=4_000)
        with pytest.raises(InputError, match="empty"):
            talk(engine, [" "])
        assert talk(engine, QUESTIONS[1:2])[0].report.tokens.history > 0


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\ud800", "x" * (MAX_NAME + 1)])
def test_names_that_are_none_are_refused(tmp_path, name):
    with fill(quick_engine(tmp_path), NAMES[:1]) as engine, pytest.raises(InputError, match="printable"):
        talk(engine, QUESTIONS[:1], name)


def test_a_method_that_turns_keys_anew_holds_no_conversations(tmp_path):
    with fill(quick_engine(tmp_path), NAMES[:1]) as engine:
        with pytest.raises(InputError, match="single questions only, because it rotates keys"):
            talk(engine, QUESTIONS[:1], method="multi-infllm:local=4")
        with pytest.raises(NotFound):
            engine.sessions.turns("default", "talk")


def test_conversations_belong_to_collections_and_leave_nothing_when_they_are_removed(tmp_path):
    with fill(quick_engine(tmp_path)) as engine:
        ingest(engine, Document("a", "A", "The harbour was never built.", collection="other"))
        talk(engine, QUESTIONS[:2])
        report = talk(engine, QUESTIONS[:1], collection="other")[0].report
        assert (report.tokens.history, [c.document_id for c in report.chunks]) == (0, ["a"])
        engine.sessions.remove("default", "talk")
        assert engine.sessions.cache.get("default", "talk") is None
        with engine.catalog.read() as connection:
            assert connection.exec_driver_sql("SELECT collection FROM turns").fetchall() == [("other",)]
        with pytest.raises(NotFound, match="talk"):
            engine.sessions.remove("default", "talk")
        assert talk(engine, QUESTIONS[:1])[0].report.tokens.history == 0


def test_a_conversation_removed_while_it_is_answered_stays_removed(tmp_path):
    with fill(quick_engine(tmp_path)) as engine, quick_engine(tmp_path) as other:
        talk(engine, QUESTIONS[:1])
        broken = Interrupted(engine, 1, lambda: other.sessions.remove("default", "talk"))
        assert talk(engine, QUESTIONS[1:2])[0].report.tokens.history > 0
        assert broken.happened
        with pytest.raises(NotFound):
            engine.sessions.turns("default", "talk")
        assert engine.sessions.cache.sessions() == []


def test_a_single_question_is_no_conversation(tmp_path):
    with fill(quick_engine(tmp_path), NAMES[:1]) as engine:
        engine.answer(QUESTIONS[0])
        assert engine.sessions.cache.sessions() == []
        with engine.catalog.read() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM turns").fetchone() == (0,)


def test_another_model_reads_the_texts_of_the_turns(tmp_path):
    with fill(quick_engine(tmp_path)) as engine:
        said = talk(engine, QUESTIONS[:2])
        asked = [turn.asked for turn in engine.sessions.turns("default", "talk")]
    with quick_engine(tmp_path, "another") as engine:
        report = talk(engine, QUESTIONS[2:3])[0].report
        assert len(report.chunks) == 3
        prompt = engine.model.prompt
        again = [prompt.question(question) for question in QUESTIONS[:2]]
        assert asked == again, "the two models have one tokenizer"
        answers = sum(len(prompt.retold(answer.answer)) for answer in said)
        state = engine.sessions.cache.get("default", "talk")
        rest = report.tokens.question + report.tokens.generated - 1
        expected = 1 + report.tokens.context + sum(map(len, again)) + answers + rest
        assert state.state.stitch.end == expected


def test_a_model_that_may_not_reuse_talks_in_full(tmp_path):
    with fill(quick_engine(tmp_path)) as engine:
        talk(engine, QUESTIONS[:1])
        engine.reuse_refused = "its rows are not to be trusted"
        report = talk(engine, QUESTIONS[1:2])[0].report
        assert (report.method, report.tokens.history, report.cache.hits.store) == ("full", 0, 0)
        assert talk(engine, QUESTIONS[2:3])[0].report.tokens.history > 0


def test_a_follow_up_finds_what_the_turn_before_was_about(library: Engine) -> None:
    first, later = "How many passengers does the Grey Heron carry?", "Who designed it?"

    def found(**options: Any) -> set[str]:
        return {hit.chunk.document_id for hit in library.prefill(later, AskOptions(top_k=1, **options)).hits}

    heron = {"04-grey-heron-inspection.md"}
    library.answer(first, AskOptions(conversation="follow", top_k=1, max_tokens=4))
    assert found(conversation="follow") == heron
    assert found(history=[(first, "212")]) == heron
    assert found() != heron, "the words of the question alone find something else"


def test_a_conversation_and_turns_that_come_with_the_question_exclude_each_other(library: Engine) -> None:
    with pytest.raises(InputError, match="either"):
        library.answer("Why?", AskOptions(conversation="c", history=[("Who?", "Ada")]))


def watch_evidence(engine, monkeypatch):
    """Record the evidence in the pieces of every prefill."""
    seen, real = [], engine.prefiller.sparse_passes

    def prefill(sources, *rest):
        seen.append([source.piece.evidence for source in sources])
        return real(sources, *rest)

    monkeypatch.setattr(engine.prefiller, "sparse_passes", prefill)
    return seen


def watch_contexts(engine, monkeypatch):
    """Record what every sparse prefill returns."""
    seen, real = [], engine.prefiller.sparse_passes

    def prefill(*given):
        seen.append((yield from real(*given)))
        return seen[-1]

    monkeypatch.setattr(engine.prefiller, "sparse_passes", prefill)
    return seen


def test_a_method_is_told_the_evidence_of_its_question_in_every_chunk(tmp_path, monkeypatch):
    with fill(quick_engine(tmp_path)) as engine:
        seen = watch_evidence(engine, monkeypatch)
        found = engine.answer(QUESTIONS[0], AskOptions(method="scout", top_k=3)).report
        engine.answer(QUESTIONS[0], AskOptions(method="reuse", top_k=3))
    told, none = seen
    assert [len(each.meaning) for each in told] == [chunk.blocks for chunk in found.chunks]
    assert max(float(each.meaning.max()) for each in told) > 0.2
    assert any(each.words.any() for each in told)
    assert none == [None] * 3, "a method of the papers asks the model alone"


def test_each_turn_of_a_conversation_looks_for_its_own_evidence_and_a_lost_state_for_the_same(tmp_path, monkeypatch):
    asked = AskOptions(method="scout", top_k=2, conversation="talk")
    with fill(quick_engine(tmp_path)) as engine:
        seen = watch_evidence(engine, monkeypatch)
        for question in QUESTIONS[:2]:
            engine.answer(question, asked)
    with quick_engine(tmp_path) as engine:
        again = watch_evidence(engine, monkeypatch)
        engine.answer(QUESTIONS[2], asked)
    assert not torch.equal(seen[0][0].meaning, seen[1][0].meaning), "of the same chunk, for another question"
    for before, after in zip(seen, again[:2], strict=True):
        assert [each.meaning.tolist() for each in before] == [each.meaning.tolist() for each in after]


def test_a_conversation_has_a_largest_number_of_turns(tmp_path, monkeypatch):
    monkeypatch.setattr("ragkv.engine.session_manager.MAX_TURNS", 2)
    asked = AskOptions(method="full", top_k=1, conversation="talk")
    with fill(quick_engine(tmp_path)) as engine:
        for question in QUESTIONS[:2]:
            engine.answer(question, asked)
        with pytest.raises(InputError, match="start a new one"):
            engine.answer(QUESTIONS[2], asked)
        assert engine.answer(QUESTIONS[2], replace(asked, conversation="another")).report.tokens.history == 0


def test_of_many_retrieved_chunks_the_strongest_join_as_if_no_other_had_been_retrieved(tmp_path, monkeypatch):
    with fill(quick_engine(tmp_path)) as engine:
        contexts = watch_contexts(engine, monkeypatch)
        wide = engine.answer(QUESTIONS[0], AskOptions(method="scout:chunks=2", top_k=4))
        joined = [chunk.chunk_id for chunk in wide.report.chunks[:2]]
        search = engine.retriever.search
        monkeypatch.setattr(
            engine.retriever, "search", lambda *given: [hit for hit in search(*given) if hit.chunk.id in joined]
        )
        narrow = engine.answer(QUESTIONS[0], AskOptions(method="scout", top_k=4))
    assert contexts[0].position == contexts[1].position
    assert torch.equal(contexts[0].logits, contexts[1].logits)
    assert (wide.answer, wide.citations) == (narrow.answer, narrow.citations)
    assert wide.report.chunks[:2] == narrow.report.chunks


def test_chunks_that_are_left_out_are_in_the_report_and_the_map_with_nothing_kept(tmp_path):
    with fill(quick_engine(tmp_path)) as engine:
        request = engine.prefill(QUESTIONS[0], AskOptions(method="scout:chunks=2", top_k=4))
        for _ in generate(engine.model, request.sequence, engine.graph_decoder):
            pass
        report, shown = engine.finalize(request).report, engine.map(request)
        every = engine.answer(QUESTIONS[0], AskOptions(method="scout", top_k=4)).report
    assert sorted(chunk.chunk_id for chunk in report.chunks) == sorted(chunk.chunk_id for chunk in every.chunks)
    assert [max(chunk.kept) > 0 for chunk in report.chunks[2:]] == [False, False]
    assert [chunk.recomputed_tokens for chunk in report.chunks[2:]] == [0, 0]
    assert [set("".join(chunk.states)) for chunk in shown.chunks[2:]] == [{"d"}, {"d"}]
    assert [chunk.chunk_id for chunk in shown.chunks] == [chunk.chunk_id for chunk in report.chunks]
    assert (report.tokens.context, report.bytes.context_kv) == (every.tokens.context, every.bytes.context_kv)
    assert report.bytes.heads < every.bytes.heads, "their head records were not read"
    assert (report.cache.chunks, report.cache.misses, report.ratios.cache_hit) == (2, 0, 1)


def test_a_turn_keeps_the_chunks_that_joined_and_the_next_one_may_take_others(tmp_path):
    asked = AskOptions(conversation="talk", method="scout:chunks=1", top_k=3)
    with fill(quick_engine(tmp_path / "kept")) as engine:
        kept = [engine.answer(q, asked) for q in QUESTIONS]
        turns = engine.sessions.turns("default", "talk")
        expected = cache(engine)
    assert [len(turn.joined) for turn in turns] == [1, 1, 1, 1]
    assert len({chunk for turn in turns for _, chunk in turn.joined}) == 4, "what was left out joins later"
    with fill(quick_engine(tmp_path / "lost")) as engine:
        lost = [engine.answer(q, asked) for q in QUESTIONS[:3]]
    with quick_engine(tmp_path / "lost") as engine:
        lost.append(engine.answer(QUESTIONS[3], asked))
        same(cache(engine), expected)
    assert [answer.answer for answer in lost] == [answer.answer for answer in kept]
