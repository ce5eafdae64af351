"""Folders that are filled once for all workers of xdist, which are processes of their own."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> Path:
    """Return a folder that nobody changes.

    The first worker that needs the folder fills it; the others wait for that. Tests work with copies.

    Args:
        factory: Of the session.
        name: Of the folder.
        build: Fills the folder, which is not there yet.
    """
    own = factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, unfinished = shared / name, own / f"{name}.unfinished"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            build(unfinished)
            unfinished.rename(folder)
    return folder
