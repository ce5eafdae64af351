"""Restore: replaces the data folder by a backup (backup.py describes the format).

A restore verifies the whole file before it changes anything. It builds a new folder beside the data folder and renames
it at the end, so a crash leaves either the old folder or the new one. A member with an unexpected name is refused, and
no name is used as a path. KV is stored through the store that is configured now, and its time to live starts anew.

Where the settings name a catalogue in PostgreSQL, the backup is restored into that database, which must be empty. This
is how a service moves from SQLite to PostgreSQL. All rows come in one transaction.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ragkv.admin.archive import ArchiveReader, starts_with
from ragkv.admin.backup import (
    CATALOG,
    FORMAT,
    FRAME,
    MAGIC,
    MARK,
    PROFILE,
    BackupContents,
    temporary_sibling,
)
from ragkv.catalog import Catalog
from ragkv.config import Settings
from ragkv.errors import InputError, InvalidBackup, StoreError
from ragkv.store import open_store
from ragkv.store.disk_files import flush_folder
from ragkv.types import Key

ENTRY = re.compile(r"kv/([0-9a-f]{64})")
MAX_LAYERS = 4096


@dataclass(frozen=True)
class RestoredBackup:
    """Result of a restore.

    Attributes:
        found: Contents of the backup.
        stored: Number of KV entries that the store accepted.
        aside: Where the previous data folder is now; None if there was none.
    """

    found: BackupContents
    stored: int
    aside: Path | None


def restore_backup(file: Path, settings: Settings, force: bool) -> RestoredBackup:
    """Replace the data folder of `settings` by a backup.

    If this raises, the database is unchanged, and so is the data folder, but for KV that a disk store has taken.

    Args:
        file: The backup.
        settings: Settings of the service; they name the data folder and the store.
        force: Replace a data folder that is not empty. The old folder is renamed and kept.

    Raises:
        InvalidBackup: The file is not a backup, or it is damaged.
        InputError: The data folder is not empty and `force` is not set, or the database is not empty.
        CatalogCorrupt: The catalogue in the backup is damaged.
        ConfigError: The catalogue in the backup belongs to a newer ragkv, or the address of the database is wrong.
        StoreUnavailable: The database does not answer.
        OSError: The data folder cannot be written.
    """
    data = settings.data.resolve()
    with file.open("rb") as raw:
        archive = ArchiveReader(raw, file, _is_member_name)
        found = _verify(archive, file)
        if address := settings.catalog.get_secret_value():
            return RestoredBackup(found, _restore_into_database(archive, file, settings, address, found.entries), None)
        if data.exists() and any(data.iterdir()) and not force:
            raise InputError(f"{data} is not empty; --force puts the backup in its place and keeps that folder aside")
        with temporary_sibling(data) as work:
            fresh = work / "data"
            fresh.mkdir()
            _extract(archive, fresh)
            stored = _restore_entries(archive, file, settings, fresh) if found.entries else 0
            aside = _put_in_place(fresh, data)
    return RestoredBackup(found, stored, aside)


def _restore_into_database(archive: ArchiveReader, file: Path, settings: Settings, address: str, entries: int) -> int:
    """Restore into an empty catalogue in PostgreSQL; return how many of `entries` KV entries the store accepted.

    The data folder stays as it is, and gets the profiles that it lacks. KV that was stored before a fault stays stored.
    """
    data = settings.data.resolve()
    target = Catalog.open(address)
    try:
        target.check_empty()
        with temporary_sibling(data) as work:
            _extract(archive, work)
            # KV comes first: it is a cache, and what fails here leaves the database empty for another try.
            stored = _restore_entries(archive, file, settings, data) if entries else 0
            source = Catalog.open(work / CATALOG)
            try:
                target.take_over(source)
            finally:
                source.close()
            for profile in work.glob("profiles/*.json"):
                place = data / "profiles" / profile.name
                place.parent.mkdir(parents=True, exist_ok=True)
                if not place.exists():
                    os.replace(profile, place)
    finally:
        target.close()
    return stored


def _is_member_name(name: str) -> bool:
    return name in (MARK, CATALOG) or bool(PROFILE.fullmatch(name) or ENTRY.fullmatch(name))


def _verify(archive: ArchiveReader, file: Path) -> BackupContents:
    """Verify the archive and return its manifest. Raises InvalidBackup if it is damaged or has another format."""
    if not starts_with(file, MARK, MAGIC):
        raise InvalidBackup(f"{file} is no backup of ragkv")
    manifest = archive.verify()
    if manifest.get("format") != FORMAT:
        raise InvalidBackup(f"{file} is of format {manifest.get('format')}, this ragkv reads {FORMAT}")
    try:
        return BackupContents(**{name: manifest[name] for name in BackupContents.__dataclass_fields__})
    except KeyError as error:
        raise InvalidBackup(f"the manifest of {file} has no {error}") from None


def _extract(archive: ArchiveReader, folder: Path) -> None:
    """Extract catalogue and profiles. Raises CatalogCorrupt, and ConfigError for a catalogue of a newer ragkv."""
    for name, start, size in archive.members():
        profile = PROFILE.fullmatch(name)
        if name != CATALOG and not profile:
            continue
        path = folder / CATALOG if profile is None else folder / "profiles" / profile[1]
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as target:
            for piece in archive.pieces(start, size):
                target.write(piece)
            target.flush()
            os.fsync(target.fileno())
    if not (folder / CATALOG).exists():
        raise InvalidBackup("a backup without a catalogue; nothing was restored")
    Catalog.open(folder / CATALOG).close()


def _restore_entries(archive: ArchiveReader, file: Path, settings: Settings, folder: Path) -> int:
    """Store the KV entries; return how many the store accepted. The others are encoded when they are needed."""
    stored = 0
    store = open_store(settings.store, folder, settings.store_timeout, settings.store_ttl, settings.store_bytes)
    try:
        for name, start, size in archive.members():
            entry = ENTRY.fullmatch(name)
            if entry is None:
                continue
            head, body = _parse_entry(memoryview(archive.part(start, size)), file)
            with suppress(StoreError):
                store.put(Key(entry[1]), head, body)
                stored += 1
    finally:
        store.close()
    return stored


def _parse_entry(data: memoryview, file: Path) -> tuple[bytes, list[memoryview]]:
    """Return (head record, layers of the body) of an entry in the format of a backup."""
    layers, head_size = FRAME.unpack_from(data) if len(data) >= FRAME.size else (MAX_LAYERS + 1, 0)
    start = FRAME.size + 8 * layers
    if layers > MAX_LAYERS or start + head_size > len(data):
        raise InvalidBackup(f"{file} holds an invalid entry")
    sizes = struct.unpack_from(f"<{layers}Q", data, FRAME.size)
    if start + head_size + sum(sizes) != len(data):
        raise InvalidBackup(f"{file} holds an invalid entry")
    head = bytes(data[start : start + head_size])
    body, offset = [], start + head_size
    for size in sizes:
        body.append(data[offset : offset + size])
        offset += size
    return head, body


def _put_in_place(fresh: Path, data: Path) -> Path | None:
    """Rename `fresh` to `data`; return where the old data folder is now, or None if it was empty or missing."""
    if data.is_mount():
        # A mount point cannot be renamed, so it must be empty. The catalogue is moved last: until then the folder has
        # none and does not count as a data folder.
        if any(path != fresh.parent for path in data.iterdir()):
            raise InputError(f"{data} is the root of a disk and not empty; empty it, or restore into a folder on it")
        for path in sorted(fresh.iterdir(), key=lambda path: path.name == CATALOG):
            os.rename(path, data / path.name)
        flush_folder(data)
        return None
    aside = None
    if data.exists() and any(data.iterdir()):
        aside = data.with_name(f"{data.name}.before-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
        os.rename(data, aside)
    try:
        os.rename(fresh, data)
    except BaseException:
        if aside:
            os.rename(aside, data)
        raise
    flush_folder(data.parent)
    return aside
