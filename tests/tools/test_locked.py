"""What is installed is what constraints.txt lists: version, file by file, and nothing else."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.locked import Pin, read_pins, select

ROOT = Path(__file__).resolve().parents[2]


def wheel(folder: Path, name: str, *needs: str, version: str = "1.0") -> str:
    """Write a wheel of a module of this name; the SHA-256 of the file."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    lines = [f"Requires-Dist: {need}" for need in needs]
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(
            f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install(
    folder: Path, constraints: str, *groups: str, **pip: str
) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Install from the wheels of a folder alone; what pip said, and the modules that are there then."""
    (folder / "constraints.txt").write_text(constraints)
    there = folder / "there"
    command = [sys.executable, "-m", "tools.locked", "--constraints", str(folder / "constraints.txt"), *groups]
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "wheels"), "PIP_TARGET": str(there)}
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    given = {**own, **index, "PIP_CONFIG_FILE": os.devnull, **pip}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=100, check=False)
    return done, {path.stem for path in there.glob("*.py")}


def test_a_group_is_installed_and_nothing_that_it_asks_for_beyond_the_list(tmp_path: Path) -> None:
    one, two = wheel(tmp_path / "wheels", "ragkv_one", "ragkv_two"), wheel(tmp_path / "wheels", "ragkv_two")
    text = f"# for run\nragkv-one==1.0 \\\n    --hash=sha256:{one}\n# for dev\nragkv-two==1.0 --hash=sha256:{two}\n"
    done, there = install(tmp_path, text, "run")
    assert done.returncode == 0, done.stderr
    assert there == {"ragkv_one"}


def test_a_file_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "ragkv_one")
    done, there = install(tmp_path, f"# for run\nragkv-one==1.0 --hash=sha256:{'0' * 64}\n", "run")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not there


def test_the_build_of_torch_is_the_one_that_pip_finds_if_its_hash_is_listed(tmp_path: Path) -> None:
    """A folder does not tell the hashes of its files, and must not lose to an index that does."""
    index, folder = tmp_path / "simple" / "torch", tmp_path / "wheels"
    index.mkdir(parents=True)
    public = wheel(index, "torch", version="99.0")
    cpu = wheel(folder, "torch", version="99.0+cpu")
    name = "torch-99.0-py3-none-any.whl"
    (index / "index.html").write_text(f'<!DOCTYPE html><html><body><a href="{name}#sha256={public}">{name}</a></body>')
    both = f"# for run\ntorch==99.0 --hash=sha256:{public} --hash=sha256:{cpu}\n"
    done, there = install(tmp_path, both, "run", PIP_NO_INDEX="0", PIP_INDEX_URL=(tmp_path / "simple").as_uri())
    assert done.returncode == 0, done.stderr
    assert there == {"torch"}
    assert list((tmp_path / "there").glob("torch-99.0+cpu.dist-info"))
    shutil.rmtree(tmp_path / "there")
    done, there = install(tmp_path, f"# for run\ntorch==99.0 --hash=sha256:{'1' * 64}\n", "run")
    assert (done.returncode != 0, there) == (True, set())
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_what_pip_is_given_is_what_is_read() -> None:
    text = f"# for run dev\nOne_Two==2.0 ; python_version < '4' --hash=sha256:{'1' * 64} --hash=sha256:{'2' * 64}\n"
    (pin,) = read_pins(text)
    assert pin == Pin("one-two", "2.0", "python_version < '4'", frozenset({"run", "dev"}), ("1" * 64, "2" * 64))
    assert str(pin).splitlines()[0] == "one-two==2.0 ; python_version < '4' \\"
    assert read_pins(str(pin))[0].hashes == pin.hashes


@pytest.mark.parametrize("line", ["one", "one>=1 --hash=sha256:" + "0" * 64, "one==1", "one==1 --hash=md5:00"])
def test_a_line_without_a_version_or_hash_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a version with its hashes"):
        read_pins(f"# for run\n{line}\n")


def test_a_group_that_is_not_listed_is_refused() -> None:
    with pytest.raises(ValueError, match="no package is listed for runn"):
        select(read_pins(f"# for run\none==1 --hash=sha256:{'0' * 64}\n"), ["runn"])
