"""What the documents say is so: settings, commands, the body of `answer`, names in the architecture."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

from ragkv.cli import app
from ragkv.config import Settings
from ragkv.engine.methods import METHOD_NAMES


def test_the_readme_shows_how_a_question_is_answered_as_it_is(root):
    source = (root / "ragkv" / "engine.py").read_text()
    methods = [
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name in ("begin", "finish")
    ]
    bodies = [source.splitlines()[n.body[1].lineno - 1 : n.end_lineno] for n in methods]  # without their docstrings
    shown = re.findall(r"```python\n(.*?)\n```", (root / "README.md").read_text(), re.S)
    assert shown == [textwrap.dedent("\n".join(body)) for body in bodies]


def test_the_readme_names_every_setting(root):
    readme = (root / "README.md").read_text()
    missing = [name for name in Settings.model_fields if f"RAGKV_{name.upper()}" not in readme]
    assert not missing


def test_the_readme_and_the_architecture_name_every_command_and_method(root):
    both = (root / "README.md").read_text() + (root / "docs" / "architecture.md").read_text()
    commands = [command.name for command in app.registered_commands]
    assert not [name for name in (*commands, *METHOD_NAMES) if name not in both]


def test_every_fault_is_followed_by_tests_that_exist(root: Path):
    text = (root / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*$", text, re.M)
    assert rows == [str(number) for number in range(1, len(rows) + 1)]
    assert len(rows) >= 23
    assert all("`tests/" in row for row in re.findall(r"^\| \d+ \|.*$", text, re.M))
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        functions = {n.name for n in ast.walk(ast.parse((root / path).read_text())) if isinstance(n, ast.FunctionDef)}
        assert name in functions, f"{path}::{name}"


DOCUMENTS = [
    "README.md",
    "docs/api.md",
    "docs/architecture.md",
    "docs/faults.md",
    "docs/lab-notes.md",
    "docs/operations.md",
    "docs/results/decode.md",
    "docs/results/gpu.md",
    "docs/results/lmcache.md",
    "models/demo/README.md",
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_named_files_exist(root, document):
    text = re.sub(r"```.*?```", "", (root / document).read_text(), flags=re.S)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert ((root / document).parent / target).exists(), target
    for name in re.findall(r"`((?:ragkv|api|ingest|tests|docs|models)/[\w./]+\.\w+)`", text):
        assert (root / name).exists(), name


def test_the_functions_the_architecture_follows_exist(root: Path):
    text = (root / "docs" / "architecture.md").read_text()
    sources = "\n".join(path.read_text() for room in ("ragkv", "ingest", "api") for path in (root / room).rglob("*.py"))
    named = re.findall(r"`(?:[a-z_]+\.)*([A-Z]\w+)\.(_?[a-z]\w+)`", text)
    assert len(named) > 10
    for kind, method in named:
        assert f"class {kind}" in sources, kind
        assert f"def {method}(" in sources or f"{method}:" in sources, f"{kind}.{method}"
