"""Decoding over a pool of KV blocks gives what decoding from caches gives, whoever joins, leaves and shares it."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.staged import StagedDecoder
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.pooled_decode import PoolCounts, PooledDecoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.sparse.base import QueryObserver
from ragkv.sparse.psa import Psa
from tests import tiny
from tests.slots import check_slots

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (61, 9, 130)
ALL = Psa(threshold=1.0, block=8)
SOME = Psa(threshold=0.6, block=8, micro=2)
TOLERANCE = 1e-9


def slots(model, count, params=ALL):
    """Bytes of so many slots."""
    return count * 2 * params.block * model.shape.head_dim * model.dtype.itemsize


def prefilled(model, length, params=ALL):
    """A cache and the policy state that observed its last token; the same for the same length."""
    cache, state = ContextCache(model.shape, length, model.dtype, model.device), params.start()
    model.forward([append(cache, tiny.tokens(length, length), 0, attention=QueryObserver(state, None, length - 1))])
    return cache, state


class Pair:
    """A request over a pool, and the same request over its own cache."""

    def __init__(self, decoder, length, params, rows=60):
        self.cache, self.state = prefilled(decoder.model, length, params)
        self.at = length
        self.request = decoder.open(prefilled(decoder.model, length, params)[0], params, rows)

    @property
    def token(self):
        return 11 + 3 * self.at % 80

    def expected(self):
        passed = append(self.cache, [self.token], self.at, attention=self.state)
        return self.request.decoder.model.forward([passed])[0][0]


def step(decoder, pairs):
    """Take a step with requests of the pool and compare their logits."""
    expected = [each.expected() for each in pairs]
    found = decoder.decode([each.request for each in pairs], [each.token for each in pairs], [p.at for p in pairs])
    for logits, should in zip(found, expected, strict=True):
        torch.testing.assert_close(logits, should, rtol=0, atol=TOLERANCE)
    for each in pairs:
        each.at += 1


def check_left(pair):
    """Check what a request that has left says, and that its cache is complete."""
    counts, state = pair.request.counts, pair.state
    assert (counts.keys_read, counts.keys_present) == (state.keys_read, state.keys_present)
    assert counts.hits + counts.loaded >= counts.read
    cache = pair.request.cache
    for layer in range(cache.shape.layers):
        assert torch.equal(cache.positions(layer), pair.cache.positions(layer))
        for one, other in ((cache.k(layer), pair.cache.k(layer)), (cache.v(layer), pair.cache.v(layer))):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("count", [1, 30, 1000])
def test_with_a_threshold_of_one_decoding_is_dense(kind, count):
    model = tiny.model(kind, layers=2)
    decoder = PooledDecoder(model, ALL, slots(model, count))
    pairs = [Pair(decoder, length, ALL) for length in LENGTHS]
    for each in pairs:
        each.request.join()
        each.state = None
    for _ in range(4):
        step(decoder, pairs)
    assert all(sum(each.cache.lengths) == sum(each.request.cache.lengths) for each in pairs)


@pytest.mark.parametrize("count", [1, 25, 400])
def test_a_request_reads_what_the_policy_reads_from_a_cache(count):
    """While its answer fills several blocks, and with fewer slots than a step reads."""
    model = tiny.model(layers=3)
    decoder = PooledDecoder(model, SOME, slots(model, count))
    for length in LENGTHS:
        pair = Pair(decoder, length, SOME)
        pair.request.join()
        for _ in range(27):
            step(decoder, [pair])
        check_slots(decoder.pool)
        pair.request.leave()
        check_left(pair)
        assert pair.request.counts.steps == 27
        assert pair.request.counts.read > 0
    check_slots(decoder.pool)
    assert decoder.pool.use().used == 0


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_join_step_and_leave_in_any_order_share_the_slots_and_leak_none(seed):
    """A cancelled request is one that leaves early. Few slots in one run of two."""
    dice, model = random.Random(seed), tiny.model(layers=2)
    policies = [SOME, Psa(threshold=0.9, block=8, micro=2, least=3), Psa(threshold=1.0, block=8, micro=2, sinks=0)]
    decoder, running, left = PooledDecoder(model, SOME, slots(model, 14 + 90 * (seed % 2))), [], []
    for _ in range(40):
        what = dice.random()
        if what < 0.25 and len(running) < 5:
            pair = Pair(decoder, dice.choice((3, 17, 40, 64, 90)), dice.choice(policies))
            pair.request.join()
            running.append(pair)
        elif what < 0.4 and running:
            left.append(running.pop(dice.randrange(len(running))))
            left[-1].request.leave()
            check_left(left[-1])
        elif running:
            step(decoder, running if dice.random() < 0.8 else running[:1])
        check_slots(decoder.pool)
        assert decoder.pool.joined == len(running)
    for each in running:
        each.request.leave()
        check_left(each)
    use = decoder.pool.use()
    check_slots(decoder.pool)
    assert (use.used, decoder.pool.joined) == (0, 0)
    done = [each.request.counts for each in (*left, *running)]
    for name in ("read", "hits", "loaded"):
        assert getattr(use, name) == sum(getattr(each, name) for each in done)
    assert use.read > 100
    assert use.evicted > 0 or seed % 2


def test_a_leaving_request_takes_nothing_of_the_others_with_it():
    """The next request gets its place, and no block of it."""
    model = tiny.model(layers=2)
    decoder = PooledDecoder(model, SOME, slots(model, 200))
    first, second = Pair(decoder, 130, SOME), Pair(decoder, 61, SOME)
    for each in (first, second):
        each.request.join()
    step(decoder, [first, second])
    place = first.request.place
    first.request.leave()
    third = Pair(decoder, 64, SOME)
    third.request.join()
    assert third.request.place == place
    for _ in range(3):
        step(decoder, [second, third])
    check_slots(decoder.pool)


def test_blocks_that_are_read_again_are_in_the_pool():
    model = tiny.model(layers=2)
    decoder = PooledDecoder(model, Psa(threshold=0.5, block=8), slots(model, 200))
    pair = Pair(decoder, 130, Psa(threshold=0.5, block=8))
    pair.request.join()
    loaded = [0]
    for _ in range(12):
        decoder.decode([pair.request], [11], [pair.at])
        pair.at += 1
        loaded.append(decoder.pool.use().loaded)
    assert loaded[3] > 0
    assert loaded[-1] - loaded[-4] < loaded[3]


def test_a_request_is_admitted_by_the_blocks_that_a_step_of_it_reads_at_least():
    """130 rows are 16 blocks, one of them a sink: half of 15 blocks for 2 kv heads in 2 layers are 32 slots."""
    model, half = tiny.model(layers=2), Psa(threshold=0.5, block=8, part=0.5)
    decoder = PooledDecoder(model, half, slots(model, 63))
    one, two, small = Pair(decoder, 130, half), Pair(decoder, 130, half), Pair(decoder, 64, half)
    assert decoder.pool.working_set(one.cache, half) == 32
    assert decoder.pool.working_set(small.cache, half) == 16
    one.request.join()
    assert not two.request.fits
    assert small.request.fits
    one.request.leave()
    assert two.request.fits
    alone = PooledDecoder(model, half, slots(model, 1))
    assert Pair(alone, 130, half).request.fits, "a request that is larger than the pool runs alone"


def test_layers_that_hold_different_rows():
    model = tiny.model(layers=3)
    cache = prefilled(model, 50)[0]

    def ragged():
        made = ContextCache(model.shape, 4, model.dtype)
        for layer in range(3):
            live = torch.randperm(50, generator=torch.Generator().manual_seed(layer))[: 50 - 17 * layer]
            made.put(layer, cache.k(layer)[live], cache.v(layer)[live], cache.positions(layer)[live])
        return made

    decoder, own = PooledDecoder(model, ALL, slots(model, 12)), ragged()
    request = decoder.open(ragged(), ALL, 20)
    request.join()
    for at in range(20):
        expected = model.forward([append(own, [5 + at], 50 + at)])[0]
        torch.testing.assert_close(decoder.decode([request], [5 + at], [50 + at]), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_staged_decoding_is_dense_decoding(share):
    model = tiny.model(layers=3)
    caches = [prefilled(model, length)[0] for length in LENGTHS]
    decoder = StagedDecoder(model, [prefilled(model, length)[0] for length in LENGTHS], share, 4)
    for at in range(4):
        requests = zip(caches, (11, 12, 13), LENGTHS, strict=True)
        expected = torch.cat(model.forward([append(c, [t], n + at) for c, t, n in requests]))
        torch.testing.assert_close(decoder.decode([11, 12, 13]), expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(ValueError, match="no room"):
        decoder.decode([11, 12, 13])


def test_policies_that_the_pool_does_not_serve_are_left_to_caches():
    model = tiny.model(layers=2)
    decoder = PooledDecoder(model, ALL, slots(model, 5))
    cache = prefilled(model, 20)[0]
    for params in (Psa(block=16), Psa(block=8, dense=1), Psa(block=8, reach="all"), Psa(block=8, sinks=2)):
        assert decoder.open(cache, params, 4) is None
    assert decoder.open(cache, Psa(block=8, sinks=0, threshold=0.3, least=4), 4) is not None


def test_a_pool_without_room_for_a_block_is_refused():
    model = tiny.model(layers=2)
    with pytest.raises(ValueError, match="hold no block of 1024 bytes"):
        PooledDecoder(model, ALL, 1023)


def test_a_request_that_cannot_join_leaves_the_pool_as_it_was(monkeypatch):
    model = tiny.model(layers=2)
    decoder = PooledDecoder(model, SOME, slots(model, 50))
    pair, failing = Pair(decoder, 61, SOME), Pair(decoder, 40, SOME)
    pair.request.join()
    step(decoder, [pair])

    def full(*_, **__):
        raise torch.OutOfMemoryError("no pinned memory left")

    with monkeypatch.context() as patch:
        patch.setattr(failing.request.cache, "move", full)
        with pytest.raises(torch.OutOfMemoryError):
            failing.request.join()
    assert decoder.pool.joined == 1
    failing.request.leave()
    assert failing.request.counts == PoolCounts()
    step(decoder, [pair])
    check_slots(decoder.pool)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs and streams are for GPUs")
@pytest.mark.parametrize("count", [40, 4000])
def test_recorded_steps_are_those_of_the_policy_on_a_gpu(count):
    """Of requests that join and leave, in float32, with the logits of the policy over caches."""
    params = Psa(threshold=0.6, block=16)
    model = DecoderModel(tiny.weights("llama", layers=3, max_positions=2048).float().cuda())
    decoder, running = PooledDecoder(model, params, slots(model, count, params)), []
    for length in (700, 90, 1200, 300):
        pair = Pair(decoder, length, params)
        pair.request.join()
        running.append(pair)
        for _ in range(20):
            found = decoder.decode([p.request for p in running], [p.token for p in running], [p.at for p in running])
            for each, logits in zip(running, found, strict=True):
                torch.testing.assert_close(logits, each.expected(), rtol=0, atol=1e-2)
                each.at += 1
        check_slots(decoder.pool)
        if len(running) == 3:
            running.pop(0).request.leave()
