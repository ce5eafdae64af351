"""Decoding with KV in host memory gives the logits of decoding from caches, dense and under PSA."""

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


def prefilled(model, params=None, lengths=LENGTHS):
    """Prefill; return the caches and the policy states that observed their last tokens."""
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


def read_all(decoder, count):
    return [decoder.decode(tokens_of(at)) for at in range(count)]


def check(model, decoder, caches, states, count, tolerance=1e-10):
    """Compare some steps with the model's forward over caches in memory, with a policy state for each request."""
    for at in range(count):
        requests = zip(caches, tokens_of(at), LENGTHS, states, strict=True)
        expected = model.forward([append(c, [t], n + at, attention=state) for c, t, n, state in requests])
        torch.testing.assert_close(decoder.decode(tokens_of(at)), torch.cat(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_reading_everything_is_dense_decoding(kind, share):
    model = tiny.model(kind, layers=2)
    caches, states = prefilled(model)
    kv = PooledKV(caches, ALL, share, room=5)
    check(model, PooledDecoder(model, kv, ALL), caches, states, 5)


@pytest.mark.parametrize("layers", [2, 3])
def test_both_dense_decoders_are_dense_decoding_and_leave_the_pool_unchanged(layers):
    model = tiny.model(layers=layers)
    caches, states = prefilled(model)
    kv = PooledKV(caches, ALL, 0.25, room=4)
    before = {name: getattr(kv.pool, name).clone() for name in ("slot_of", "block_of", "last_used", "slots")}
    for make in (lambda: PooledDecoder(model, kv, None), lambda: StagedDecoder(model, kv)):
        check(model, make(), copy.deepcopy(caches), states, 4)
    assert all(torch.equal(getattr(kv.pool, name), each) for name, each in before.items())


def test_a_step_under_psa_is_that_of_the_policy():
    """This holds for the first step. A block that becomes full later is ranked with a cache and stays near here."""
    params, model = Psa(threshold=0.6, block=8), tiny.model(layers=3)
    caches, states = prefilled(model, params)
    decoder = PooledDecoder(model, PooledKV(caches, params, 0.25, room=3), params)
    check(model, decoder, caches, states, 1)
    for of, state in enumerate(states):
        for layer, result in enumerate(decoder.reads):
            near = decoder.kv.near_lengths[layer][of] + 1
            assert (result.read[of] * 8 + near).tolist() == state.key_counts[layer].read.tolist()
    assert any(
        int((result.read < decoder.kv.pool.ranked[layer][:, None]).sum()) for layer, result in enumerate(decoder.reads)
    )


def test_rows_of_the_answer_are_near():
    """Both read the same until the rows of the answer fill a block of the cache."""
    params, model = Psa(threshold=0.7, block=16), tiny.model(layers=2)
    caches, states = prefilled(model, params)
    free = min(16 - n % 16 for n in LENGTHS)
    decoder = PooledDecoder(model, PooledKV(caches, params, 0.25, room=40), params)
    check(model, decoder, caches, states, free)
    assert all(bool(each.isfinite().all()) for each in read_all(decoder, 40 - free))
    with pytest.raises(ValueError, match="no room"):
        read_all(decoder, 60)


def test_the_pool_admits_blocks_that_are_read_repeatedly():
    params, model = Psa(threshold=0.5, block=8, sinks=1), tiny.model(layers=2)
    kv = PooledKV(prefilled(model)[0], params, 0.5, room=12)
    decoder = PooledDecoder(model, kv, params)
    missed = []
    for _ in range(12):
        decoder.decode(tokens_of(0))
        missed.append(sum(int(result.missed.sum()) for result in decoder.reads))
    assert missed[0] > 0
    assert sum(missed[-3:]) < sum(missed[:3])
    kv.reset()
    assert int(kv.pool.last_used.max()) == 0
    assert kv.pool.block_of[0, 2, 0, :3].tolist() == [1, 2, 3], "the sink block is near and has no slot"


def test_layers_that_hold_different_rows():
    model = tiny.model(layers=3)
    ragged = ContextCache(model.shape, 4, model.dtype)
    cache = prefilled(model, lengths=(50,))[0][0]
    for layer in range(3):
        live = torch.randperm(50, generator=torch.Generator().manual_seed(layer))[: 50 - 17 * layer]
        ragged.put(layer, cache.k(layer)[live], cache.v(layer)[live], cache.positions(layer)[live])
    position = 1 + max(int(ragged.positions(layer).max()) for layer in range(3))
    kv = PooledKV([ragged], ALL, 0.3, room=2)
    expected = model.forward([append(copy.deepcopy(ragged), [5], position)])[0]
    torch.testing.assert_close(PooledDecoder(model, kv, ALL).decode([5]), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(StagedDecoder(model, kv).decode([5]), expected, rtol=0, atol=1e-10)


def test_invalid_settings_are_refused():
    model = tiny.model(layers=2)
    caches = prefilled(model)[0]
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match="share"):
            PooledKV(caches, ALL, share, room=1)
    with pytest.raises(ValueError, match="all layers"):
        PooledKV(caches, Psa(dense=1), 0.5, room=1)
    with pytest.raises(ValueError, match="8 rows"):
        PooledDecoder(model, PooledKV(caches, ALL, 0.5, room=1), Psa(block=16))


class Eager(PooledDecoder):
    """A decoder that launches the same kernels one by one."""

    def decode(self, tokens):
        self._prepare(tokens)
        return self._step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="steps are recorded on a GPU")
def test_recorded_steps_are_the_steps_that_were_recorded():
    params = Psa(threshold=0.7, block=16)
    model = DecoderModel(tiny.weights("llama", layers=2, max_positions=2048).float().cuda())
    caches = prefilled(model, lengths=(700, 90, 1200))[0]
    recorded_kv, eager_kv = (PooledKV(caches, params, 0.25, room=20) for _ in range(2))
    decoder, plain = PooledDecoder(model, recorded_kv, params), Eager(model, eager_kv, params)
    unread = 0
    for at in range(20):
        logits, expected = decoder.decode(tokens_of(at)), plain.decode(tokens_of(at))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        for layer, (one, other) in enumerate(zip(decoder.reads, plain.reads, strict=True)):
            assert torch.equal(one.read, other.read)
            assert not at or torch.equal(one.missed, other.missed), "the first step is done while it is recorded"
            unread += int((one.read < recorded_kv.pool.ranked[layer][:, None]).sum())
    assert unread
    for name in ("slot_of", "block_of", "last_used", "slots"):
        assert torch.equal(getattr(recorded_kv.pool, name), getattr(eager_kv.pool, name)), name


def dense_decoders(kv, model, params):
    """Return a factory of each decoder that reads everything; the last one changes the pool."""
    return (
        lambda: StagedDecoder(model, kv),
        lambda: PooledDecoder(model, kv, None),
        lambda: PooledDecoder(model, kv, params),
    )


def check_dense_decoders(model, lengths, tolerance):
    """Run each decoder over the same KV, twice; the second round starts from a changed pool."""
    params = Psa(threshold=1.0, block=16)
    caches = prefilled(model, lengths=lengths)[0]
    kv = PooledKV(caches, params, 0.25, room=9)
    expected = []
    for at in range(8):
        requests = zip(caches, tokens_of(at), lengths, strict=True)
        expected.append(torch.cat(model.forward([append(c, [t], n + at) for c, t, n in requests])))
    for make in 2 * dense_decoders(kv, model, params):
        decoder = make()
        for at, logits in enumerate(expected):
            torch.testing.assert_close(decoder.decode(tokens_of(at)), logits, rtol=0, atol=tolerance)


def test_every_decoder_that_reads_everything_is_dense_decoding():
    check_dense_decoders(tiny.model(layers=3), (70, 9, 200), 1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies overlap only on a GPU")
def test_every_decoder_that_reads_everything_is_dense_decoding_on_a_gpu():
    model = DecoderModel(tiny.weights("llama", layers=3, max_positions=2048).float().cuda())
    check_dense_decoders(model, (700, 90, 1200), 1e-3)


def test_staged_decoding_refuses_a_changed_pool():
    """It does not copy blocks that lost their slots to PSA."""
    params, model = Psa(threshold=1.0, block=16), tiny.model(layers=2)
    kv = PooledKV(prefilled(model)[0], params, 0.25, room=4)
    staged, by_address, psa = (make() for make in dense_decoders(kv, model, params))
    staged.decode(tokens_of(0))
    by_address.decode(tokens_of(0))
    expected = staged.decode(tokens_of(1))
    psa.decode(tokens_of(0))
    with pytest.raises(ValueError, match="changed the pool"):
        staged.decode(tokens_of(2))
    torch.testing.assert_close(by_address.decode(tokens_of(1)), expected, rtol=0, atol=1e-10)
    kv.reset()
    assert bool(staged.decode(tokens_of(2)).isfinite().all())
