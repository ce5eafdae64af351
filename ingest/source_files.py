"""A file of an ingest, wherever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath

from ragkv.ingest.folders import SUFFIXES, OnFault, named, source_of


@dataclass(frozen=True)
class SourceFile:
    """A file of a source.

    Attributes:
        name: Name of its documents: its id, or for several documents what messages call it.
        size: Its bytes.
        fetch: Returns its path on this machine, below the folder that it is given if it has to be copied. Raises
            InputError.
        remote: Whether it has to be fetched from elsewhere.
        source: Its path on this machine (`ragkv.ingest.folders.source_of`), where it is one document; "" else.
    """

    name: str
    size: int
    fetch: Callable[[Path], Path]
    remote: bool = False
    source: str = ""

    @property
    def lines(self) -> bool:
        """Whether it holds a document a line, each with a size of its own."""
        return PurePath(self.name).suffix.lower() == ".jsonl"


def local_files(
    paths: Iterable[Path], root: Path | None = None, on_fault: OnFault | None = None
) -> Iterator[SourceFile]:
    """Yield the files of paths of this machine. See `ragkv.ingest.folders.named`."""
    for path, name in named(paths, root, on_fault):
        yield local_file(path, name)


def local_file(path: Path, name: str) -> SourceFile:
    """Return a file of this machine by its name."""
    file = SourceFile(name, path.stat().st_size if path.is_file() else 0, partial(_stay, path))
    return file if file.lines else replace(file, source=source_of(path))


def absolute(file: SourceFile) -> SourceFile:
    """Return the file so that a process with another working folder finds it, too."""
    if file.remote:
        return file
    return replace(file, fetch=partial(_stay, file.fetch(Path()).absolute()))


def has_known_suffix(name: str) -> bool:
    """Return whether a file of a source is read: it has a known suffix, and no part of its name is hidden."""
    path = PurePath(name)
    return path.suffix.lower() in SUFFIXES and not any(part.startswith(".") for part in path.parts)


def _stay(path: Path, folder: Path) -> Path:
    return path
