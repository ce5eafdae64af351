"""Answers of stitched requests under policies: within a point of dense ones, with the defaults of a bare name."""

from __future__ import annotations

import pytest

from benchmarks.stages import Stages, compare_stages, stage_grid
from ragkv.evaluation.sets import needle_sets


def test_bare_names_answer_needle_questions_within_a_point_of_dense(model):
    def length(text):
        return len(model.prompt.plain(text))

    policies = [
        Stages("scout", "critiprefill", "psa"),
        Stages("scout", "loopserve", "lfps"),
        Stages("full", "critiprefill"),
    ]
    # A full prefill takes ten times as long as a stitched one, so it gets fewer questions.
    stitched = compare_stages(model, needle_sets(1, 4, 480, 2, 210, length), policies[:2], lambda *_: None)
    whole = compare_stages(model, needle_sets(1, 6, 480, 1, 210, length), policies[2:], lambda *_: None)
    plain, sparse = [stitched[0], whole[0]], [*stitched[1:], *whole[1:]]
    assert [row.stages for row in plain] == [Stages("scout"), Stages("full")]
    assert [row.stages for row in sparse] == policies
    assert all(row.f1 >= 0.8 and row.pairs == row.keys == 1 for row in plain)
    for row in sparse:
        assert abs(row.delta) <= 0.01, row
    assert sparse[0].keys < 0.9
    assert sparse[1].keys < 0.3
    assert sparse[2].pairs < 1
    assert len(stage_grid([*stitched, *whole]).rows) == 5


def test_a_stage_that_does_not_exist_is_refused(model):
    from ragkv.errors import InputError

    sets = needle_sets(1, 2, 400, 1, 1, len)
    with pytest.raises(InputError, match="decode policy 'quest' does not exist"):
        compare_stages(model, sets, [Stages("scout", "dense", "quest")], lambda *_: None)
