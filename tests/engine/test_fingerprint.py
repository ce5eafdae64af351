"""The fingerprint: each fact that makes stored KV valid changes it, and nothing else does."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from ragkv.engine.fingerprint import fingerprint, keep_stored_block
from ragkv.engine.prefill import Prefiller
from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import Profile
from ragkv.sparse.critiprefill import CritiPrefill
from tests import tiny
from tests.quick import quick_model

FACTS = ("shared", "exact", "xxh3", None)


def model_with(**fields: object) -> DecoderModel:
    """Return a quick model with other fields of its profile."""
    model = copy.copy(quick_model())
    model.__dict__.pop("prompt", None)  # it was made from the other profile
    model.profile = replace(model.profile, **fields)
    return model


@pytest.mark.parametrize(
    "facts",
    [
        ("isolated", "exact", "xxh3", None),
        ("shared", "int8", "xxh3", None),
        ("shared", "exact", "hmac 00", None),
        ("shared", "exact", "xxh3", CritiPrefill()),
        ("shared", "exact", "xxh3", CritiPrefill(budget=512)),
    ],
)
def test_how_chunks_are_encoded_and_stored_changes_it(facts: tuple[str, str, str, None]) -> None:
    assert fingerprint(model_with(), *facts) != fingerprint(model_with(), *FACTS)


def test_one_ingest_policy_is_not_another() -> None:
    small, large = (fingerprint(model_with(), "shared", "exact", "xxh3", CritiPrefill(budget=b)) for b in (512, 1024))
    assert small != large


@pytest.mark.parametrize(
    ("field", "value"),
    {
        "block": 32,
        "local": 1,
        "prefix": "Read this: ",
        "chunk": "{title}: {text}",
        "retrieval_heads": ((0, 1),),
        "importance_axis": "distance",
        "importance_constant": "origin",
        "key_means": "rotated",
    }.items(),
)
def test_what_a_profile_says_of_stored_kv_changes_it(field: str, value: object) -> None:
    assert fingerprint(model_with(**{field: value}), *FACTS) != fingerprint(model_with(), *FACTS)


def test_other_weights_change_it() -> None:
    model = model_with()
    model.weights_hash = "other weights"
    assert fingerprint(model, *FACTS) != fingerprint(model_with(), *FACTS)


def test_kv_of_an_earlier_release_is_read_in_its_own_blocks() -> None:
    stored = fingerprint(model_with(block=64, retrieval_heads=()), *FACTS)
    model = model_with(block=16, retrieval_heads=())
    keep_stored_block(model, stored, *FACTS)
    assert (model.profile.block, fingerprint(model, *FACTS)) == (64, stored)


@pytest.mark.parametrize("stored", [None, "another model"])
def test_where_none_is_stored_blocks_have_their_present_size(stored: str | None) -> None:
    model = model_with(block=16, retrieval_heads=())
    keep_stored_block(model, stored, *FACTS)
    assert model.profile.block == 16


def test_a_calibrated_model_keeps_the_blocks_of_its_profile() -> None:
    heads = ((0, 1),)
    stored = fingerprint(model_with(block=64, retrieval_heads=heads), *FACTS)
    model = model_with(block=16, retrieval_heads=heads)
    keep_stored_block(model, stored, *FACTS)
    assert model.profile.block == 16


def test_what_only_decoding_uses_does_not_change_it() -> None:
    other = model_with(decode_part=0.5, stable_layers=(0,), initial=2)
    assert fingerprint(other, *FACTS) == fingerprint(model_with(), *FACTS)


@pytest.mark.parametrize("other", [{"importance_axis": "distance"}, {"importance_constant": "common"}])
def test_the_power_law_of_the_profile_reaches_the_digest(other: dict[str, str]) -> None:
    alphas = []
    for law in ({}, other):
        profile = Profile(block=4, stable_layers=(2, 3), **law)  # type: ignore[arg-type]
        alphas.append(Prefiller(tiny.model(profile=profile), tiny.tokens(3)).encode(tiny.tokens(40)).digest.alpha)
    assert (alphas[0] - alphas[1])[:, :5].abs().max() > 0.1


def test_an_unknown_power_law_is_refused() -> None:
    with pytest.raises(ValueError, match="importance_constant 'mine': choose one of free, common, origin"):
        Profile(importance_constant="mine")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="importance_axis 'time': choose one of row, distance"):
        Profile(importance_axis="time")  # type: ignore[arg-type]
