"""A catalogue for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.catalog import Catalog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "catalog.sqlite"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    opened = Catalog.open(path)
    yield opened
    opened.close()
