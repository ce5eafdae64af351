"""The bench of speculation: its three cases, and the command that writes them."""

import json

import pytest

from benchmarks.shapes import random_tokens
from benchmarks.speculation import CASES, SpeculationParams, grid, measure
from ragkv.cli import run
from ragkv.errors import InputError
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def rows():
    params = SpeculationParams((200, 210), steps=24, rounds=2)
    return measure(tiny.model(layers=2), params, lambda *_: None, random_tokens)


def test_every_length_has_every_case_and_says_what_it_says_without_drafts(rows):
    assert [(row.length, row.case) for row in rows] == [(length, case) for length in (200, 210) for case in CASES]
    assert all(row.same == row.tokens == 24 for row in rows)
    assert all(row.plain > 0 and row.rate > 0 and row.ratio > 0 for row in rows)
    assert grid(rows).rows[0][:2] == ("200", "quoted")


def test_the_extremes_accept_everything_and_nothing(rows):
    by_case = {case: [row for row in rows if row.case == case] for case in CASES}
    for row in by_case["accepted"]:
        assert row.accepted == row.drafted > 8
        assert row.passes == 23 - row.accepted
    for row in by_case["rejected"]:
        assert (row.accepted, row.passes) == (0, 23)
        assert row.drafted > 0


@pytest.mark.parametrize("params", [SpeculationParams((191,)), SpeculationParams((500,))])
def test_what_cannot_be_measured_is_refused(params):
    with pytest.raises(InputError, match="tokens of context and answer"):
        measure(tiny.model(layers=2), params, lambda *_: None, random_tokens)


def test_the_command_writes_table_and_figures(tmp_path):
    table, file = tmp_path / "table.md", tmp_path / "figures.json"
    command = "bench decode --speculation --shape tiny --layers 1 --length 200 --steps 12 --device cpu"
    assert run([*command.split(), "--table", str(table), "--json", str(file)]) == 0
    assert [row["case"] for row in json.loads(file.read_text())["speculation"]] == list(CASES)
    assert "answers of 12 tokens with and without drafts" in table.read_text()
    assert run(["bench", "decode", "--speculation"]) != 0
    assert run([*command.split(), "--policy", "psa"]) != 0
