"""Speculation in the engine: what drafts are copied from, what the report says, and conversations that go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ragkv.engine import speculation
from ragkv.engine.decoding import generate
from ragkv.engine.drafting import Drafter, DraftParams
from ragkv.engine.speculation import kept_texts
from ragkv.ingest.pipeline import ingest
from ragkv.recompute.base import Plan
from ragkv.types import AskOptions, Document
from tests.quick import quick_engine, quick_model

EAGER = DraftParams(shortest=1, first=4, pause=1)
QUESTIONS = ("Who built the harbour?", "And who built the bridge?", "When was the mill built?")
METHODS = ("full", "scout", "samkv-fusion")


def filled(data, **settings):
    engine = quick_engine(data, max_tokens=32, **settings)
    for name in ("harbour", "bridge", "mill"):
        text = f"The {name} of Tarn was built in 1889 by Ada {name.title()}. " * 3
        ingest(engine, Document(name, name.title(), text))
    return engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with filled(tmp_path_factory.mktemp("speculation")) as opened:
        yield opened


@pytest.fixture
def said(monkeypatch):
    """Answers that are drafted from as well, every sixth token of them wrong: a random model quotes nothing."""
    known: list[list[int]] = []

    def drafter(texts, never):
        wrong = [[token if at % 6 else 3 for at, token in enumerate(answer, 1)] for answer in known]
        return Drafter([*wrong, *texts], never, EAGER)

    monkeypatch.setattr(speculation, "Drafter", drafter)
    return known


def answered(engine, question, options, said):
    """As `Engine.answer`. What is answered without speculation joins what is drafted from."""
    request = engine.prefill(question, options)
    tokens = list(generate(engine.model, request.sequence))
    if not options.speculation:
        said.append(tokens)
    return engine.finalize(request)


def state_of(engine, name):
    cache = engine.sessions.cache.get("default", name).state.stitch.cache
    return [each(layer) for layer in range(cache.shape.layers) for each in (cache.positions, cache.k, cache.v)]


def comparable(answer):
    """The report without what drafts may change: times, passes, and what was drafted."""
    report = answer.report
    decoding = replace(report.decoding, steps=0, speculation=None)
    evidence = report.evidence and [round(each, 9) for each in vars(report.evidence).values()]
    return (answer.answer, answer.citations, report.tokens, report.ratios, decoding, report.chunks, evidence)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}])
def test_a_conversation_goes_on_as_without_speculation(engine, said, method, sampled):
    found, states, accepted, rejected = {}, {}, 0, 0
    for drafted in (False, True):
        name = f"{method} {sampled} {drafted}"
        options = AskOptions(conversation=name, method=method, top_k=1, speculation=drafted, **sampled)
        answers = [answered(engine, question, options, said) for question in QUESTIONS]
        found[drafted], states[drafted] = [comparable(answer) for answer in answers], state_of(engine, name)
        for counts in (answer.report.decoding.speculation for answer in answers):
            assert (counts is not None) == drafted
            if counts is not None:
                accepted, rejected = accepted + counts.accepted, rejected + counts.drafted - counts.accepted
    assert found[True] == found[False]
    for got, expected in zip(states[True], states[False], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    assert accepted > 10
    assert rejected > 3


def test_the_report_counts_passes_drafts_and_accepted_tokens(engine, said):
    options = AskOptions(method="full", top_k=1)
    plain = answered(engine, QUESTIONS[0], replace(options, speculation=False), said).report
    request = engine.prefill(QUESTIONS[0], replace(options, speculation=True))
    for _ in generate(engine.model, request.sequence):
        pass
    report, drafter = engine.finalize(request).report, request.sequence.drafter
    found = report.decoding.speculation
    assert (found.drafts, found.drafted, found.accepted) == (drafter.passes, drafter.drafted, drafter.accepted)
    assert found.accepted > 0
    assert found.why_none == ""
    assert report.decoding.steps < plain.decoding.steps == plain.tokens.generated - (plain.decoding.ended == "length")
    assert report.decoding.present == plain.decoding.present == report.decoding.read


@pytest.mark.parametrize("policy", ["psa", "lfps", "topk:count=1", "loopserve:first=0"])
def test_under_a_decode_policy_nothing_is_drafted_and_the_report_says_why(engine, policy):
    options = AskOptions(method="full", top_k=3, decode=policy)
    plain, asked = (engine.answer(QUESTIONS[0], replace(options, speculation=each)) for each in (False, True))
    name = policy.partition(":")[0]
    assert asked.report.decoding.speculation.why_none == f"the decode policy {name} decodes one token a step"
    assert asked.report.decoding.speculation.drafted == 0
    assert comparable(asked) == comparable(plain)
    assert asked.report.decoding.steps == plain.report.decoding.steps


def test_the_pool_drafts_nothing_and_the_report_says_why(tmp_path):
    with filled(tmp_path, pool_bytes=2**20) as pooled:
        report = pooled.answer(QUESTIONS[0], AskOptions(method="full", decode="psa", speculation=True)).report
    assert report.decoding.pool is not None
    assert report.decoding.speculation.why_none == "the pool of KV blocks decodes one token a step"


@pytest.mark.parametrize(("setting", "expected"), [("auto", True), ("true", True), ("false", False)])
def test_a_question_overrides_the_setting(tmp_path, setting, expected):
    with filled(tmp_path, speculation=setting) as opened:
        for asked, speculates in ((None, expected), (True, True), (False, False)):
            report = opened.answer(QUESTIONS[0], AskOptions(method="full", max_tokens=2, speculation=asked)).report
            assert (report.decoding.speculation is not None) == speculates


def test_drafts_come_from_the_kept_blocks_in_order_then_from_the_question(engine, monkeypatch):
    seen = []
    monkeypatch.setattr(speculation, "Drafter", lambda texts, never: seen.append((texts, never)))
    for method in ("full", "scout"):
        request = engine.prefill(QUESTIONS[0], AskOptions(method=method, top_k=2, speculation=True))
        texts, never = seen.pop()
        chunks = [hit.chunk.tokens for hit in request.hits]
        assert texts[-1] == request.question_tokens
        assert never == engine.model.stop_ids
        if method == "full":
            assert texts[:-1] == chunks
        else:
            assert texts[:-1] == kept_texts(chunks, request.context.plan, quick_model().profile.block)
            assert 0 < sum(map(len, texts[:-1])) < sum(map(len, chunks))


def test_kept_texts_join_adjacent_blocks_of_a_chunk_and_count_what_any_layer_keeps():
    chunks = [tuple(range(10)), tuple(range(20, 30)), tuple(range(40, 50))]
    kept = (((0, 1), (2,), ()), ((0,), (0, 2), ()))
    plan = Plan(kept, recompute=(), padding=())
    assert kept_texts(chunks, plan, 4) == [tuple(range(8)), tuple(range(20, 24)), (28, 29)]
