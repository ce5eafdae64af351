"""A mutant is a patch file. Its first lines say what it breaks and which tests must fail; a unified diff follows.

    Breaks: the question's query is that of its last token
    Tests: tests/recompute/test_samkv_steps.py::test_the_question_is_the_mean_of_all_its_tokens
    --- a/ragkv/recompute/samkv.py
    +++ b/ragkv/recompute/samkv.py
    ...

`Tests:` names test files or node ids, separated by spaces.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(__file__).resolve().parent
COPIED = ("api", "ingest", "ragkv", "tests", "pyproject.toml")
LINKED = ("models", "tools")
"""What a patch never changes."""
LIMIT = 600.0
"""Seconds after which the tests of a mutant are stopped; the mutant counts as killed."""


@dataclass(frozen=True)
class Mutant:
    """One patch.

    Attributes:
        name: Name of the file without its suffix.
        breaks: What the patch breaks, in words.
        tests: Test files or node ids that must fail.
        patch: The whole file.
    """

    name: str
    breaks: str
    tests: tuple[str, ...]
    patch: str

    @property
    def files(self) -> list[str]:
        """The files that the patch changes, from the root of the tree."""
        return re.findall(r"^\+\+\+ b/(\S+)$", self.patch, re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        mutant: The mutant.
        verdict: `killed`, `survived`, `skipped` (its tests need another machine, such as one with a GPU), `no longer
            applies` or `broken` (its tests cannot be run).
        by: The first test that failed, or the first line of the message.
    """

    mutant: Mutant
    verdict: str
    by: str = ""


def read_mutant(path: Path) -> Mutant:
    """Read a patch file.

    Raises:
        ValueError: The file lacks a header line or changes no file.
    """
    patch = path.read_text("utf-8")
    header = dict(re.findall(r"^(Breaks|Tests): (.+)$", patch, re.MULTILINE))
    if set(header) != {"Breaks", "Tests"}:
        raise ValueError(f"{path.name} needs the lines Breaks: and Tests:")
    mutant = Mutant(path.stem, header["Breaks"], tuple(header["Tests"].split()), patch)
    if not mutant.files:
        raise ValueError(f"{path.name} changes no file")
    return mutant


def all_mutants() -> list[Mutant]:
    """Return all mutants, by name."""
    return [read_mutant(path) for path in sorted(FOLDER.glob("*.patch"))]


def apply_patch(mutant: Mutant, tree: Path) -> str:
    """Apply a mutant to a tree outside of any repository.

    Returns:
        The message of git, empty if the patch applies.
    """
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(command, cwd=tree, env=environment, input=mutant.patch, text=True, capture_output=True)
    return "" if done.returncode == 0 else done.stderr.strip() or "git apply failed"


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Copy the tree to a temporary folder, which is removed afterwards."""
    with TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for name in COPIED:
            if (ROOT / name).is_dir():
                # ragkv/api and ragkv/ingest are links: followed, they would be copies that no patch reaches.
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy(ROOT / name, tree / name)
        for name in LINKED:
            (tree / name).symlink_to(ROOT / name)
        yield tree


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests of a tree until the first fails.

    Returns:
        The exit status of pytest (0 passed, 1 failed), and the first test that failed or else the last line.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    given = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env={**os.environ, **given}, text=True, capture_output=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end after {LIMIT:.0f} s"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, failed[1] if failed else lines[-1] if lines else ""


def run_mutant(mutant: Mutant) -> Outcome:
    """Apply a mutant to a copy of the tree and run its tests."""
    with copied_tree() as tree:
        refused = apply_patch(mutant, tree)
        if refused:
            return Outcome(mutant, "no longer applies", refused.splitlines()[0])
        status, by = run_tests(tree, mutant.tests)
    if status == 0 and " passed" not in by:
        return Outcome(mutant, "skipped", by)
    return Outcome(mutant, {0: "survived", 1: "killed"}.get(status, "broken"), by)
