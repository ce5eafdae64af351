"""Dialogues about generated documents with the bundled model, turn by turn and after one prefill."""

from __future__ import annotations

import json

import pytest

from ragkv.bench.dialogues import PLACES, DialogueParams, figures, fill, hold
from ragkv.cli import run
from tests.libraries import open_engine


@pytest.mark.timeout(300)
def test_turns_in_full_are_answered_as_after_one_dense_prefill_and_cost_little(tmp_path, model, embedder):
    params = DialogueParams(dialogues=3, each=3, chunks=4, chunk_tokens=160)
    with open_engine(tmp_path, model, embedder, chunk_tokens=160) as engine:
        dialogues = fill(engine, params, lambda *_: None)
        texts = [text for dialogue in dialogues for text, _ in dialogue.turns]
        places = [("beginning", "middle", "end")[(i // 3 + i % 3) % 3] for i in range(9)]
        for text, place in zip(texts, places, strict=True):
            at = text.index("?") / len(text)
            assert {"beginning": at < 0.6, "middle": 0.3 < at < 0.9, "end": at > 0.9}[place], (text, place)
        assert set(places) == set(PLACES)
        held = hold(engine, dialogues, "full", params, lambda *_: None)
        found = figures("full", held)
        assert (found.dialogues, found.turns) == (3, 9)
        assert (found.agree, found.whole) == (9, 3)
        assert found.share <= 0.25
        assert found.prefilled[0] > 4 * max(found.prefilled[1:])
        assert found.over > found.prefilled[0]
        with engine.catalog.read() as connection:
            assert connection.execute("SELECT count(*) FROM turns").fetchone() == (0,)


@pytest.mark.timeout(300)
def test_the_command_prints_a_row_for_every_method(tmp_path, capsys):
    file = tmp_path / "figures.json"
    asked = ["--dialogues", "1", "--chunks", "2", "--chunk-tokens", "200", "--method", "full", "--json", str(file)]
    assert run(["bench", "dialogues", *asked]) == 0
    (row,) = json.loads(file.read_text())
    assert (row["method"], row["dialogues"], row["turns"], row["agree"]) == ("full", 1, 3, 3)
    printed = capsys.readouterr().out
    assert "full" in printed
    assert "3 of 3" in printed
