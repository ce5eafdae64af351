"""Every mutant applies to the tree as it is, changes code and names tests that exist. `make mutants` runs them."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.mutants import __main__ as runner
from tests.mutants import mutant as mutant_module
from tests.mutants.mutant import ROOT, Mutant, Outcome, all_mutants, apply_patch, copied_tree, read_mutant, run_mutant

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches")

MUTANTS = all_mutants()
NEEDED = 37


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_patch_applies_and_leaves_code_that_parses(mutant: Mutant, tmp_path: Path) -> None:
    for name in mutant.files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert not apply_patch(mutant, tmp_path)
    for name in mutant.files:
        assert name.startswith(("ragkv/", "ingest/", "api/")), "a mutant breaks the product, not its tests"
        mutated = (tmp_path / name).read_text("utf-8")
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse((ROOT / name).read_text("utf-8")))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_of_a_mutant_exist(mutant: Mutant) -> None:
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file()
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not name or name.partition("[")[0] in functions


def test_there_are_enough_mutants_and_each_breaks_something_else() -> None:
    assert len(MUTANTS) >= NEEDED
    assert len({mutant.breaks for mutant in MUTANTS}) == len(MUTANTS)


def test_a_patch_without_its_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bare.patch").write_text("--- a/ragkv/types.py\n+++ b/ragkv/types.py\n")
    with pytest.raises(ValueError, match="Breaks"):
        read_mutant(tmp_path / "bare.patch")


def test_the_copied_tree_imports_what_a_patch_changes() -> None:
    with copied_tree() as tree:
        for folder in ("api", "ingest"):
            (tree / folder / "__init__.py").write_text("CHANGED = True\n")
            assert (tree / "ragkv" / folder / "__init__.py").read_text() == "CHANGED = True\n"


def test_a_patch_whose_code_is_gone_no_longer_applies(tmp_path: Path) -> None:
    mutant = MUTANTS[0]
    for name in mutant.files:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("pass\n")
    assert "patch does not apply" in apply_patch(mutant, tmp_path)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        (("killed", "killed"), 0),
        (("killed", "skipped"), 0),
        (("killed", "survived"), 1),
        (("no longer applies", "killed"), 1),
        (("broken",), 1),
    ],
)
def test_the_runner_fails_unless_every_mutant_that_can_run_is_killed(
    verdicts: tuple[str, ...], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = dict(zip((mutant.name for mutant in MUTANTS), verdicts, strict=False))
    monkeypatch.setattr(runner, "check_tests", lambda mutants: "")
    monkeypatch.setattr(runner, "choose_mutants", lambda names: MUTANTS[: len(verdicts)])
    monkeypatch.setattr(runner, "run_mutant", lambda mutant: Outcome(mutant, given[mutant.name], "a test"))
    assert runner.main([]) == status
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines[:-1]] == list(given)
    killed, skipped = verdicts.count("killed"), verdicts.count("skipped")
    assert lines[-1] == f"{killed} of {len(verdicts)} mutants killed, {skipped} skipped"


@pytest.mark.parametrize(
    ("status", "by", "verdict"),
    [
        (1, "tests/a.py::test_b", "killed"),
        (0, "7 passed in 1.00s", "survived"),
        (0, "7 passed, 2 skipped in 1.00s", "survived"),
        (0, "30 skipped in 1.00s", "skipped"),
        (4, "no tests ran in 1.00s", "broken"),
    ],
)
def test_a_verdict_is_what_the_tests_say(status: int, by: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant_module, "run_tests", lambda tree, tests: (status, by))
    assert run_mutant(MUTANTS[0]).verdict == verdict


def test_the_runner_fails_if_a_test_fails_without_a_mutant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "check_tests", lambda mutants: "tests/test_this.py::test_that")
    assert runner.main([]) == 1
    assert "tests/test_this.py::test_that" in capsys.readouterr().err


def test_mutants_are_chosen_by_a_part_of_their_name() -> None:
    names = [mutant.name for mutant in runner.choose_mutants(["lfps-", "samkv-no-filter"])]
    assert "samkv-no-filter" in names
    assert all(name.startswith("lfps-") for name in names if name != "samkv-no-filter")
    assert runner.main(["no such mutant"]) == 1
