"""How much there is to hold in the head: each count may fall and never rise (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ragkv.cli import app
from ragkv.config import Settings

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("ragkv", "api", "ingest")


def files_past_300_lines() -> int:
    files = (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))
    return sum(len(path.read_text("utf-8").splitlines()) > 300 for path in files)


def modules_that_the_engine_imports() -> int:
    tree = ast.parse((ROOT / "ragkv" / "engine" / "engine.py").read_text("utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return sum(module is not None and module.startswith("ragkv") for module in modules)


def options(command: Any, below: str = "") -> dict[str, int]:
    """Options of each command, by its words."""
    if hasattr(command, "commands"):  # a group; typer has its own classes for click's
        found = [options(each, f"{below} {name}".strip()) for name, each in command.commands.items()]
        return {name: count for each in found for name, count in each.items()}
    return {below: sum(parameter.param_type_name == "option" for parameter in command.params)}


@pytest.mark.parametrize(
    ("count", "most"),
    [
        (files_past_300_lines, 10),
        (modules_that_the_engine_imports, 15),
        (lambda: len(Settings.model_fields), 70),
        (lambda: sum(options(get_command(app)).values()), 126),
    ],
    ids=["files past 300 lines", "modules that engine.py imports", "settings", "options"],
)
def test_there_is_not_more_of_it(count: Callable[[], int], most: int) -> None:
    assert count() <= most


def test_the_counts_count() -> None:
    assert modules_that_the_engine_imports() > 5
    assert options(get_command(app))["doctor"] > 2
