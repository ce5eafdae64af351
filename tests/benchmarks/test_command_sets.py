"""The questions that `ragkv bench decode` and `bench prefill` ask, by their options."""

from __future__ import annotations

import json

import pytest
import typer

from benchmarks.commands.sets import SetOptions, named_sets
from ragkv.cli import run


def write(path, questions):
    """Write a LongBench file of short contexts."""
    context = "".join(
        f"Passage {n}:\nHouse {n}\nHouse {n} belongs to {who}.\n\n" for n, who in enumerate(("Ada", "Bert"), 1)
    )
    lines = [{"input": f"Who owns house {n}?", "context": context, "answers": [who]} for n, who in questions]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_files_generated_sets_and_else_the_held_out_sets_are_asked(tmp_path, model):
    houses, more = write(tmp_path / "houses.jsonl", [(1, "Ada")]), write(tmp_path / "more.jsonl", [(2, "Bert")] * 2)
    files = named_sets(model, SetOptions(longbench=(houses, more)))
    assert {name: [one.questions[0].gold for one in asked] for name, asked in files.items()} == {
        "houses": [("Ada",)],
        "more": [("Bert",), ("Bert",)],
    }
    made = named_sets(model, SetOptions(seed=101, chunks=3, sets=2, questions=4))
    ((name, sets),) = made.items()
    assert name == "needles of seed 101, 3 chunks"
    assert [(len(each.chunks), len(each.questions)) for each in sets] == [(3, 4), (3, 4)]
    assert named_sets(model, SetOptions(seed=102, chunks=3, sets=1, questions=4)) != {name: sets[:1]}
    assert "natural, 8 chunks" in named_sets(model, SetOptions())


@pytest.mark.parametrize(("given", "message"), [({"seed": 1}, "not both"), ({}, "")])
def test_seed_and_files_exclude_each_other_and_name_questions(tmp_path, given, message):
    options = {"longbench": (tmp_path / "a.jsonl",), **given}
    if message:
        with pytest.raises(typer.BadParameter, match=message):
            SetOptions(**options)
    else:
        assert SetOptions(**options).named
        assert SetOptions(seed=0).named
        assert not SetOptions().named
    with pytest.raises(typer.BadParameter, match="--longbench"):
        SetOptions(fit=True)


@pytest.mark.parametrize(("command", "policy"), [("decode", "psa"), ("prefill", "critiprefill")])
def test_the_commands_ask_the_questions_of_a_longbench_file(tmp_path, capsys, command, policy):
    file, figures = write(tmp_path / "houses.jsonl", [(1, "Ada")]), tmp_path / "figures.json"
    asked = ["--longbench", str(file), "--max-tokens", "4", "--policy", policy, "--json", str(figures)]
    assert run(["bench", command, *asked]) == 0
    found = json.loads(figures.read_text())
    assert set(found) == {"quality"}, "no times where answers are asked for"
    ((name, rows),) = found["quality"].items()
    assert (name, [row["questions"] for row in rows]) == ("houses", [1, 1])
    assert policy in capsys.readouterr().out
    file.write_text("{}\n")
    assert run(["bench", command, *asked]) == 1
    assert "houses.jsonl:1" in capsys.readouterr().err
