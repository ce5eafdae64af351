"""The engine with a pool of KV blocks answers as without one, and its reports say what the pool did."""

from __future__ import annotations

import random

import pytest
import torch

from ragkv.engine.batch import Batch
from ragkv.engine.crossover import MEASURED, key_tier
from ragkv.engine.generation import Sampling, Sequence
from ragkv.engine.policies import make_decode_policy
from ragkv.errors import ConfigError
from ragkv.model.execution.pooled_decode import PooledDecoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.model.profile import Profile
from ragkv.sparse.psa import Psa
from ragkv.types import AskOptions
from tests import tiny
from tests.engine.test_request import together
from tests.engine.test_session_manager import QUESTIONS, fill
from tests.quick import quick_engine
from tests.slots import check_slots

pytestmark = pytest.mark.usefixtures("one_thread")
SPARSE = "psa:least=0,part=0,threshold=0.6"
SLOT = 2048
"""Bytes of a block of 16 rows of one kv head of the quick model, in float64."""


def facts(answer):
    """What must not depend on the pool."""
    decoding = answer.report.decoding
    return answer.answer, answer.report.decode, decoding.steps, decoding.read, decoding.present, decoding.why_dense


@pytest.mark.parametrize(("spec", "slots"), [(SPARSE, 1), (SPARSE, 24), ("psa:threshold=1", 24), ("psa", 2000)])
def test_answers_and_what_they_read_are_those_without_a_pool(tmp_path, spec, slots):
    options = {"decode": spec, "max_tokens": 24, "method": "reuse", "top_k": 4}
    with (
        fill(quick_engine(tmp_path / "a")) as engine,
        fill(quick_engine(tmp_path / "b", pool_bytes=slots * SLOT)) as other,
    ):
        for question in QUESTIONS[:2]:
            alone, pooled = (each.answer(question, AskOptions(**options)) for each in (engine, other))
            assert facts(pooled) == facts(alone)
            assert alone.report.decoding.pool is None
            assert pooled.report.decoding.pool.read > 0
        check_slots(other.pooled_decoder.pool)


def test_a_conversation_over_the_pool_goes_on_as_without_one(tmp_path):
    """Its context returns to where the model computes, with the rows of the answer."""
    options = AskOptions(decode=SPARSE, max_tokens=20, conversation="talk", top_k=2)
    with (
        fill(quick_engine(tmp_path / "a")) as engine,
        fill(quick_engine(tmp_path / "b", pool_bytes=30 * SLOT)) as other,
    ):
        for question in (*QUESTIONS, *QUESTIONS[:2]):
            alone, pooled = (each.answer(question, options) for each in (engine, other))
            assert facts(pooled) == facts(alone)
            assert pooled.report.tokens == alone.report.tokens
        assert len(other.sessions.cache.sessions()) == 1


def test_requests_that_decode_together_share_the_pool_and_its_counters_are_the_sums_of_their_reports(tmp_path):
    asked = [(question, {"decode": SPARSE, "max_tokens": 12 + i}) for i, question in enumerate(QUESTIONS)]
    with (
        fill(quick_engine(tmp_path / "a")) as engine,
        fill(quick_engine(tmp_path / "b", pool_bytes=40 * SLOT)) as other,
    ):
        alone = [engine.answer(question, AskOptions(**options)) for question, options in asked]
        shared = together(other, asked)
        assert list(map(facts, shared)) == list(map(facts, alone))
        pool = other.health()["pool"]
        reports = [each.report.decoding.pool for each in shared]
        for name in ("read", "hits", "loaded"):
            assert pool[name] == sum(getattr(each, name) for each in reports)
        for each in reports:
            assert each.loaded_tokens == each.loaded * 16 / 4  # blocks of 16 tokens, 2 layers with 2 kv heads
            assert each.read - each.hits <= each.loaded
        assert (pool["slots"], pool["size"], pool["used"]) == (40, SLOT, 0)


def test_dense_answers_and_policies_of_other_blocks_leave_the_pool_alone(tmp_path):
    with fill(quick_engine(tmp_path, pool_bytes=40 * SLOT)) as engine:
        for spec in ("dense", "auto", "lfps", "psa:block=8", "psa:reach=all", "psa:dense=1"):
            assert engine.answer(QUESTIONS[0], AskOptions(decode=spec)).report.decoding.pool is None
        assert engine.health()["pool"]["read"] == 0


def test_an_answer_of_one_token_reads_nothing(tmp_path):
    with fill(quick_engine(tmp_path, pool_bytes=40 * SLOT)) as engine:
        decoding = engine.answer(QUESTIONS[0], AskOptions(decode=SPARSE, max_tokens=1)).report.decoding
    assert (decoding.steps, decoding.pool.read) == (0, 0)
    assert "no step" in decoding.why_dense


def test_a_pool_that_holds_no_block_is_refused_at_start(tmp_path):
    with pytest.raises(ConfigError, match="RAGKV_POOL_BYTES: 2047 bytes hold no block of 2048 bytes"):
        quick_engine(tmp_path, pool_bytes=SLOT - 1)


def test_without_the_setting_there_is_no_pool(tmp_path):
    with quick_engine(tmp_path) as engine:
        assert engine.pooled_decoder is None
        assert engine.health()["pool"] is None


def test_auto_decodes_long_contexts_over_the_pool_where_a_gpu_has_one():
    gpu = torch.device("cuda")
    assert [key_tier(gpu), key_tier(gpu, True), key_tier(torch.device("cpu"), True)] == ["gpu", "host", "cpu"]
    policy = make_decode_policy("auto", Profile(), key_tier(gpu, True))
    assert policy.name == "psa"
    assert not policy.why_dense(MEASURED.host_keys)
    assert policy.why_dense(MEASURED.host_keys - 1)
    assert make_decode_policy("auto", Profile(), key_tier(gpu)).why_dense(10**6)


def test_with_a_pool_on_a_gpu_long_contexts_are_decoded_from_the_host(tmp_path, monkeypatch):
    """Nothing computes on a GPU here: only what `auto` is told differs."""
    gpu = torch.device("cuda")
    monkeypatch.setattr("ragkv.engine.assembly.key_tier", lambda _, pool=False: key_tier(gpu, pool))
    with fill(quick_engine(tmp_path, pool_bytes=40 * SLOT)) as engine:
        options = engine.prefill(QUESTIONS[0]).prefill_options
    assert options.decode_policy.tier == "host"


# A batch


PARAMS = Psa(threshold=0.6, block=8, micro=2, part=0.5)


@pytest.fixture(scope="module")
def model():
    return tiny.model(layers=2)


def ask(model, seed, decoder, longest=9):
    """A prefilled request of 5 to 124 tokens, over the pool or over its own cache; the same for the same seed."""
    length = 5 + 17 * seed % 120
    cache, state = ContextCache(model.shape, 8, model.dtype), PARAMS.start()
    logits = model.forward([append(cache, tiny.tokens(length, seed), 0, attention=state)])[0][-1]
    pooled = None if decoder is None else decoder.open(cache, PARAMS, longest)
    return Sequence(cache, logits, length, Sampling(longest), None if pooled else state, pooled=pooled)


def until_ended(batch):
    return [event for _ in range(500) if batch.busy for event in batch.step() if event.ended]


@pytest.mark.parametrize("slots", [3, 40, 400])
def test_a_batch_over_the_pool_says_what_each_request_says_alone(model, slots):
    """They come, end and are cancelled, and those that are decoded otherwise run beside them."""
    dice, decoder = random.Random(slots), PooledDecoder(model, PARAMS, slots * 1024)
    batch, runs, most, freed = Batch(model, limit=5), {}, 0, 0
    for seed in range(24):
        run = ask(model, seed, None if seed % 5 == 4 else decoder, 1 + seed % 9)
        runs[batch.join(run)] = (seed, run)
        for _ in range(dice.randrange(3)):
            batch.step()
            most = max(most, decoder.pool.joined)
            assert decoder.pool.reserved <= decoder.pool.slots or decoder.pool.joined == 1
            check_slots(decoder.pool)
        if seed % 3 == 0:
            before = decoder.pool.joined
            gone = next((id for id in runs if batch.cancel(id)), None)  # the first that has not ended: it runs
            runs.pop(gone, None)
            freed += before - decoder.pool.joined
    until_ended(batch)
    for seed, run in runs.values():
        alone = Batch(model)
        alone.join(other := ask(model, seed, None, 1 + seed % 9))
        until_ended(alone)
        assert run.tokens == other.tokens
    assert (decoder.pool.joined, decoder.pool.use().used) == (0, 0)
    assert slots == 3 or (most > 1 and freed > 0), "requests decoded together, and some were cancelled meanwhile"


def test_a_request_waits_until_the_blocks_of_its_steps_fit(model):
    """Two requests of 124 tokens need 32 slots each, and a third of 22 tokens does not overtake the second."""
    decoder = PooledDecoder(model, PARAMS, 40 * 1024)
    batch = Batch(model, limit=4)
    for seed, longest in ((7, 3), (7, 3), (1, 3)):
        batch.join(ask(model, seed, decoder, longest))
    steps = [{event.id for event in batch.step()} for _ in range(6)]
    assert steps[:3] == [{0}] * 3
    assert 1 in steps[3]
    assert not batch.busy


def test_a_request_that_cannot_join_ends_alone(model, monkeypatch):
    decoder = PooledDecoder(model, PARAMS, 400 * 1024)
    batch, failing = Batch(model), ask(model, 2, decoder)
    ids = [batch.join(each) for each in (ask(model, 1, decoder), failing, ask(model, 3, decoder))]

    def full(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(failing.cache, "move", full)
    endings = {event.id: event.ended for event in until_ended(batch)}
    assert endings[ids[1]] == "failed"
    assert {endings[ids[0]], endings[ids[2]]} <= {"stop", "length"}
    assert decoder.pool.joined == 0
    check_slots(decoder.pool)


def test_a_step_that_fails_frees_all_places(model, monkeypatch):
    decoder = PooledDecoder(model, PARAMS, 400 * 1024)
    batch = Batch(model)
    for seed in (1, 2):
        batch.join(ask(model, seed, decoder))
    batch.step()

    def fault(*_):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "attend", fault)
        endings = {event.id: event.ended for event in batch.step()}
    assert set(endings.values()) == {"failed"}
    assert (decoder.pool.joined, decoder.pool.use().used) == (0, 0)
    batch.join(again := ask(model, 3, decoder))
    until_ended(batch)
    alone = Batch(model)
    alone.join(other := ask(model, 3, None))
    until_ended(alone)
    assert again.tokens == other.tokens
