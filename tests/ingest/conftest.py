"""A small disk, for filling up."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FILL = """
import os, sys
from pathlib import Path

class Ballast:
    def __init__(self, folder):
        self.path = Path(folder, "ballast")

    def fill(self, leaving=0):
        with self.path.open("ab", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                pass
        os.truncate(self.path, self.path.stat().st_size - leaving)

    def drop(self):
        self.path.unlink()
"""


@pytest.fixture
def on_a_small_disk(tmp_path: Path, root: Path) -> Callable[[str], str]:
    """Run a script with a disk of 24 MB as its argument and a Ballast to fill it; returns what it printed."""
    mount = tmp_path / "small"
    mount.mkdir()
    mounting = f"mount -t tmpfs -o size=24m tmpfs {mount}"
    if not shutil.which("unshare") or subprocess.run(["unshare", "-Urm", "sh", "-c", mounting], check=False).returncode:
        pytest.skip("this machine does not let a user mount a small disk")

    def run(script: str) -> str:
        command = [
            "unshare",
            "-Urm",
            "sh",
            "-c",
            f'{mounting} && exec "$0" -c "$1" {mount}',
            sys.executable,
            FILL + script,
        ]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
