"""Dialogues about generated documents with the bundled model, turn by turn and after one prefill."""

from __future__ import annotations

import json

import pytest

from benchmarks.dialogues import PLACES, DialogueParams, figures, fill, hold
from benchmarks.stages import Stages
from ragkv.cli import run
from tests.libraries import open_engine


@pytest.mark.timeout(600)
def test_turns_in_full_are_answered_as_after_one_dense_prefill_and_cost_little(tmp_path, model, embedder):
    params = DialogueParams(dialogues=3, each=3, chunks=4, chunk_tokens=160)
    with open_engine(tmp_path, model, embedder, chunk_tokens=160) as engine:
        dialogues = fill(engine, params, lambda *_: None)
        turns = [turn for dialogue in dialogues for turn in dialogue.turns]
        assert [turn.place for turn in turns] == [
            ("beginning", "middle", "end")[(i // 3 + i % 3) % 3] for i in range(9)
        ]
        for turn in turns:
            at = turn.text.index("?") / len(turn.text)
            assert {"beginning": at < 0.6, "middle": 0.3 < at < 0.9, "end": at > 0.9}[turn.place], turn
        held = hold(engine, dialogues, Stages("full"), params, lambda *_: None)
        found = figures(Stages("full"), held)
        assert (found.dialogues, found.turns) == (3, 9)
        by_place = [[o.right for each in held for o in each.outcomes if o.place == place] for place in PLACES]
        assert found.em == tuple(sum(flags) / 3 for flags in by_place)
        assert (found.right, found.pairs, found.keys) == (sum(map(sum, by_place)), 1.0, 1.0)
        assert (found.agree, found.whole) == (9, 3)
        assert found.share <= 0.25
        assert found.prefilled[0] > 4 * max(found.prefilled[1:])
        assert found.over > found.prefilled[0]
        with engine.catalog.read() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM turns").fetchone() == (0,)


@pytest.mark.timeout(600)
def test_the_command_prints_what_the_policies_of_a_conversation_read(tmp_path, capsys):
    file = tmp_path / "figures.json"
    asked = ["--dialogues", "1", "--chunks", "2", "--chunk-tokens", "200", "--method", "full", "--json", str(file)]
    asked += ["--prefill", "loopserve:alpha=0.5", "--decode", "loopserve:budget=8"]
    assert run(["bench", "dialogues", *asked]) == 0
    (row,) = json.loads(file.read_text())
    assert (row["method"], row["dialogues"], row["turns"]) == ("full", 1, 3)
    assert (row["prefill"], row["decode"]) == ("loopserve:alpha=0.5", "loopserve:budget=8")
    assert row["pairs"] < 0.9
    assert row["keys"] < 0.95, "the lines of the prefills are read from the first token on"
    printed = capsys.readouterr().out
    assert "EM, beginning" in printed
    assert "loopserve:alpha=0.5" in printed
