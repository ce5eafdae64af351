"""Backup: one file with everything that cannot be rebuilt, and on request with the stored KV.

A backup is a plain tar archive (archive.py), so any tar program can list it. It is not compressed, because KV hardly
compresses:

    ragkv-backup           magic and format; distinguishes a backup from other files
    catalog.sqlite         SQLite's online backup: one consistent state, taken while others write
    profiles/<name>.json   results of `ragkv calibrate`
    kv/<key>               layers u32, head length u64, length of each layer u64, head record, layers; little-endian
    manifest.json          counts, versions, checksum

The vector index is not part of a backup; it is rebuilt at the first question. The KV entries are those that the
catalogue refers to. They are copied through the KVStore interface as opaque bytes, so a backup can move between
backends. An entry that changes or disappears while it is copied is left out, since the store is only a cache.

A restore verifies the whole file before it changes anything. It builds a new folder beside the data folder and renames
it at the end, so a crash leaves either the old folder or the new one. A member with an unexpected name is refused, and
no name is used as a path. KV is stored through the store that is configured now, and its time to live starts anew.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ragkv import __version__
from ragkv.admin.archive import SLICE, ArchiveReader, ArchiveWriter, starts_with
from ragkv.catalog import Catalog
from ragkv.config import Settings
from ragkv.errors import ConfigError, EntryCorrupt, EntryMissing, InputError, InvalidBackup, StoreError
from ragkv.store import open_store
from ragkv.store.base import KVStore, Range
from ragkv.store.disk_files import flush_folder
from ragkv.types import Key

MARK, MAGIC, FORMAT = "ragkv-backup", b"ragkv backup ", 1
CATALOG = "catalog.sqlite"
PROFILE = re.compile(r"profiles/([\w-]{1,80}\.json)", re.ASCII)
ENTRY = re.compile(r"kv/([0-9a-f]{64})")
FRAME = struct.Struct("<IQ")
MAX_LAYERS = 4096


@dataclass(frozen=True)
class BackupContents:
    """Contents of a backup.

    Attributes:
        documents: Number of documents.
        chunks: Number of chunks.
        profiles: Number of calibration profiles.
        entries: Number of KV entries.
        bytes: Size of the file without the manifest.
        created: When the backup was made, in Unix seconds.
    """

    documents: int
    chunks: int
    profiles: int
    entries: int
    bytes: int
    created: float


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


# Writing


def write_backup(file: Path, settings: Settings, with_kv: bool) -> BackupContents:
    """Write a backup of the data folder to `file`, atomically. Only the owner can read the file.

    If this raises, `file` is unchanged.

    Args:
        file: Where to write. An older backup there is replaced.
        settings: Settings of the service; they name the data folder and the store.
        with_kv: Also back up the stored KV.

    Raises:
        ConfigError: The data folder has no catalogue.
        CatalogCorrupt: The catalogue is damaged.
        InputError: `file` exists and is not a backup.
        StoreUnavailable: The store is down (only with `with_kv`).
        OSError: The file cannot be written.
    """
    file, source = file.resolve(), settings.data / CATALOG
    if not source.is_file():
        raise ConfigError(f"there is no catalogue in {settings.data}; name the data folder with --data")
    if file.exists() and not starts_with(file, MARK, MAGIC):
        raise InputError(f"{file} exists and is no backup; name another file")
    with _temporary_sibling(file) as work:
        copy = work / CATALOG
        catalog = Catalog.open(source)
        try:
            catalog.copy(copy)
        finally:
            catalog.close()
        with (work / "backup").open("xb") as raw:
            os.fchmod(raw.fileno(), 0o600)
            contents = _write_all(ArchiveWriter(raw), settings, copy, with_kv)
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(work / "backup", file)
        flush_folder(file.parent)
    return contents


def _write_all(tar: ArchiveWriter, settings: Settings, copy: Path, with_kv: bool) -> BackupContents:
    tar.add(MARK, MAGIC + f"{FORMAT}\n".encode())
    # Opening the copy checks it, and its keys belong to exactly the state that is backed up.
    catalog = Catalog.open(copy)
    try:
        (documents, chunks), keys = catalog.count(), catalog.keys()
    finally:
        catalog.close()
    with copy.open("rb") as data, tar.member(CATALOG, copy.stat().st_size):
        while piece := data.read(SLICE):
            tar.write(piece)
    candidates = sorted((settings.data / "profiles").glob("*.json"))
    profiles = [path for path in candidates if PROFILE.fullmatch(f"profiles/{path.name}")]
    for path in profiles:
        tar.add(f"profiles/{path.name}", path.read_bytes())
    entries = 0
    if with_kv:
        store = open_store(settings.store, settings.data, settings.store_timeout, settings.store_ttl)
        try:
            store.ping()
            entries = sum(_write_entry(tar, store, key) for key in sorted(keys))
        finally:
            store.close()
    contents = BackupContents(documents, chunks, len(profiles), entries, tar.written, time.time())
    tar.finish({"format": FORMAT, "ragkv": __version__, **asdict(contents)})
    return contents


def _write_entry(tar: ArchiveWriter, store: KVStore, key: Key) -> bool:
    """Copy an entry. Return False and write nothing if it is missing, damaged, or changed while it was copied."""
    start = tar.mark()
    try:
        head, layers = store.head(key), store.layers(key)
        with tar.member(f"kv/{key}", FRAME.size + 8 * len(layers) + len(head) + sum(layers)):
            tar.write(FRAME.pack(len(layers), len(head)) + struct.pack(f"<{len(layers)}Q", *layers) + head)
            for layer, size in enumerate(layers):
                for offset in range(0, size, SLICE):
                    part = bytearray(min(SLICE, size - offset))
                    store.read(key, [Range(layer, offset, len(part))], memoryview(part))
                    tar.write(part)
        # The head record holds a checksum of every block. If it is unchanged, so is the entry.
        if store.head(key) == head:
            return True
    except (EntryMissing, EntryCorrupt):
        pass
    tar.rewind(start)
    return False


# Restoring


def restore_backup(file: Path, settings: Settings, force: bool) -> RestoredBackup:
    """Replace the data folder of `settings` by a backup.

    If this raises, the data folder is unchanged.

    Args:
        file: The backup.
        settings: Settings of the service; they name the data folder and the store.
        force: Replace a data folder that is not empty. The old folder is renamed and kept.

    Raises:
        InvalidBackup: The file is not a backup, or it is damaged.
        InputError: The data folder is not empty and `force` is not set.
        CatalogCorrupt: The catalogue in the backup is damaged.
        ConfigError: The catalogue in the backup belongs to a newer ragkv.
        OSError: The data folder cannot be written.
    """
    data = settings.data.resolve()
    with file.open("rb") as raw:
        archive = ArchiveReader(raw, file, _is_member_name)
        found = _verify(archive, file)
        if data.exists() and any(data.iterdir()) and not force:
            raise InputError(f"{data} is not empty; --force puts the backup in its place and keeps that folder aside")
        with _temporary_sibling(data) as work:
            fresh = work / "data"
            fresh.mkdir()
            _extract(archive, fresh)
            stored = _restore_entries(archive, file, settings, fresh) if found.entries else 0
            aside = _put_in_place(fresh, data)
    return RestoredBackup(found, stored, aside)


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


# Files


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


@contextmanager
def _temporary_sibling(path: Path) -> Iterator[Path]:
    """Create a folder on the same disk as `path`, and remove it afterwards."""
    parent = path if path.is_mount() else path.parent
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
