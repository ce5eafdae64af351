"""Requests decoded together: each says what it says alone, first come is first served, nothing stays behind."""

import gc
import random
import weakref
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ragkv.engine.batch import Batch
from ragkv.engine.decoding import PrefillGroup, decode, generate
from ragkv.engine.generation import Sampling, Sequence
from ragkv.kernels.attention import attend
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.sparse.lfps import Lfps
from ragkv.sparse.psa import Psa
from tests import tiny

POLICIES = (None, Psa(block=8), Lfps())
pytestmark = pytest.mark.usefixtures("one_thread")


class Recorded(Sequence):
    """Keeps the logits of its steps."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = []

    def accept(self, logits):
        self.seen += [row.logits for row in logits]
        super().accept(logits)


@pytest.fixture(scope="module")
def model():
    return tiny.model(layers=2)


def ask(model, seed, *, asked=None, sampling=None, policy=None, over=None):
    """A request that was prefilled; the same for the same seed."""
    cache, tokens = ContextCache(model.shape, 8, model.dtype), tiny.tokens(asked or 5 + seed % 40, seed)
    attention = policy.start() if policy else None
    logits = model.forward([append(cache, tokens, 0, attention=attention)])[0][-1]
    return Recorded(cache, logits, len(tokens), sampling or Sampling(6), attention, over)


def drawn(model, seed):
    """Another length, policy, temperature and longest answer for every seed."""
    sampling = Sampling(1 + seed % 9, temperature=float(seed % 3 == 0), top_p=0.9, seed=seed)
    return ask(model, seed, sampling=sampling, policy=POLICIES[seed % len(POLICIES)])


def alone(model, run):
    list(generate(model, run))
    return run


def until_quiet(batch, steps=1000):
    """All events; every step is one list of them."""
    events = []
    while batch.busy:
        assert len(events) < steps
        events.append(batch.step())
    return events


def test_200_requests_that_come_and_go_say_what_they_say_alone_and_leave_nothing(model):
    dice, batch = random.Random(7), Batch(model, limit=6)
    coming, runs, caches, done, left = list(range(200)), {}, [], {}, set()
    while coming or batch.busy:
        for _ in range(min(len(coming), dice.choice((0, 0, 1, 2, 5)))):
            seed = coming.pop()
            run = drawn(model, seed)
            caches.append(weakref.ref(run.cache))
            runs[batch.join(run)] = (seed, run)
        for event in batch.step():
            if event.ended:
                done[event.id] = (*runs.pop(event.id), event.ended)
        if runs and dice.random() < 0.2:
            gone = dice.choice(list(runs))
            assert batch.cancel(gone)
            assert not batch.cancel(gone)
            left.add(gone)
            del runs[gone]
        assert batch.running <= 6
        assert batch.running + batch.waiting == len(runs)
    assert len(done) + len(left) == 200
    assert len(left) > 20
    for seed, run, ended in done.values():
        expected = alone(model, drawn(model, seed))
        assert run.tokens == expected.tokens
        assert ended == ("stop" if expected.stopped else "length")
        for got, requested in zip(run.seen, expected.seen, strict=True):
            torch.testing.assert_close(got, requested, rtol=0, atol=1e-10)
    assert batch.counts == {"joined": 200, "left": len(left), **Counter(ended for _, _, ended in done.values())}
    assert batch.counts["stop"] > 0
    assert (batch.running, batch.waiting, batch.held) == (0, 0, 0)
    done.clear()
    del run, expected
    gc.collect()
    assert [cache() for cache in caches] == [None] * 200


def test_an_ended_and_a_cancelled_request_free_their_memory_at_once(model):
    """Without help of the garbage collector, while the others go on."""
    batch = Batch(model)
    caches = {}
    for seed, longest in enumerate((2, 50, 50)):
        run = ask(model, seed, sampling=Sampling(longest))
        caches[batch.join(run)] = weakref.ref(run.cache)
    del run
    gc.disable()
    try:
        batch.step()
        assert caches[0]() is not None
        batch.step()
        assert caches[0]() is None
        assert batch.cancel(1)
        assert caches[1]() is None
        assert caches[2]() is not None
    finally:
        gc.enable()


def test_requests_begin_in_the_order_in_which_they_came(model):
    batch = Batch(model, limit=2)
    for seed in range(7):
        batch.join(ask(model, seed, sampling=Sampling(1 + 5 * (seed % 2))))
    began = [event.id for events in until_quiet(batch) for event in events]
    assert list(dict.fromkeys(began)) == list(range(7))


def test_a_small_request_does_not_pass_a_large_one_that_waits_for_memory(model):
    first, large, small = (ask(model, seed, asked=asked) for seed, asked in ((1, 60), (2, 100), (3, 5)))
    batch = Batch(model, limit=8, bytes=large.cache.bytes + small.cache.bytes)
    first, large, small = (batch.join(run) for run in (first, large, small))
    steps = [{event.id for event in events} for events in until_quiet(batch)]
    assert steps[0] == {first}
    assert {large, small} in steps
    assert not any(small in step for step in steps[: steps.index({large, small})])


def test_what_runs_never_holds_more_than_the_bound_and_what_is_larger_runs_alone(model):
    sizes = (40, 5, 40, 80, 5, 5)
    runs = [ask(model, seed, asked=asked, sampling=Sampling(4)) for seed, asked in enumerate(sizes)]
    bound = runs[0].cache.bytes + runs[1].cache.bytes
    batch = Batch(model, limit=8, bytes=bound)
    assert runs[3].cache.bytes > bound
    huge = [batch.join(run) for run in runs][3]
    for run in runs:
        run.cache.make_room(4)
    while batch.busy:
        ids = {event.id for event in batch.step()}
        assert batch.held <= bound or ids == {huge}
    assert batch.counts == {"joined": 6, "length": 6} or batch.counts["stop"]


def test_a_batch_with_a_line_or_all_places_taken_is_not_free(model):
    batch = Batch(model, limit=1, bytes=0)
    assert batch.free
    batch.join(ask(model, 1))
    assert not batch.free
    batch.step()
    assert not batch.free
    until_quiet(batch)
    assert batch.free
    with pytest.raises(ValueError, match="limit"):
        Batch(model, limit=0)


def test_a_deadline_ends_those_that_run_and_those_that_wait(model):
    batch, steps = Batch(model, limit=1), []
    runs = [ask(model, seed, sampling=Sampling(50)) for seed in (1, 2, 3)]
    late = [batch.join(runs[0], lambda: len(steps) >= 3), batch.join(runs[1], lambda: len(steps) >= 2)]
    rest = batch.join(runs[2])
    while batch.busy:
        steps.append(batch.step())
    ended = {event.id: event.ended for events in steps for event in events if event.ended}
    assert [ended[id] for id in late] == ["deadline", "deadline"]
    assert ended[rest] in ("stop", "length")
    assert [len(run.tokens) for run in runs[:2]] == [3, 0]
    assert [event.id for event in steps[3]] == [late[0], rest], "the freed place is taken in the same step"


def test_what_a_caller_says_is_over_is_not_read_on(model):
    told = []

    def over(tokens):
        told.append(list(tokens))
        return len(tokens) == 3

    run = ask(model, 4, sampling=Sampling(20), over=over)
    rows = run.cache.lengths[0]
    batch = Batch(model)
    batch.join(run)
    events = [event for events in until_quiet(batch) for event in events]
    assert [event.token for event in events] == run.tokens
    assert told == [run.tokens[:n] for n in (1, 2, 3)]
    assert [event.ended for event in events] == [None, None, "stop"]
    assert run.cache.lengths[0] == rows + 2, "the last token was not read"


def test_a_request_that_may_have_no_tokens_ends_without_one(model):
    batch = Batch(model)
    batch.join(ask(model, 1, sampling=Sampling(0)))
    ((event,),) = until_quiet(batch)
    assert (event.token, event.ended) == (None, "length")


class Broken(Exception):
    """What goes wrong on purpose."""


def say_broken(tokens):
    raise Broken


def attend_broken(layer, q, k, v, q_pos, k_pos, *, scale):
    if layer or q.shape[0] > 1:
        return attend(q, k, v, q_pos, k_pos, scale=scale)
    raise Broken


@pytest.mark.parametrize("broken", [{"over": say_broken}, {"policy": SimpleNamespace(start=lambda: attend_broken)}])
def test_a_fault_of_one_request_ends_that_one_alone(model, broken):
    batch, good = Batch(model), [ask(model, 2), ask(model, 3, policy=Psa(block=8))]
    bad = ask(model, 1, **broken)
    cache = weakref.ref(bad.cache)
    ids = [batch.join(run) for run in (good[0], bad, good[1])]
    del bad
    events = batch.step()
    (failed,) = (event for event in events if event.ended)
    assert (failed.id, failed.ended, type(failed.fault)) == (ids[1], "failed", Broken)
    del failed, events
    gc.collect()  # an exception's frames refer to one another
    assert cache() is None
    until_quiet(batch)
    assert good[0].tokens == alone(model, ask(model, 2)).tokens
    assert good[1].tokens == alone(model, ask(model, 3, policy=Psa(block=8))).tokens


def test_a_fault_of_the_forward_ends_all_that_were_in_it_and_the_next_begin(model):
    batch = Batch(model, limit=2)
    runs = [ask(model, seed, sampling=Sampling(20)) for seed in (1, 2, 3)]
    del runs[0].cache._k[1:]  # a row cannot be written
    ids = [batch.join(run) for run in runs]
    assert {event.id: event.ended for event in batch.step()} == {ids[0]: "failed", ids[1]: "failed"}
    until_quiet(batch)
    assert runs[2].tokens == alone(model, ask(model, 3, sampling=Sampling(20))).tokens


def test_alone_a_fault_of_the_attention_is_raised(model):
    with pytest.raises(Broken):
        alone(model, ask(model, 1, policy=SimpleNamespace(start=lambda: attend_broken)))


def test_decode_is_what_a_batch_of_one_says(model):
    for seed in range(12):
        run, other = drawn(model, seed), drawn(model, seed)
        batch = Batch(model)
        batch.join(run)
        until_quiet(batch)
        logits = other._logits.logits
        assert run.tokens == list(decode(model, other.cache, logits, 5 + seed % 40, other.sampling, other.attention))


def first_pass(model, seed):
    """A first pass of another request, and its logits alone."""
    tokens = tiny.tokens(20, seed)
    passes = [append(ContextCache(model.shape, 8, model.dtype), tokens, 0) for _ in range(2)]
    return passes[0], model.forward(passes[1:])[0]


@contextmanager
def counted(model):
    """The number of passes of every forward inside the block."""
    forward, seen = model.forward, []
    model.forward = lambda passes: seen.append(len(passes)) or forward(passes)
    try:
        yield seen
    finally:
        del model.forward


def test_passes_of_other_requests_run_in_the_forward_of_a_step(model):
    batch, runs = Batch(model), [ask(model, seed, sampling=Sampling(8)) for seed in (1, 2, 3)]
    for run in runs:
        batch.join(run)
    batch.sample()
    (one, alone_one), (two, alone_two) = first_pass(model, 70), first_pass(model, 71)
    with counted(model) as forwards:
        group = PrefillGroup([one, two])
        assert batch.forward(group) == []
    assert forwards == [5]
    for found, expected in zip(group.logits, (alone_one, alone_two), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    until_quiet(batch)
    assert [run.tokens for run in runs] == [
        alone(model, ask(model, seed, sampling=Sampling(8))).tokens for seed in (1, 2, 3)
    ]


def test_a_fault_of_other_requests_passes_ends_no_sequence(model):
    """Not even one with drafted rows: the step is done again without them."""
    batch, runs = Batch(model), [ask(model, seed, sampling=Sampling(8)) for seed in (1, 2, 3)]
    for run in runs:
        batch.join(run)
    runs[1].drafter = Fixed((5, 6))
    batch.sample()
    lengths = runs[0].cache.lengths[0]
    broken, _ = first_pass(model, 70)
    del broken.cache._k[1:]  # fails behind the first layer
    group = PrefillGroup([broken])
    assert batch.forward(group) == []
    assert isinstance(group.fault, IndexError)
    assert group.logits is None
    assert runs[0].cache.lengths == [lengths + 1] * model.shape.layers
    until_quiet(batch)
    assert [run.tokens for run in runs] == [
        alone(model, ask(model, seed, sampling=Sampling(8))).tokens for seed in (1, 2, 3)
    ]


class Fixed:
    """Drafts the same tokens behind every token."""

    def __init__(self, tokens):
        self.tokens = tokens

    def propose(self, tokens, limit):
        return self.tokens[:limit]

    def accept(self):
        pass


@pytest.mark.parametrize("policy", [Psa(block=8), None])
def test_a_prefill_group_joins_dense_sequences_only(model, policy):
    """A policy that has seen a part of a pass cannot see it again."""
    batch = Batch(model)
    batch.join(ask(model, 2, policy=Psa(block=8)))
    batch.join(ask(model, 3, policy=policy))
    batch.sample()
    group = PrefillGroup([first_pass(model, 70)[0]])
    with counted(model) as forwards:
        batch.forward(group)
    assert forwards == ([2] if policy else [2, 1])
    assert (group.logits is None) == (policy is not None)


def test_a_sequence_that_leaves_between_its_token_and_its_pass_is_not_computed(model):
    batch, runs = Batch(model), [ask(model, seed, sampling=Sampling(8)) for seed in (1, 2)]
    ids = [batch.join(run) for run in runs]
    assert [event.id for event in batch.sample()] == ids
    assert batch.sample() == [], "a pass comes before the next token"
    batch.cancel(ids[0])
    with counted(model) as forwards:
        batch.forward()
    assert forwards == [1]
