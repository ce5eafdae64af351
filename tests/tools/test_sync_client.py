"""The synchronous client is what the tool makes of the asynchronous one."""

from __future__ import annotations

import ast

import pytest

from tools.sync_client import SOURCE, TARGET, synchronous


def test_the_synchronous_client_is_made_of_the_asynchronous_one() -> None:
    pytest.importorskip("ruff")
    assert TARGET.read_text("utf-8") == synchronous(SOURCE.read_text("utf-8")), "run `python -m tools.sync_client`"


def test_nothing_is_awaited_in_it() -> None:
    waits = (ast.Await, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith)
    tree = ast.parse(TARGET.read_text("utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, waits)]
    assert "asyn" not in TARGET.read_text("utf-8").partition('"""\n')[2]
