"""A catalogue for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.catalog import Catalog, sqlite_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of the catalogue, where it is one."""
    return tmp_path / "data" / "catalog.sqlite"


@pytest.fixture
def catalog(catalog_address: Path | str) -> Iterator[Catalog]:
    """An empty catalogue, in each kind of database."""
    opened = Catalog.open(catalog_address)
    yield opened
    opened.close()


@pytest.fixture
def created_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this test create and migrate its catalogues, not copy an empty one (tests/made_once.py)."""
    create = sqlite_file.create_tables
    monkeypatch.setattr(sqlite_file, "create_tables", getattr(create, "__wrapped__", create))
