"""Every mutant applies to the tree as it is, changes code and names tests that exist. `make mutants` runs them."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.mutants.mutant import ROOT, Mutant, all_mutants, apply_patch, read_mutant

MUTANTS = all_mutants()
NEEDED = 37


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_patch_applies_and_leaves_code_that_parses(mutant: Mutant, tmp_path: Path) -> None:
    for name in mutant.files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert not apply_patch(mutant, tmp_path)
    for name in mutant.files:
        assert name.startswith("ragkv/"), "a mutant breaks the product, not its tests"
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
