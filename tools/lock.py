"""`python -m tools.lock GROUP=NAME==VERSION…` prints constraints.txt: every package that is installed, with hashes.

It runs in an environment that has ragkv with all of its extras, which `make lock` makes. For each package it says which
extras need it, from the metadata of what is installed, and lists the hashes of its wheels for the Pythons and machines
that are supported, from the index that pip uses. A package of the command line is listed for its group and need not be
installed. With `--only` nothing else is listed.

The CUDA build of torch and what it needs are listed as PyPI has them, whatever build is installed. The hashes of other
builds of the same version are on the page `--torch-index`. Where that cannot be reached, those in the present
constraints.txt are kept.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.parser import Parser
from functools import cache, partial
from importlib.metadata import distributions
from itertools import product
from typing import Any

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from tools.locked import CONSTRAINTS, ROOT, Pin, canonical, read_pins

HEAD = """\
# Exact versions of everything ragkv and its tests run with, and the SHA-256 of their wheels for Linux. Written by
# make lock; installed by `python -m tools.locked NAME…`, with the names that stand before each package.
"""
FULL_VERSIONS = ("3.11.2", "3.11.14", "3.12.12", "3.13.9")
"""Pythons that are supported. Debian 12 has 3.11.2, and some packages ask for more before 3.11.3."""
MACHINES = ("x86_64", "aarch64")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SMALL = 64 * 2**20
"""A wheel of at most so many bytes is downloaded for its metadata, where the index does not serve these alone."""
NOT_LISTED = {"pip", "ragkv"}
Needs = Mapping[str, Sequence[str]]
"""Requirements of each package, by its name."""


def index() -> str:
    """Return the address of the index that pip uses."""
    return os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")


def fetch(url: str, kind: str = "*/*") -> bytes:
    """Return what an address serves.

    Args:
        url: The address.
        kind: Media types that are wanted.

    Raises:
        OSError: It cannot be reached, or refuses.
    """
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": kind}), timeout=120) as answer:
        content: bytes = answer.read()
    return content


@cache
def files(name: str) -> tuple[dict[str, Any], ...]:
    """Return the files that the index has of a package, with names, addresses and hashes.

    Args:
        name: The package's name.

    Raises:
        OSError: The index cannot be reached, or has no such package.
    """
    page = fetch(f"{index()}/{canonicalize_name(name)}/", "application/vnd.pypi.simple.v1+json")
    return tuple(json.loads(page)["files"])


@cache
def supported_tags() -> dict[str, frozenset[Tag]]:
    """Return the tags of wheels that can be installed, for each minor version of Python."""
    old = ("manylinux1", "manylinux2010", "manylinux2014")
    tags: dict[str, set[Tag]] = {}
    for full, machine in product(FULL_VERSIONS, MACHINES):
        major, minor = map(int, full.split(".")[:2])
        platforms = [f"manylinux_2_{glibc}_{machine}" for glibc in range(37, 4, -1)]
        platforms += [*(f"{kind}_{machine}" for kind in old), f"linux_{machine}"]
        own = tags.setdefault(f"{major}.{minor}", set())
        own.update(cpython_tags((major, minor), platforms=platforms))
        own.update(compatible_tags((major, minor), f"cp{major}{minor}", platforms))
    return {minor: frozenset(own) for minor, own in tags.items()}


def wheels(name: str, version: str) -> Iterator[tuple[dict[str, Any], frozenset[Tag]]]:
    """Yield the wheels of a version that can be installed somewhere, with their tags.

    Args:
        name: The package's name.
        version: Its version.
    """
    everywhere = frozenset().union(*supported_tags().values())
    for file in files(name):
        if not file["filename"].endswith(".whl"):
            continue
        try:
            _, stated, _, tags = parse_wheel_filename(file["filename"])
        except InvalidWheelFilename:
            continue
        if stated == Version(version) and tags & everywhere:
            yield file, tags


def hashes_of(name: str, version: str) -> tuple[str, ...]:
    """Return the hashes of all wheels of a version that can be installed somewhere, sorted.

    Args:
        name: The package's name.
        version: Its version.

    Raises:
        ValueError: There is none for one of the Pythons.
    """
    found = list(wheels(name, version))
    for minor, tags in supported_tags().items():
        if not any(own & tags for _, own in found):
            print(f"{name}=={version} has no wheel for Python {minor}", file=sys.stderr)
    if not found:
        raise ValueError(f"{name}=={version} has no wheel")
    return tuple(sorted({file["hashes"]["sha256"] for file, _ in found}))


def needs_of(name: str, version: str) -> list[str]:
    """Return the requirements of a package that is not installed here, from the index.

    Args:
        name: The package's name.
        version: Its version.

    Raises:
        ValueError: The index does not serve its metadata, and all of its wheels are large.
    """
    for file, _ in wheels(name, version):
        try:
            return requirements(fetch(f"{file['url']}.metadata").decode())
        except urllib.error.HTTPError:
            continue
    for file, _ in wheels(name, version):
        if file.get("size", SMALL) < SMALL:
            with zipfile.ZipFile(io.BytesIO(fetch(file["url"]))) as archive:
                metadata = next(path for path in archive.namelist() if path.endswith(".dist-info/METADATA"))
                return requirements(archive.read(metadata).decode())
    raise ValueError(f"the index does not tell what {name}=={version} needs")


def requirements(metadata: str) -> list[str]:
    """Return the requirements that the metadata of a package state."""
    return list(Parser().parsestr(metadata).get_all("Requires-Dist") or ())


def environments() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield what markers may ask for, for each Python and machine that is supported, with Python's minor version."""
    for full, machine in product(FULL_VERSIONS, MACHINES):
        minor = full.rpartition(".")[0]
        yield (
            minor,
            {
                "python_version": minor,
                "python_full_version": full,
                "implementation_version": full,
                "platform_machine": machine,
                "sys_platform": "linux",
                "platform_system": "Linux",
                "os_name": "posix",
                "platform_python_implementation": "CPython",
                "implementation_name": "cpython",
            },
        )


def closure(lines: Sequence[str], needs: Needs, environment: Mapping[str, str]) -> set[str]:
    """Return the names of all packages that an installation has in an environment.

    Args:
        lines: What is asked for, as requirements.
        needs: Requirements of all packages.
        environment: What markers ask for.

    Raises:
        ValueError: A package is needed that is not there.
    """
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(line), "", "ragkv") for line in lines]
    while waiting:
        requirement, extra, asker = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in needs:
            raise ValueError(f"{asker} needs {requirement} with Python {environment['python_full_version']}: not there")
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in found:
                found.add((name, wanted))
                waiting += [(Requirement(line), wanted, name) for line in needs[name]]
    return {name for name, _ in found}


def newest(requirement: Requirement) -> str:
    """Return the newest version in the index that fits a requirement and has wheels.

    Args:
        requirement: The requirement.

    Raises:
        ValueError: None does.
    """
    stated = set()
    for file in files(requirement.name):
        parts = file["filename"].split("-")
        if file["filename"].endswith(".whl") and not file.get("yanked") and len(parts) > 4:
            stated.add(parts[1])
    fitting = sorted(requirement.specifier.filter(map(Version, stated), prereleases=False), reverse=True)
    for version in fitting:
        if any(True for _ in wheels(requirement.name, str(version))):
            return str(version)
    raise ValueError(f"the index has no wheel of {requirement}")


def cuda_build(torch: str, there: Container[str]) -> dict[str, str]:
    """Return the versions of what only the CUDA build of torch needs.

    Args:
        torch: Its version.
        there: Names of all packages that are listed anyway.
    """
    versions: dict[str, str] = {}
    needs = {"torch": needs_of("torch", torch)}
    _, environment = next(environments())
    waiting = [(Requirement(line), "") for line in needs["torch"]]
    seen: set[tuple[str, str]] = set()
    while waiting:
        # Exact versions first: the others take what these leave.
        waiting.sort(key=lambda asked: "==" in str(asked[0].specifier))
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        if name in there and name != "triton":
            # Every build needs it.
            continue
        if name not in versions:
            versions[name] = newest(requirement)
            needs[name] = needs_of(name, versions[name])
        for wanted in {"", *requirement.extras} - {own for known, own in seen if known == name}:
            seen.add((name, wanted))
            waiting += [(Requirement(line), wanted) for line in needs[name]]
    return versions


def other_builds(version: str, page: str) -> set[str]:
    """Return the hashes of wheels of torch that an index other than PyPI has, and those that are listed already.

    Args:
        version: The version of torch.
        page: The address of the index.
    """
    found = {
        value
        for pin in read_pins(CONSTRAINTS.read_text())
        if pin.name == "torch" and pin.version == version
        for value in pin.hashes
    }
    try:
        text = fetch(f"{page.rstrip('/')}/torch/", "text/html").decode()
    except OSError as error:
        print(f"{page}: {error}; {len(found)} hashes of torch {version} are kept", file=sys.stderr)
        return found
    everywhere = frozenset().union(*supported_tags().values())
    for name, value in re.findall(r"/(torch-[^/\"#]+\.whl)#sha256=([0-9a-f]{64})", text.replace("%2B", "+")):
        _, stated, _, tags = parse_wheel_filename(name)
        if stated.public == version and tags & everywhere:
            found.add(value)
    return found


def groups_of(needs: Needs) -> dict[str, dict[str, set[str]]]:
    """Return for each package the groups that need it, and for each group with which minor versions of Python.

    Args:
        needs: Requirements of all packages that are installed.
    """
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    asked = {"run": project["dependencies"], "build": content["build-system"]["requires"]}
    asked |= project["optional-dependencies"]
    found: dict[str, dict[str, set[str]]] = {}
    for minor, environment in environments():
        for group, lines in asked.items():
            for name in closure(lines, needs, environment):
                found.setdefault(name, {}).setdefault(group, set()).add(minor)
    return found


def marker(minors: Iterable[str]) -> str:
    """Return the marker of a package that only some Pythons need."""
    known = sorted(set(minors))
    return "" if len(known) == len(supported_tags()) else f'python_version in "{" ".join(known)}"'


Stated = tuple[str, str, str, frozenset[str]]
"""Name, version, marker and groups of a package."""


def installed() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the versions and requirements of all packages of this environment, as a CPU build of torch has them."""
    there = {canonical(own.metadata["Name"]): own for own in distributions()}
    versions = {name: own.version.partition("+")[0] for name, own in there.items() if name not in NOT_LISTED}
    needs = {name: list(there[name].requires or ()) for name in versions}
    needs["torch"] = [line for line in needs["torch"] if not line.startswith(("nvidia-", "cuda-", "triton"))]
    return versions, needs


def needed() -> list[Stated]:
    """Return the packages of this environment that ragkv, its extras and its build need."""
    versions, needs = installed()
    return [
        (name, versions[name], marker(set().union(*wanted.values())), frozenset(wanted))
        for name, wanted in groups_of(needs).items()
    ]


def with_hashes(stated: Stated, page: str) -> Pin:
    """Return a package with its hashes.

    Args:
        stated: The package.
        page: An index of other builds of torch.
    """
    name, version, where, groups = stated
    hashes = {*hashes_of(name, version), *(other_builds(version, page) if name == "torch" else ())}
    return Pin(name, version, where, groups, tuple(sorted(hashes)))


def main(words: Sequence[str] | None = None) -> None:
    """Print a constraints file.

    Args:
        words: Arguments of the command line; those of the process if None.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.lock", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="GROUP=NAME==VERSION")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", action="store_true", help="list nothing but these packages")
    which.add_argument("--cuda", action="store_true", help="list what the CUDA build of torch needs")
    parser.add_argument("--torch-index", default=TORCH_INDEX)
    given = parser.parse_args(words)
    stated: list[Stated] = []
    for text in given.packages:
        group, _, pin = text.partition("=")
        name, _, version = pin.partition("==")
        stated.append((canonical(name), version, "", frozenset({group})))
    if given.cuda:
        versions, _ = installed()
        build = cuda_build(versions["torch"], versions)
        stated += [(name, version, "", frozenset({"cuda"})) for name, version in build.items()]
    elif not given.only:
        stated += needed()
    with ThreadPoolExecutor(4) as pool:
        pins = sorted(pool.map(partial(with_hashes, page=given.torch_index), stated), key=lambda pin: pin.name)
    print(HEAD)
    print("\n".join(f"# for {' '.join(sorted(pin.groups))}\n{pin}" for pin in pins))


if __name__ == "__main__":
    main()
