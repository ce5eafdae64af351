"""Folders that are watched: which files are new, have changed, or are gone.

The folders are listed again and again. That works on every file system, also on those of networks and containers, which
report no changes by themselves. A change counts once two scans in a row have seen it, so that no file is read while it
is written.

A file that is gone counts as removed only while the watched folder is there and could be listed whole. Of a disk that
is not mounted for a moment, nothing is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ragkv.ingest.folders import FolderFault, named

Signature = tuple[int, int, int]
"""(modification time in ns, size, inode) of a file."""


@dataclass(frozen=True)
class FolderChanges:
    """What has changed since the changes that were accepted last.

    Attributes:
        changed: New and changed files by name.
        removed: Files that are gone by name; an empty path where it is not known.
        faults: Places that were not read. They are no change.
    """

    changed: dict[str, Path] = field(default_factory=dict)
    removed: dict[str, Path] = field(default_factory=dict)
    faults: tuple[FolderFault, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changed or self.removed)


class FolderScanner:
    """Finds changes in folders by listing them."""

    def __init__(self, folders: Sequence[Path], root: Path | None = None):
        """Take the folders.

        Args:
            folders: Files and folders.
            root: As for `ragkv.ingest.loader.load`.
        """
        self._folders, self._root = folders, root
        self._accepted: dict[str, tuple[Signature, Path]] = {}
        self._seen: dict[str, Signature] = {}
        self._mounted: dict[Path, tuple[int, int]] = {}

    def assume(self, files: Iterable[tuple[str, Path]]) -> None:
        """Take files for accepted that were there earlier. Those that are still there count as changed.

        files: Name and path of each; an empty path where it is not known.
        """
        for name, path in files:
            self._accepted.setdefault(name, ((0, 0, 0), path))

    def scan(self) -> FolderChanges:
        """Return what two scans in a row have seen. The same changes are returned again until they are accepted."""
        now, kept, faults = dict[str, tuple[Signature, Path]](), set[str](), list[FolderFault]()
        for folder in self._folders:
            found, whole = self._list(folder, faults)
            now |= found
            if not whole:
                kept |= {name for name, (_, path) in self._accepted.items() if _is_below(path, folder)}
                kept |= {name for name, (_, path) in self._accepted.items() if path == Path()}
        before, self._seen = self._seen, {name: signature for name, (signature, _) in now.items()}
        changed = {
            name: path
            for name, (signature, path) in now.items()
            if before.get(name) == signature and self._accepted.get(name, ((), path))[0] != signature
        }
        known = ((name, path) for name, (_, path) in self._accepted.items())
        gone = {name: path for name, path in known if name not in now and name not in before and name not in kept}
        return FolderChanges(changed, gone, tuple(faults))

    def accept(self, changes: FolderChanges) -> None:
        """Take note that changes were followed. A file that has changed since then is a change again."""
        for name, path in changes.changed.items():
            if name in self._seen:
                self._accepted[name] = (self._seen[name], path)
        for name in changes.removed:
            self._accepted.pop(name, None)

    def _list(self, folder: Path, faults: list[FolderFault]) -> tuple[dict[str, tuple[Signature, Path]], bool]:
        """Return the files of a folder, and whether all of it could be listed. faults: gets what could not."""
        here, found = list[FolderFault](), dict[str, tuple[Signature, Path]]()
        for path, name in named([folder], self._root, here.append):
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue  # it was removed meanwhile
            except OSError as error:
                here.append(FolderFault(path, f"it cannot be read: {error.strerror}", hides=True))
                continue
            found[name] = ((facts.st_mtime_ns, facts.st_size, facts.st_ino), path)
        faults += here
        return found, self._is_there(folder, bool(found)) and not any(fault.hides for fault in here)

    def _is_there(self, folder: Path, filled: bool) -> bool:
        """Return whether a folder is the one that was seen with files in it, and not the place where it was mounted."""
        try:
            facts = folder.stat()
        except OSError:
            return False
        place = (facts.st_dev, facts.st_ino)
        if filled:
            self._mounted[folder] = place
        return self._mounted.get(folder) == place


def _is_below(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents
