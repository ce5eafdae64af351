"""Calibration on the bundled model, on less data than `ragkv calibrate` takes."""

import copy
from dataclasses import replace

import pytest
import torch

from ragkv.engine.calibration import (
    CalibrationQuestion,
    CalibrationSet,
    NeedleSetParams,
    calibrate,
    needle_sets,
    run_trials,
)
from ragkv.engine.head_choice import (
    CalibrationParams,
    CalibrationTrial,
    pick_heads,
    recall,
    smallest_cap,
    stable_layers,
)
from ragkv.engine.prefill import Prefiller
from ragkv.engine.registry import make_method
from ragkv.errors import InputError
from ragkv.model.decoder import DecoderModel
from tests import families


def quiet(what, done, total):
    """Show no progress."""


@pytest.mark.timeout(600)
def test_a_few_heads_find_most_answers_of_the_bundled_model(model):
    seen = []
    sets = needle_sets(model, NeedleSetParams(sets=1, documents=3, questions=8, tokens=200))
    found = calibrate(model, sets, lambda *progress: seen.append(progress), CalibrationParams(heads=2))
    assert found.questions == 8
    assert 1 <= len(found.profile.retrieval_heads) <= 2
    assert all(0 <= layer < 12 and 0 <= head < 6 for layer, head in found.profile.retrieval_heads)
    assert found.recall[-1] >= 0.7
    assert found.profile.block == model.profile.block == CalibrationParams().block
    assert found.profile.stable_layers[-1] == 11
    assert seen[-1] == ("asking", 8, 8)


def test_calibration_changes_the_block_size(model):
    model = copy.copy(model)
    model.profile = replace(model.profile, block=64)
    sets = needle_sets(model, NeedleSetParams(sets=1, documents=2, questions=2, tokens=90))
    assert calibrate(model, sets, quiet, CalibrationParams(heads=1)).profile.block == 16
    assert calibrate(model, sets, quiet, CalibrationParams(heads=1, block=0)).profile.block == 64
    assert model.profile.block == 64, "the given model is not changed"


def trial(gold, *heads):
    """Return a trial of five blocks with one row of masses per head."""
    flags = torch.zeros(5, dtype=torch.bool)
    flags[list(gold)] = True
    return CalibrationTrial(torch.tensor(heads, dtype=torch.float32) + 0.01, flags)


def test_heads_are_picked_by_what_they_add():
    first, second = [1.0, 0, 0, 0, 0], [0, 1.0, 0, 0, 0]
    blind = [0, 0, 0.5, 0.5, 0.0]
    trials = [trial([0], first, blind, blind), trial([1], blind, second, blind)]
    params = CalibrationParams(heads=3, budgets=(0.2,))
    assert sorted(pick_heads(trials, params))[:2] == [0, 1]
    assert recall(trials, [2], 0.2, 0.5) == 0.0
    assert recall([trial([0, 1], [0.6, 0.4, 0, 0, 0])], [0], 0.2, 0.5) == 0.0, "half an answer is not found"
    assert recall([trial([0, 1], [0.6, 0.4, 0, 0, 0])], [0], 0.4, 0.5) == 1.0


def test_stable_layers_are_the_last_ones_that_score():
    assert stable_layers([0] * 16) == (14, 15)
    assert stable_layers([5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 5, 9, 1, 1]) == (11, 12, 13, 14, 15)


def test_needle_sets_name_the_place_of_every_answer(model):
    (found,) = needle_sets(model, NeedleSetParams(sets=1, documents=3, questions=6, tokens=120))
    whole = " ".join(text for _, text in found.chunks)
    for each in found.questions:
        answer = found.chunks[each.chunk][1][each.start : each.end]
        assert answer
        assert whole.count(answer) == 1


def test_a_further_reach_adds_blocks_and_takes_none_away(model):
    (asked,) = needle_sets(model, NeedleSetParams(sets=1, documents=2, questions=1, tokens=90))
    prefiller = Prefiller(model, model.prompt.prefix)
    chunks = [prefiller.encode(model.prompt.chunk(*chunk)) for chunk in asked.chunks]
    near, far = run_trials(prefiller, chunks, asked, asked.questions[0], (0, 16))
    assert torch.equal(near.gold, far.gold)
    assert near.gold.any()
    assert (far.masses >= near.masses - 1e-6).all()
    assert far.masses.sum() > near.masses.sum()


def test_reach_and_cap_are_chosen_and_scout_takes_them(model):
    sets = needle_sets(model, NeedleSetParams(sets=1, documents=3, questions=6, tokens=120))
    params = CalibrationParams(heads=2, reaches=(0, 8), caps=(0.02, 0.3, 1.0))
    found = calibrate(model, sets, quiet, params).profile
    assert found.scout_reach in (0, 8)
    assert found.scout_cap in (0.3, 1.0), "two hundredths of a few blocks hold few answers"
    taught = copy.copy(model)
    taught.profile = replace(found, scout_cap=0.3, scout_reach=4)
    scout = make_method("scout", taught)
    assert (scout.cap, scout.reach) == (0.3, 4)
    assert make_method("scout:cap=0.5", taught).cap == 0.5


def test_no_question_is_an_error_that_says_what_to_do(model):
    with pytest.raises(InputError, match="more or longer"):
        calibrate(model, [CalibrationSet((("Tea", "Tea grows."),), ())], quiet)


def test_a_question_is_measured_at_the_block_of_its_answer(model):
    text = "The lamp of Tarn is kept by Ada Brook. " * 6 + "The bridge is green."
    start = text.index("green")
    asked = CalibrationSet((("Lamp", text),), (CalibrationQuestion("What colour?", 0, start, start + 5),))
    prefiller = Prefiller(model, model.prompt.prefix)
    (trial,) = run_trials(
        prefiller, [prefiller.encode(model.prompt.chunk("Lamp", text))], asked, asked.questions[0], (8,)
    )
    assert trial.gold.nonzero().flatten().tolist() == [trial.gold.shape[0] - 1]


def test_the_cap_is_the_smallest_that_finds_as_many_answers():
    assert smallest_cap((0.1, 0.2, 0.3), (0.90, 0.985, 0.99)) == 0.2
    assert smallest_cap((0.1, 0.2, 0.3), (0.90, 0.95, 0.99)) == 0.3
    assert smallest_cap((0.2,), (0.4,)) == 0.2


def test_a_head_with_a_window_is_no_retrieval_head(model):
    weights = families.weights("gemma3_text", vocab_size=len(model.tokenizer), max_position_embeddings=4096)
    other = DecoderModel(weights, model.tokenizer, replace(model.profile, retrieval_heads=()), "gemma")
    sets = needle_sets(other, NeedleSetParams(sets=1, documents=3, questions=4, tokens=80))
    heads = calibrate(other, sets, lambda *far: None).profile.retrieval_heads
    assert heads
    assert {layer for layer, _ in heads} == {5}


def test_a_layer_with_less_than_half_of_the_best_score_is_not_stable():
    assert stable_layers([0] * 13 + [4, 3, 9]) == (14, 15)
    assert stable_layers([0] * 13 + [5, 3, 9]) == (13, 14, 15)
