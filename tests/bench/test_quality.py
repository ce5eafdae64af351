"""The promise of scout, measured: 100 generated questions over 8 chunks, 4k tokens of context."""

import pytest

from ragkv.bench.quality import ask_all, rows
from ragkv.bench.sets import needle_sets


@pytest.mark.timeout(600)
def test_scout_finds_the_answer_with_a_tenth_of_the_blocks(model):
    sets = needle_sets(4, 8, model.profile.chunk_tokens - 32, 25, 1, lambda text: len(model.prompt.plain(text)))
    outcomes = ask_all(model, sets, ("full", "samkv-fusion", "scout"), lambda *_: None)
    by_method = {row.method: row for row in rows(outcomes)}
    for row in by_method.values():
        print(row)
    full, literal, scout = (by_method[name] for name in ("full", "samkv-fusion", "scout"))
    assert scout.questions == 100
    assert scout.middle <= 0.10
    assert scout.recall >= 0.95
    assert scout.em >= full.em - 0.05
    assert scout.sequence < 0.25
    assert literal.sequence < full.sequence  # the literal method's figures stand beside it, with no promise on recall
