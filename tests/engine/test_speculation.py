"""Speculation changes the number of passes, and nothing that a request says, keeps or counts."""

import random

import pytest
import torch

from ragkv.engine.batch import Batch
from ragkv.engine.decoding import generate
from ragkv.engine.drafting import Drafter, DraftParams
from ragkv.engine.generation import Sampling, Sequence
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.sparse.psa import Psa
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
EAGER = DraftParams(shortest=1, first=4, pause=1)
"""Drafts as often as it can."""


@pytest.fixture(scope="module")
def model():
    return tiny.model(layers=2)


@pytest.fixture(scope="module")
def single_precision():
    return DecoderModel(tiny.weights(layers=2).float(), profile=tiny.model(layers=2).profile)


@pytest.fixture
def endless(model, monkeypatch):
    """The model without stop tokens."""
    monkeypatch.setattr(model, "stop_ids", frozenset())
    return model


def prefilled(model, seed, sampling, over=None, policy=None):
    """A request that is ready to decode; the same for the same seed. Its cache has exactly the room of its answer."""
    tokens = tiny.tokens(5 + seed % 40, seed)
    cache = ContextCache(model.shape, len(tokens) + max(0, sampling.max_tokens - 1), model.dtype)
    attention = policy.start() if policy else None
    logits = model.forward([append(cache, tokens, 0, attention=attention)])[0][-1]
    return Sequence(cache, logits, len(tokens), sampling, attention, over)


def sampling_of(seed):
    """Greedy and sampled, and another longest answer for every seed."""
    return Sampling(1 + seed * 7 % 30, temperature=(0.0, 0.7, 1.0)[seed % 3], top_p=(1.0, 0.8)[seed % 2], seed=seed)


def noisy(answer, seed):
    """Texts to draft from: what is said, with some tokens replaced, so that drafts are accepted in parts."""
    dice = random.Random(seed)
    share = dice.choice((0.0, 0.1, 0.3, 1.0))
    copy = [token if dice.random() >= share else dice.randrange(3, tiny.VOCABULARY) for token in answer]
    cut = dice.randrange(len(copy) + 1)
    return [tiny.tokens(9, seed), copy[cut:], copy[:cut]]


def drafting(run, answer, seed, params=EAGER):
    run.drafter = Drafter(noisy(answer, seed), (), params)
    return run


def alone(model, run, graph_decoder=None):
    list(generate(model, run, graph_decoder))
    return run


def check_same(run, expected, tolerance=1e-9):
    """The same answer, and the same rows for the next turn."""
    assert (run.tokens, run.stopped) == (expected.tokens, expected.stopped)
    assert run.log_probabilities == pytest.approx(expected.log_probabilities, abs=tolerance)
    assert run.draft == ()
    check_rows(run.cache, expected.cache, tolerance)


def check_rows(cache, expected, tolerance=1e-9):
    assert cache.lengths == expected.lengths
    for layer in range(cache.shape.layers):
        assert torch.equal(cache.positions(layer), expected.positions(layer))
        torch.testing.assert_close(cache.k(layer), expected.k(layer), rtol=0, atol=tolerance)
        torch.testing.assert_close(cache.v(layer), expected.v(layer), rtol=0, atol=tolerance)


def counted(run, expected):
    """Every pass but for what drafts saved; the last token has no pass, and a drafted one may be the last."""
    drafter = run.drafter
    assert 0 <= drafter.accepted <= drafter.drafted
    assert drafter.passes <= run.steps
    assert expected.steps - drafter.accepted <= run.steps <= expected.steps - drafter.accepted + 1
    return drafter


def test_every_answer_is_what_is_said_without_drafts(model):
    accepted = rejected = saved = 0
    for seed in range(60):
        expected = alone(model, prefilled(model, seed, sampling_of(seed)))
        run = alone(model, drafting(prefilled(model, seed, sampling_of(seed)), expected.tokens, seed))
        check_same(run, expected)
        drafter = counted(run, expected)
        accepted, rejected = accepted + drafter.accepted, rejected + drafter.drafted - drafter.accepted
        saved += expected.steps - run.steps
    assert accepted > 150
    assert rejected > 150
    assert saved > 150


def test_in_single_precision_log_probabilities_agree(single_precision):
    for seed in range(12):
        expected = alone(single_precision, prefilled(single_precision, seed, sampling_of(seed)))
        run = drafting(prefilled(single_precision, seed, sampling_of(seed)), expected.tokens, seed)
        check_same(alone(single_precision, run), expected, tolerance=1e-4)


def test_a_copied_answer_takes_few_passes(endless):
    sampling = Sampling(41)
    expected = alone(endless, prefilled(endless, 4, sampling))
    run = prefilled(endless, 4, sampling)
    run.drafter = Drafter([expected.tokens])
    check_same(alone(endless, run), expected)
    # One token, seven by passes without a draft, then 8 + 1, 16 + 1, and the 6 + 1 that are left.
    assert (len(run.tokens), run.steps, run.drafter.passes) == (41, 10, 3)
    assert run.drafter.accepted == run.drafter.drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_ends_wherever_a_stop_token_is_inside_a_draft(endless, monkeypatch, temperature):
    model, sampling = endless, Sampling(24, temperature=temperature, seed=3)
    whole = alone(model, prefilled(model, 8, sampling)).tokens
    assert len(whole) == 24
    inside = 0
    for at in range(24):
        monkeypatch.setattr(model, "stop_ids", frozenset({whole[at]}))
        expected = alone(model, prefilled(model, 8, sampling))
        run = prefilled(model, 8, sampling)
        run.drafter = Drafter([whole], (), EAGER)
        check_same(alone(model, run), expected)
        assert run.stopped
        assert whole[at] not in run.tokens
        inside += expected.steps > run.steps
    assert inside > 10


def test_the_answer_ends_wherever_a_stop_string_or_its_length_is_inside_a_draft(endless):
    whole = alone(endless, prefilled(endless, 9, Sampling(24))).tokens
    for size in range(1, 25):
        for sampling, over in ((Sampling(size), None), (Sampling(24), lambda tokens, size=size: len(tokens) == size)):
            expected = alone(endless, prefilled(endless, 9, sampling, over))
            run = prefilled(endless, 9, sampling, over)
            run.drafter = Drafter([whole], (), EAGER)
            check_same(alone(endless, run), expected)
            assert len(run.tokens) == size
            room = run.cache.buffers(0, 0)[0].shape[0]
            assert room == expected.cache.buffers(0, 0)[0].shape[0], "a draft takes no more room than the answer"


def test_a_caller_that_stops_reading_leaves_no_row_of_a_draft(endless):
    sampling = Sampling(20)
    whole = alone(endless, prefilled(endless, 5, sampling)).tokens
    for count in range(1, 20):
        run, expected = (prefilled(endless, 5, sampling) for _ in range(2))
        run.drafter = Drafter([whole], (), EAGER)
        for each in (run, expected):
            said = generate(endless, each)
            assert [next(said) for _ in range(count)] == whole[:count]
            said.close()
        # The row of the latest token may be there already: the pass of a draft ran before.
        assert run.draft == ()
        assert run.cache.lengths[0] - expected.cache.lengths[0] in (0, 1)
        run.cache.truncate(expected.cache.lengths)
        check_rows(run.cache, expected.cache)


def mixed(model, seed):
    """With and without drafts, dense and under a policy, and what it says alone."""
    policy = Psa(block=8) if seed % 5 == 4 else None
    expected = alone(model, prefilled(model, seed, sampling_of(seed), policy=policy))
    run = prefilled(model, seed, sampling_of(seed), policy=policy)
    return (run if policy or seed % 4 == 3 else drafting(run, expected.tokens, seed)), expected


@pytest.mark.parametrize("recorded", [False, True])
def test_requests_that_come_and_go_together_say_what_they_say_alone(model, recorded):
    dice = random.Random(11)
    batch = Batch(model, limit=5, graph_decoder=GraphDecoder(model) if recorded else None)
    coming, runs, done, left = list(range(80)), {}, 0, []
    tokens = {}
    while coming or batch.busy:
        for _ in range(min(len(coming), dice.choice((0, 1, 3)))):
            run = mixed(model, coming.pop())
            runs[batch.join(run[0])] = run
        for event in batch.step():
            assert event.id in runs, "nothing comes after the end"
            tokens.setdefault(event.id, []).extend([] if event.token is None else [event.token])
            if event.ended:
                run, expected = runs.pop(event.id)
                check_same(run, expected)
                assert tokens[event.id] == expected.tokens
                assert event.ended == ("stop" if expected.stopped else "length")
                done += 1
        if runs and dice.random() < 0.1:
            gone = dice.choice(list(runs))
            batch.cancel(gone)
            left.append(runs.pop(gone))
    assert done + len(left) == 80
    assert len(left) > 5
    for run, expected in left:
        assert run.tokens == expected.tokens[: len(run.tokens)]
        assert run.draft == ()
        rows = min(run.cache.lengths[0], expected.cache.lengths[0])
        for each in (run.cache, expected.cache):
            each.truncate([rows] * model.shape.layers)
        check_rows(run.cache, expected.cache)


def test_a_step_gives_all_tokens_that_were_drafted_right(endless):
    sampling = Sampling(12)
    expected = alone(endless, prefilled(endless, 2, sampling)).tokens
    batch, run = Batch(endless), prefilled(endless, 2, sampling)
    run.drafter = Drafter([expected], (), EAGER)
    batch.join(run)
    steps = []
    while batch.busy:
        steps.append([event.token for event in batch.step()])
    assert [token for step in steps for token in step] == expected
    assert [len(step) for step in steps[:2]] == [1, 5]


def test_a_fault_inside_a_draft_ends_that_request_alone_and_drops_its_rows(endless):
    class Broken(Exception):
        """What goes wrong on purpose."""

    def over(tokens):
        if len(tokens) == 4:
            raise Broken
        return False

    sampling = Sampling(12)
    expected, good = (alone(endless, prefilled(endless, seed, sampling)) for seed in (2, 3))
    batch, run, other = Batch(endless), prefilled(endless, 2, sampling, over), prefilled(endless, 3, sampling)
    run.drafter, other.drafter = Drafter([expected.tokens], (), EAGER), Drafter([good.tokens], (), EAGER)
    bad = batch.join(run)
    batch.join(other)
    events = [event for _ in range(20) for event in batch.step()]
    (failed,) = (event for event in events if event.id == bad and event.ended)
    assert isinstance(failed.fault, Broken)
    assert run.draft == ()
    check_same(other, good)
