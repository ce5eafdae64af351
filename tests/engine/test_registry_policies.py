"""Asking for a prefill policy by name, and what the profile gives it."""

import pytest

from ragkv.engine.registry import PREFILLS, check_prefill_policy, make_prefill_policy
from ragkv.errors import InputError
from ragkv.model.profile import Profile
from ragkv.sparse.critiprefill import CritiPrefill
from ragkv.sparse.loopserve import LoopServe
from tests import tiny

LONG = Profile(block=4, initial=1, local=2, stable_layers=(2, 3), segment=8, prefill_block=2, budget=16, threshold=99)


@pytest.fixture(scope="module")
def model():
    return tiny.model(profile=LONG)


def test_dense_is_no_policy(model):
    assert make_prefill_policy("dense", model.profile) is None


def test_a_bare_name_takes_the_sizes_of_the_models_profile(model):
    assert make_prefill_policy("critiprefill", model.profile) == CritiPrefill(
        segment=8, block=2, budget=16, threshold=99
    )
    assert make_prefill_policy("loopserve", model.profile) == LoopServe(threshold=99)


def test_fields_can_be_set(model):
    assert make_prefill_policy("critiprefill:budget=64,fusion=0.5", model.profile) == CritiPrefill(
        8, 2, 64, 0.5, threshold=99
    )
    assert make_prefill_policy("loopserve:alpha=0.995,threshold=0", model.profile) == LoopServe(
        alpha=0.995, threshold=0
    )


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("minference", "prefill policy 'minference' does not exist; choose one of dense, critiprefill, loopserve"),
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


@pytest.mark.parametrize("name", ["dense", *PREFILLS])
def test_every_name_can_be_checked_without_a_model(name):
    assert check_prefill_policy(name) == name
