"""A service whose data folder is a small disk of its own: a program for `tests.program.served`, and a way to fill it.

The program mounts a tmpfs over its folder `data`, in a namespace that only it is in, and copies to it what lay there.
It ends when that is not allowed; `mounts_disks` says so before.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PROGRAM = """
import ctypes, os, shutil, sys
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
user, group = os.getuid(), os.getgid()

def succeed(result):
    if result:
        raise OSError(ctypes.get_errno(), "the small disk")

succeed(libc.unshare(0x10000000 | 0x00020000))  # CLONE_NEWUSER, CLONE_NEWNS
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"0 {user} 1")
Path("/proc/self/gid_map").write_text(f"0 {group} 1")
os.rename("data", "before")
os.mkdir("data")
succeed(libc.mount(b"tmpfs", os.path.abspath("data").encode(), b"tmpfs", 0, b"size=BYTES"))
shutil.copytree("before", "data", dirs_exist_ok=True)
if FULL:
    from tests.small_disk import Ballast
    Ballast(Path("data")).fill()
from ragkv.cli import run
sys.exit(run(["serve", "--port", "0"]))
"""


def on_a_small_disk(size: int, full: bool = False) -> tuple[str, str]:
    """The arguments of an interpreter that serves from a disk of so many bytes. full: it is filled before."""
    return "-c", PROGRAM.replace("BYTES", str(size)).replace("FULL", str(full))


def mounts_disks() -> bool:
    """Whether this machine lets a program mount a disk of its own."""
    command = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/tmp"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def disk_of(pid: int, folder: Path) -> Path:
    """The small disk, as seen from outside."""
    return Path(f"/proc/{pid}/root{folder}/data")


class Ballast:
    """A file that takes the room on a disk."""

    def __init__(self, disk: Path):
        self._path = disk / "ballast"

    def fill(self, leaving: int = 0) -> None:
        """Take all room but `leaving` bytes."""
        self.drop()
        with self._path.open("ab", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                pass
        os.truncate(self._path, max(0, self._path.stat().st_size - leaving))

    def drop(self) -> None:
        """Give it back."""
        self._path.unlink(missing_ok=True)
