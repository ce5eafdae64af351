"""Files of folders: which of them are read, what they are called, and what could not be looked at.

Folders are walked in sorted order. Hidden files and folders and files of unknown formats are left out. Linked folders
are not walked, because they may lead back to where they are; they are told, as folders are that cannot be listed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ragkv.ingest.sandbox import FORMATS
from ragkv.normalisation import normal_id

SUFFIXES = (".txt", ".md", ".jsonl", *FORMATS)


@dataclass(frozen=True)
class FolderFault:
    """A place in a folder that was not read.

    Attributes:
        path: The place.
        reason: Why not.
        hides: Whether there may be files of which nothing is known.
    """

    path: Path
    reason: str
    hides: bool

    def __str__(self) -> str:
        return f"{_printable(str(self.path))}: {self.reason}"


OnFault = Callable[[FolderFault], object]


def named(
    paths: Iterable[Path], root: Path | None = None, on_fault: OnFault | None = None
) -> Iterator[tuple[Path, str]]:
    """Yield the files that are read, each with its name, without opening them.

    Args:
        paths: Files and folders.
        root: Names are relative to this folder, by default the working folder. Outside of it they are relative to the
            folder that holds the named path.
        on_fault: Called for each place that is not read.
    """
    for given in paths:
        for path in _files(given, on_fault or _ignore):
            yield path, name_of(path, given, root or Path.cwd())


def skipped(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files in the given folders that are not read because of their suffix. Hidden files are left out."""
    for given in paths:
        if given.is_dir():
            yield from (path for path in _visible(given, _ignore) if path.suffix.lower() not in SUFFIXES)


def name_of(path: Path, given: Path, root: Path) -> str:
    """Return the name of a path below the path that the caller named."""
    full = Path(os.path.abspath(path))
    for base in (Path(os.path.abspath(root)), Path(os.path.abspath(given)).parent):
        if full.is_relative_to(base):
            return _printable(full.relative_to(base).as_posix())
    return _printable(full.name)


def source_of(path: Path) -> str:
    """Return what tells a file from all others: its path from the root, without links of folders."""
    return _printable(Path(os.path.realpath(path.parent), path.name).as_posix())


def _files(given: Path, on_fault: OnFault) -> Iterator[Path]:
    if not given.is_dir():
        yield given
        return
    yield from (path for path in _visible(given, on_fault) if path.suffix.lower() in SUFFIXES)


def _visible(root: Path, on_fault: OnFault) -> Iterator[Path]:
    """Yield the files in a folder and its folders, without hidden ones."""

    def tell(error: OSError) -> None:
        reason = f"the folder cannot be read: {error.strerror}"
        on_fault(FolderFault(Path(os.fsdecode(error.filename or root)), reason, hides=True))

    for folder, folders, files in os.walk(root, onerror=tell):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if os.path.islink(path := Path(folder, name)):  # os.walk does not enter it
                reason = "a linked folder is not read; ingest the folder that it leads to by its own path"
                on_fault(FolderFault(path, reason, hides=False))
        for name in sorted(name for name in files if not name.startswith(".")):
            path = Path(folder, name)
            if (reason := _unreadable(path)) and path.suffix.lower() in SUFFIXES:
                on_fault(FolderFault(path, reason, hides=True))
            elif not reason:
                yield path


def _unreadable(path: Path) -> str:
    """Return why a path is no file that can be read; "" if it is one."""
    try:
        if path.is_file():
            return ""
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return "the link leads nowhere" if path.is_symlink() else "it is no regular file"


def _ignore(fault: FolderFault) -> None:
    """The default of `on_fault`."""


def _printable(name: str) -> str:
    """Escape bytes that are not UTF-8: file names may hold them, but an id is stored and shown. It has one form."""
    return normal_id(name.encode(errors="backslashreplace").decode())
