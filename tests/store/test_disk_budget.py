"""The size limit of a folder: what is removed first, and what counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ragkv.errors import StoreFull
from ragkv.store.disk_budget import DiskBudget


def put(root: Path, name: str, size: int, used: float, changed: float = 100.0) -> Path:
    path = root / "aa" / f"{name}.kv"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (used, changed))
    return path


def never(changed: float) -> bool:
    return False


def test_the_least_recently_used_files_are_removed_first(tmp_path: Path) -> None:
    files = [put(tmp_path, name, 100, used) for name, used in (("new", 300.0), ("old", 200.0), ("newer", 400.0))]
    with DiskBudget(tmp_path, 350, never).reserve(100, tmp_path / "aa" / "x.kv"):
        pass
    assert [file.exists() for file in files] == [True, False, True]


def test_expired_files_are_removed_before_others(tmp_path: Path) -> None:
    old, expired = put(tmp_path, "old", 100, 200.0), put(tmp_path, "expired", 100, 400.0, changed=50.0)
    with DiskBudget(tmp_path, 250, lambda changed: changed < 100).reserve(100, tmp_path / "aa" / "x.kv"):
        pass
    assert (old.exists(), expired.exists()) == (True, False)


def test_a_file_that_is_being_written_counts(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path, 160, never)
    with (
        budget.reserve(100, tmp_path / "aa" / "x.kv"),
        pytest.raises(StoreFull, match="nothing more can be removed"),
        budget.reserve(100, tmp_path / "aa" / "y.kv"),
    ):
        pass
    with budget.reserve(100, tmp_path / "aa" / "y.kv"):  # x was never written, and its room is free again
        pass


def test_a_file_that_is_replaced_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    replaced, other = put(tmp_path, "x", 100, 100.0), put(tmp_path, "y", 100, 200.0)
    with DiskBudget(tmp_path, 210, never).reserve(100, replaced):
        assert replaced.exists()
        assert other.exists()


def test_a_file_over_the_limit_is_refused_and_nothing_is_removed(tmp_path: Path) -> None:
    other = put(tmp_path, "y", 100, 200.0)
    with pytest.raises(StoreFull, match="RAGKV_STORE_BYTES"), DiskBudget(tmp_path, 150, never).reserve(151, other):
        pass
    assert other.exists()
