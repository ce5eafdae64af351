"""The promise of scout, measured: 100 generated questions over 8 chunks, 4k tokens of context."""

import pytest

from ragkv.bench.quality import QualityParams, quality


@pytest.mark.timeout(600)
def test_scout_finds_the_answer_with_a_tenth_of_the_blocks(model):
    params = QualityParams(methods=("full", "samkv-fusion", "scout"))
    rows = {row.method: row for row in quality(model, params, lambda *_: None)}
    for row in rows.values():
        print(row)
    full, literal, scout = rows["full"], rows["samkv-fusion"], rows["scout"]
    assert scout.questions == 100
    assert scout.middle <= 0.10
    assert scout.recall >= 0.95
    assert scout.em >= full.em - 0.05
    assert scout.sequence < 0.25
    assert literal.sequence < full.sequence  # the literal method's figures stand beside it, with no promise on recall
