"""`python -m tools.locked NAME…` installs what constraints.txt lists for these names into the Python that runs it.

A name is `run` (the service), `build` (the build backend), `model` (the default model), or an extra of pyproject.toml.
Every file that pip installs has a hash of constraints.txt; a file with another one ends the installation. Nothing is
built, because a source distribution runs code of its own before anybody has looked at its hash.

torch goes first and alone. There are several builds of one version, and PIP_* settings choose between them, so it is
downloaded as pip finds it, and installed only if the hash of what came is one that constraints.txt names. What a CUDA
build needs, NVIDIA's libraries and a triton of its own, stands in constraints-cuda.txt and comes with it.

This module needs the standard library only. It runs before anything is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
CUDA = ROOT / "constraints-cuda.txt"
PIP = (sys.executable, "-m", "pip")
VERIFIED = ("--no-deps", "--require-hashes", "--only-binary", ":all:")
"""Only what is listed, only with its hash, and no source distributions."""


@dataclass(frozen=True)
class Pin:
    """One package of a constraints file."""

    name: str
    """As packages are compared: lower case, hyphens."""
    version: str
    marker: str
    """Where it is needed, as a requirement says it after `;`. Empty: everywhere."""
    groups: frozenset[str]
    """Names that it is installed for."""
    hashes: tuple[str, ...]
    """SHA-256 of its files, as hexadecimal digits."""

    def __str__(self) -> str:
        """Return the requirement with its hashes, as pip reads it."""
        first = f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")
        return " \\\n".join([first, *(f"    --hash=sha256:{value}" for value in self.hashes)])


def canonical(name: str) -> str:
    """Return a package's name as packages are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> list[Pin]:
    """Return the packages of a constraints file.

    Args:
        text: For each package a comment with its groups, and a requirement with its hashes.

    Raises:
        ValueError: A requirement has no exact version, or no hash.
    """
    pins: list[Pin] = []
    groups: frozenset[str] = frozenset()
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("# for "):
            groups = frozenset(line.removeprefix("# for ").split())
        if not line.strip() or line.startswith("#"):
            continue
        stated = re.fullmatch(r"([\w.-]+)==(\S+)(?: ; (.*?))?((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*", line)
        if not stated:
            raise ValueError(f"not a version with its hashes: {line[:80]}")
        hashes = tuple(re.findall(r"sha256:(\w+)", stated[4]))
        pins.append(Pin(canonical(stated[1]), stated[2], stated[3] or "", groups, hashes))
        groups = frozenset()
    return pins


def select(pins: Iterable[Pin], groups: Sequence[str]) -> list[Pin]:
    """Return the packages of some groups.

    Args:
        pins: All packages.
        groups: Names of groups.

    Raises:
        ValueError: No package belongs to one of the groups.
    """
    known = list(pins)
    for name in groups:
        if not any(name in pin.groups for pin in known):
            raise ValueError(f"no package is listed for {name}")
    return [pin for pin in known if pin.groups & set(groups)]


def installed(pin: Pin) -> bool:
    """Return whether this Python has the package in this version, whatever its build."""
    try:
        return importlib.metadata.version(pin.name).partition("+")[0] == pin.version
    except importlib.metadata.PackageNotFoundError:
        return False


def wants_cuda() -> bool:
    """Return whether the torch of this Python is a build that needs NVIDIA's libraries."""
    try:
        needs = importlib.metadata.requires("torch") or ()
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(line.startswith(("nvidia-", "cuda-")) for line in needs)


def install(pins: Sequence[Pin], folder: Path, *words: str) -> None:
    """Install packages whose hashes fit.

    Args:
        pins: The packages.
        folder: An empty folder for the list that pip reads.
        words: More arguments of pip.

    Raises:
        subprocess.CalledProcessError: pip failed. It has said why.
    """
    listing = folder / "requirements.txt"
    listing.write_text("".join(f"{pin}\n" for pin in pins))
    subprocess.run([*PIP, "install", *VERIFIED, *words, "-r", str(listing)], check=True)


def install_torch(pin: Pin, folder: Path) -> None:
    """Install the build of torch that pip's settings choose, if it is one that is listed.

    Args:
        pin: The package.
        folder: An empty folder.

    Raises:
        subprocess.CalledProcessError: pip failed. It has said why.
    """
    wanted = f"{pin.name}=={pin.version}"
    here = folder / "torch"
    subprocess.run([*PIP, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(here), wanted], check=True)
    install([pin], folder, "--no-index", "--find-links", str(here))


def main(words: Sequence[str] | None = None) -> None:
    """Install groups of packages.

    Args:
        words: Arguments of the command line; those of the process if None.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.locked", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="+", metavar="NAME")
    parser.add_argument("--constraints", type=Path, default=CONSTRAINTS)
    parser.add_argument("--print", action="store_true", help="print what pip would be given, and install nothing")
    given = parser.parse_args(words)
    try:
        pins = read_pins(given.constraints.read_text())
        chosen = select(pins, given.groups)
        if given.print:
            print("\n".join(map(str, chosen)))
            return
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for pin in chosen:
                if pin.name == "torch" and not installed(pin):
                    install_torch(pin, folder)
            if given.constraints == CONSTRAINTS and wants_cuda():
                build = read_pins(CUDA.read_text())
                names = {pin.name for pin in build}
                chosen = [*(pin for pin in chosen if pin.name not in names), *build]
            install([pin for pin in chosen if pin.name != "torch"], folder)
    except (OSError, ValueError) as error:
        sys.exit(f"tools.locked: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


if __name__ == "__main__":
    main()
