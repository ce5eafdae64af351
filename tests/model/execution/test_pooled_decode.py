"""Requests whose KV lies in host memory: the same tokens as from caches, dense or under PSA."""

from __future__ import annotations

import copy

import pytest
import torch

from ragkv.bench.staged import StagedDecoder
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.pooled_decode import PooledDecoder, PooledKV
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.sparse.base import QueryObserver
from ragkv.sparse.psa import Psa
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (61, 9, 130)
ALL = Psa(threshold=1.0, block=8)


def begun(model, params=None, lengths=LENGTHS):
    """(caches, states that have seen the last token of them)."""
    caches = [ContextCache(model.shape, length, model.dtype, model.device) for length in lengths]
    states = [params.start() if params else None for _ in lengths]
    passes = [
        append(c, tiny.tokens(n, n), 0, attention=QueryObserver(s, None, n - 1) if s else None)
        for c, n, s in zip(caches, lengths, states, strict=True)
    ]
    model.forward(passes)
    return caches, states


def tokens_of(step):
    return [11 + (3 * step + of) % 80 for of in range(3)]


def read_all(steps, count):
    return [steps.read(tokens_of(at)) for at in range(count)]


def check(model, steps, caches, states, count, tolerance=1e-10):
    """Some steps, against the model's forward over caches in memory, under a state each."""
    for at in range(count):
        given = zip(caches, tokens_of(at), LENGTHS, states, strict=True)
        wanted = model.forward([append(c, [t], n + at, attention=state) for c, t, n, state in given])
        torch.testing.assert_close(steps.read(tokens_of(at)), torch.cat(wanted), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_reading_everything_is_dense_decoding(kind, share):
    model = tiny.model(kind, layers=2)
    caches, states = begun(model)
    kv = PooledKV(caches, ALL, share, room=5)
    check(model, PooledDecoder(model, kv, ALL), caches, states, 5)


@pytest.mark.parametrize("layers", [2, 3])
def test_both_dense_ways_are_dense_decoding_and_leave_the_pool_alone(layers):
    model = tiny.model(layers=layers)
    caches, states = begun(model)
    kv = PooledKV(caches, ALL, 0.25, room=4)
    before = {name: getattr(kv.pool, name).clone() for name in ("place", "owner", "used", "slots")}
    for make in (lambda: PooledDecoder(model, kv, None), lambda: StagedDecoder(model, kv)):
        check(model, make(), copy.deepcopy(caches), states, 4)
    assert all(torch.equal(getattr(kv.pool, name), each) for name, each in before.items())


def test_a_step_under_psa_is_that_of_the_policy():
    """The first one: a block that becomes full afterwards is ranked from cache, and stays near here."""
    params, model = Psa(threshold=0.6, block=8), tiny.model(layers=3)
    caches, states = begun(model, params)
    steps = PooledDecoder(model, PooledKV(caches, params, 0.25, room=3), params)
    check(model, steps, caches, states, 1)
    for of, state in enumerate(states):
        for layer, met in enumerate(steps.reads):
            near = steps.kv.held[layer][of] + 1
            assert (met.read[of] * 8 + near).tolist() == state.steps_read[layer].read.tolist()
    assert any(int((met.read < steps.kv.pool.ranked[layer][:, None]).sum()) for layer, met in enumerate(steps.reads))


def test_rows_of_the_answer_are_near():
    """Longer than a block: until rows become a block of the cache both read the same."""
    params, model = Psa(threshold=0.7, block=16), tiny.model(layers=2)
    caches, states = begun(model, params)
    free = min(16 - n % 16 for n in LENGTHS)
    steps = PooledDecoder(model, PooledKV(caches, params, 0.25, room=40), params)
    check(model, steps, caches, states, free)
    assert all(bool(each.isfinite().all()) for each in read_all(steps, 40 - free))
    with pytest.raises(ValueError, match="no room"):
        read_all(steps, 60)


def test_the_pool_takes_what_is_read_again_and_again():
    params, model = Psa(threshold=0.5, block=8, sinks=1), tiny.model(layers=2)
    kv = PooledKV(begun(model)[0], params, 0.5, room=12)
    steps = PooledDecoder(model, kv, params)
    missed = []
    for _ in range(12):
        steps.decode(tokens_of(0))
        missed.append(sum(int(met.missed.sum()) for met in steps.reads))
    assert missed[0] > 0
    assert sum(missed[-3:]) < sum(missed[:3])
    kv.wait_ready()
    assert int(kv.pool.used.max()) == 0
    assert kv.pool.owner[0, 2, 0, :3].tolist() == [1, 2, 3], "the sink block is near, and takes no slot"


def test_layers_that_hold_different_rows():
    model = tiny.model(layers=3)
    ragged = ContextCache(model.shape, 4, model.dtype)
    cache = begun(model, lengths=(50,))[0][0]
    for layer in range(3):
        live = torch.randperm(50, generator=torch.Generator().manual_seed(layer))[: 50 - 17 * layer]
        ragged.put(layer, cache.k(layer)[live], cache.v(layer)[live], cache.positions(layer)[live])
    position = 1 + max(int(ragged.positions(layer).max()) for layer in range(3))
    kv = PooledKV([ragged], ALL, 0.3, room=2)
    wanted = model.forward([append(copy.deepcopy(ragged), [5], position)])[0]
    torch.testing.assert_close(PooledDecoder(model, kv, ALL).decode([5]), wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(StagedDecoder(model, kv).decode([5]), wanted, rtol=0, atol=1e-10)


def test_what_is_refused():
    model = tiny.model(layers=2)
    caches = begun(model)[0]
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match="share"):
            PooledKV(caches, ALL, share, room=1)
    with pytest.raises(ValueError, match="all layers"):
        PooledKV(caches, Psa(dense=1), 0.5, room=1)
    with pytest.raises(ValueError, match="8 rows"):
        PooledDecoder(model, PooledKV(caches, ALL, 0.5, room=1), Psa(block=16))


class Eager(PooledDecoder):
    """Steps of the same kernels, launched one by one."""

    def decode(self, tokens):
        self._advance(tokens)
        return self._step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="steps are recorded on a GPU")
def test_recorded_steps_are_the_steps_that_were_recorded():
    params = Psa(threshold=0.7, block=16)
    model = DecoderModel(tiny.weights("llama", layers=2, max_positions=2048).float().cuda())
    caches = begun(model, lengths=(700, 90, 1200))[0]
    ours, theirs = (PooledKV(caches, params, 0.25, room=20) for _ in range(2))
    steps, plain = PooledDecoder(model, ours, params), Eager(model, theirs, params)
    unread = 0
    for at in range(20):
        logits, wanted = steps.decode(tokens_of(at)), plain.decode(tokens_of(at))
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
        for layer, (one, other) in enumerate(zip(steps.reads, plain.reads, strict=True)):
            assert torch.equal(one.read, other.read)
            assert not at or torch.equal(one.missed, other.missed), "the first step is done while it is recorded"
            unread += int((one.read < ours.pool.ranked[layer][:, None]).sum())
    assert unread
    for name in ("place", "owner", "used", "slots"):
        assert torch.equal(getattr(ours.pool, name), getattr(theirs.pool, name)), name


def every_way(kv, model, params):
    """What makes the steps of each way to read everything; the last one changes the pool."""
    return (
        lambda: StagedDecoder(model, kv),
        lambda: PooledDecoder(model, kv, None),
        lambda: PooledDecoder(model, kv, params),
    )


def check_every_way(model, lengths, tolerance):
    """One after another over the same KV, and once more, then from a pool that was changed."""
    params = Psa(threshold=1.0, block=16)
    caches = begun(model, lengths=lengths)[0]
    kv = PooledKV(caches, params, 0.25, room=9)
    wanted = []
    for at in range(8):
        given = zip(caches, tokens_of(at), lengths, strict=True)
        wanted.append(torch.cat(model.forward([append(c, [t], n + at) for c, t, n in given])))
    for make in 2 * every_way(kv, model, params):
        steps = make()
        for at, logits in enumerate(wanted):
            torch.testing.assert_close(steps.read(tokens_of(at)), logits, rtol=0, atol=tolerance)


def test_every_way_to_read_everything_is_dense_decoding():
    check_every_way(tiny.model(layers=3), (70, 9, 200), 1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies run beside a GPU only")
def test_every_way_to_read_everything_is_dense_decoding_on_a_gpu():
    model = DecoderModel(tiny.weights("llama", layers=3, max_positions=2048).float().cuda())
    check_every_way(model, (700, 90, 1200), 1e-3)


def test_copying_ahead_wants_the_pool_that_it_was_made_for():
    """What PSA has taken a slot from is not among what is copied."""
    params, model = Psa(threshold=1.0, block=16), tiny.model(layers=2)
    kv = PooledKV(begun(model)[0], params, 0.25, room=4)
    staged, by_address, psa = (make() for make in every_way(kv, model, params))
    staged.read(tokens_of(0))
    by_address.read(tokens_of(0))
    wanted = staged.read(tokens_of(1))
    psa.read(tokens_of(0))
    with pytest.raises(ValueError, match="changed the pool"):
        staged.read(tokens_of(2))
    torch.testing.assert_close(by_address.read(tokens_of(1)), wanted, rtol=0, atol=1e-10)
    kv.wait_ready()
    assert bool(staged.read(tokens_of(2)).isfinite().all())
