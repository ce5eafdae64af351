"""Which database a test of the catalogue needs."""

from __future__ import annotations

import pytest

on_sqlite = pytest.mark.parametrize("catalog_address", ["sqlite"], indirect=True)
"""For a test of what only SQLite has. Tests with the fixture `catalog_address` run with both databases otherwise."""
