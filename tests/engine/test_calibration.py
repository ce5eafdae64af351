"""Calibration on the bundled model, on less data than `ragkv calibrate` takes."""

import copy
from dataclasses import replace

import pytest
import torch

from ragkv.engine.calibration import CalibrationParams, CalibrationTrial, calibrate, pick_heads, recall, stable_layers


@pytest.mark.timeout(300)
def test_a_few_heads_find_most_answers_of_the_bundled_model(model):
    seen = []
    params = CalibrationParams(sets=1, documents=3, questions=8, tokens=200, heads=2)
    found = calibrate(model, params, lambda what, done, total: seen.append((what, done, total)))
    assert 1 <= len(found.profile.retrieval_heads) <= 2
    assert all(0 <= layer < 12 and 0 <= head < 6 for layer, head in found.profile.retrieval_heads)
    assert found.recall[-1] >= 0.7
    assert found.profile.block == model.profile.block == params.block
    assert found.profile.stable_layers[-1] == 11
    assert seen[-1] == ("asking", 8, 8)


def test_calibration_changes_the_block_size(model):
    given = CalibrationParams(sets=1, documents=2, questions=2, tokens=90, heads=1)
    model = copy.copy(model)
    model.profile = replace(model.profile, block=64)
    assert calibrate(model, given, lambda *_: None).profile.block == 16
    assert calibrate(model, replace(given, block=0), lambda *_: None).profile.block == 64
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
