"""Asking for a prefill policy by name, and what the profile gives it."""

import pytest

from ragkv.engine.crossover import MEASURED
from ragkv.engine.policies import DECODES, PREFILLS, check_prefill_policy, make_decode_policy, make_prefill_policy
from ragkv.errors import InputError
from ragkv.model.profile import Profile
from ragkv.sparse.critiprefill import CritiPrefill
from ragkv.sparse.loopserve import LoopServe
from ragkv.sparse.psa import Psa
from ragkv.sparse.reselect import LoopServeDecode
from tests import tiny

LONG = Profile(block=4, initial=1, local=2, stable_layers=(2, 3), segment=8, prefill_block=2, budget=16)


@pytest.fixture(scope="module")
def model():
    return tiny.model(profile=LONG)


def test_dense_is_no_policy(model):
    assert make_prefill_policy("dense", model.profile) is None


def test_a_bare_name_takes_the_sizes_of_the_models_profile_and_acts_whatever_the_size(model):
    assert make_prefill_policy("critiprefill", model.profile) == CritiPrefill(segment=8, block=2, budget=16)
    assert make_prefill_policy("loopserve", model.profile) == LoopServe()
    for name in PREFILLS:
        assert not make_prefill_policy(name, model.profile).why_dense(2, 10)
    for name in DECODES:
        assert not make_decode_policy(name, model.profile).why_dense(10)


def test_fields_can_be_set(model):
    assert make_prefill_policy("critiprefill:budget=64,fusion=0.5", model.profile) == CritiPrefill(8, 2, 64, 0.5)
    assert make_prefill_policy("loopserve:alpha=0.995,threshold=7", model.profile) == LoopServe(
        alpha=0.995, threshold=7
    )


def test_a_number_of_keys_that_is_not_asked_for_covers_half_of_a_short_context(model):
    assert make_decode_policy("psa", model.profile) == Psa(block=16, least=32, part=0.25, most=0.5)
    assert make_decode_policy("psa:least=9", model.profile) == Psa(block=16, least=9, part=0.25)
    assert make_decode_policy("loopserve", model.profile) == LoopServeDecode(most=0.5)
    assert make_decode_policy("loopserve:budget=9", model.profile) == LoopServeDecode(budget=9)


def test_auto_prefills_densely_at_every_size(model):
    reading = make_prefill_policy("auto", model.profile)
    assert all(reading.why_dense(size, size).startswith("auto: no policy was measured") for size in (1, 10**6))


def test_auto_decodes_densely_below_the_measured_crossovers(model):
    decoding = make_decode_policy("auto", model.profile)
    assert decoding.why_dense(MEASURED.cpu_keys - 1).startswith("auto: 65535 keys a layer; lfps was measured")
    assert not decoding.why_dense(MEASURED.cpu_keys)
    assert decoding.start().name == "lfps"
    assert "GPU holds all keys" in make_decode_policy("auto", model.profile, "gpu").why_dense(10**6)
    behind = make_decode_policy("auto", model.profile, "host")
    assert behind.why_dense(MEASURED.host_keys - 1)
    assert not behind.why_dense(MEASURED.host_keys)
    assert behind.start().name == "psa"


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            "minference",
            "does not exist; choose one of auto, dense, critiprefill, loopserve",
        ),
        ("dense:budget=3", "prefill policy dense has no fields to set"),
        ("critiprefill:alpha=1", "has no field 'alpha'"),
        ("critiprefill:budget=much", "budget is a whole number, not 'much'"),
        ("critiprefill:budget=1", "budget at least a block"),
        ("loopserve:alpha=2", "alpha and dense must be above 0"),
    ],
)
def test_what_means_nothing_is_told(model, spec, told):
    with pytest.raises(InputError, match=told):
        make_prefill_policy(spec, model.profile)


@pytest.mark.parametrize("name", ["auto", "dense", *PREFILLS])
def test_every_name_can_be_checked_without_a_model(name):
    assert check_prefill_policy(name) == name
