"""Files of a Git repository: its newest version is copied by the program git, without history, and read as a folder.

Credentials are the user's own: a credential helper, or keys of ssh. git asks for none and runs no hook, no submodule is
fetched, and a symbolic link of the repository is a small text file, so that it leads nowhere on this machine.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from ragkv.errors import ConfigError, InputError
from ragkv.ingest.source_files import SourceFile, local_files

GIT = "git+"
"""Begins the addresses of repositories."""
_PROTOCOLS = ("https", "ssh", "file")
_REF = re.compile(r"[A-Za-z0-9_][\w./+-]*")
_SLOW = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60")


@dataclass(frozen=True)
class Repository:
    """A repository, as its address names it.

    Attributes:
        url: What git is given.
        ref: Branch or tag; empty: the repository's own choice.
        folder: Folder of the repository that is read; empty: all of it.
    """

    url: str
    ref: str = ""
    folder: str = ""


def parse_address(address: str) -> Repository:
    """Parse `git+PROTOCOL://…[@REF][#FOLDER]`. Raises InputError."""
    rest, _, folder = address.removeprefix(GIT).partition("#")
    parts = urlsplit(rest)
    if parts.scheme not in _PROTOCOLS or not parts.path.strip("/") or parts.query:
        raise InputError(f"{address}: give git+https://HOST/REPOSITORY, git+ssh://… or git+file:///PATH")
    if parts.password is not None or (parts.scheme == "https" and parts.username is not None):
        # It would become part of the ids of all documents.
        raise InputError(f"{address}: leave credentials out; git takes them from its credential helper")
    path, at, ref = parts.path.rpartition("@")
    if not at:
        path, ref = parts.path, ""
    if (at and not _REF.fullmatch(ref)) or ".." in PurePosixPath(folder).parts:
        raise InputError(f"{address}: behind @ stands a branch or tag, behind # a folder of the repository")
    return Repository(f"{parts.scheme}://{parts.netloc}{path.rstrip('/')}", ref, folder.strip("/"))


def open_repository(address: str, copy: Path) -> Iterator[SourceFile]:
    """Copy a repository and yield its files. The id of a document is the repository's address and the file's path.

    Args:
        address: See `parse_address`.
        copy: An empty folder for the copy.

    Raises:
        InputError: The address is invalid, or the repository cannot be read.
        ConfigError: There is no program git.
    """
    repository = parse_address(address)
    _clone(repository, copy)
    folder = copy / repository.folder
    if not folder.is_dir():
        raise InputError(f"{address}: the repository has no folder {repository.folder!r}")
    for file in local_files([folder], copy):
        yield replace(file, name=f"{GIT}{repository.url}/{file.name}", source="")


def _clone(repository: Repository, copy: Path) -> None:
    protocol = repository.url.partition(":")[0]
    safe = ("protocol.allow=never", f"protocol.{protocol}.allow=always", "core.hooksPath=/dev/null")
    quiet = ("core.symlinks=false", "core.askPass=", "credential.interactive=false", "advice.detachedHead=false")
    options = [word for setting in (*safe, *quiet) for word in ("-c", setting)]
    branch = ["--branch", repository.ref] if repository.ref else []
    clone = ["clone", "--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules", "--template=", *branch]
    command = ["git", *_SLOW, *options, *clone, "--", repository.url, str(copy)]
    try:
        # In a session of its own git finds no terminal where it could ask for a password.
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise ConfigError("git+… needs the program git; install it, or give a folder") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith(("fatal:", "error:"))), "git gave no reason")
        raise InputError(f"{GIT}{repository.url} cannot be read: {reason}")
