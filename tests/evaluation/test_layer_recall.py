"""Recall: the answer's blocks in every layer, and the share of layers that have them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragkv.engine.prefill import Prefiller
from ragkv.evaluation.quality import QualityParams, _Asker
from ragkv.evaluation.sets import GoldSpan, QuestionSet, SetQuestion
from ragkv.model.decoder import DecoderModel
from ragkv.recompute.base import Blocks, Plan

TEXT = "one two three four five six seven eight nine ten eleven twelve " * 8


@pytest.mark.parametrize(
    ("kept", "share"),
    [((True, True), 1.0), ((True, False), 0.5), ((False, False), 0.0)],
)
def test_an_answer_in_one_of_two_layers_is_found_in_half_of_them(
    model: DecoderModel, kept: tuple[bool, bool], share: float
) -> None:
    question = SetQuestion("?", ("x",), "one", GoldSpan(0, 0, len(TEXT)))
    asker = _Asker(
        Prefiller(model, model.prompt.prefix), QuestionSet((("t", TEXT),), (question,)), ("reuse",), QualityParams()
    )
    blocks: Blocks = tuple(range(asker._sources[0].piece.blocks))
    plan = Plan(tuple((blocks if whole else blocks[:-2],) for whole in kept), (((),),) * 2, (((),),) * 2)
    assert len(blocks) > 4
    assert asker._layer_recall(question, plan) == share
    assert asker._layer_recall(replace(question, span=None), plan) == 1.0
