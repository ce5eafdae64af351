"""Backup: one file with everything that cannot be made anew, and on request with the KV that can.

A plain tar (archive.py), so that any tar shows it; nothing in it is compressed, KV hardly can be:

    ragkv-backup           magic and format: tells a backup from other files
    catalog.sqlite         SQLite's own online copy: one state, while others write
    profiles/<name>.json   what `ragkv calibrate` found
    kv/<key>               layers u32 · head length u64 · one u64 per layer: its length · head · layers; little-endian
    manifest.json          counts, versions, checksum

The index is a view of the catalogue and is built at the first question. Of the KV store there are the entries that
the catalogue refers to, copied through KVStore without knowing what they mean, so a backup may move between backends.
An entry that changes or goes while it is copied is left out: it is a cache.

A restore reads the whole file before it changes anything. It builds a folder beside the data folder and renames it at
the end, so there is the old folder, or the new one. Names in the tar are looked up, never followed: what is not one of
the above is no backup. KV is put like any other, so it goes to the store that is set now and its lifetime begins anew.
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
    """What a backup holds. bytes: of the file, manifest not counted · created: Unix seconds."""

    documents: int
    chunks: int
    profiles: int
    entries: int
    bytes: int
    created: float


@dataclass(frozen=True)
class RestoredBackup:
    """found: in the backup · stored: KV entries that the store took · aside: where the old data folder is now."""

    found: BackupContents
    stored: int
    aside: Path | None


# Write


def write_backup(file: Path, settings: Settings, with_kv: bool) -> BackupContents:
    """Write a backup of the data folder to `file`, at once and whole; readable by its owner only.

    Raises ConfigError (no catalogue), CatalogCorrupt, InputError (`file` is there and no backup), StoreUnavailable
    (`with_kv`, and the store is down), OSError; `file` is then as it was.
    """
    file, source = file.resolve(), settings.data / CATALOG
    if not source.is_file():
        raise ConfigError(f"there is no catalogue in {settings.data}; name the data folder with --data")
    if file.exists() and not starts_with(file, MARK, MAGIC):
        raise InputError(f"{file} is there and is no backup; name another file")
    with _folder_beside(file) as work:
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
    # Opened: it is checked, and its keys are those of the very state that goes into the backup.
    catalog = Catalog.open(copy)
    try:
        (documents, chunks), keys = catalog.count(), catalog.keys()
    finally:
        catalog.close()
    with copy.open("rb") as data, tar.member(CATALOG, copy.stat().st_size):
        while piece := data.read(SLICE):
            tar.write(piece)
    found = sorted((settings.data / "profiles").glob("*.json"))
    profiles = [path for path in found if PROFILE.fullmatch(f"profiles/{path.name}")]
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
    tar.end({"format": FORMAT, "ragkv": __version__, **asdict(contents)})
    return contents


def _write_entry(tar: ArchiveWriter, store: KVStore, key: Key) -> bool:
    """Copy an entry; False, and nothing written, when it is not there, damaged, or changes meanwhile."""
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
        # The head holds a checksum of every block: an entry with this head is the one that was read.
        if store.head(key) == head:
            return True
    except (EntryMissing, EntryCorrupt):
        pass
    tar.back(start)
    return False


# Read


def restore_backup(file: Path, settings: Settings, force: bool) -> RestoredBackup:
    """Make the data folder of `settings` from a backup.

    Raises InvalidBackup, InputError (the data folder is not empty, without `force`), CatalogCorrupt, ConfigError,
    OSError; the data folder is then as it was.
    """
    data = settings.data.resolve()
    with file.open("rb") as raw:
        archive = ArchiveReader(raw, file, _known)
        found = _verify(archive, file)
        if data.exists() and any(data.iterdir()) and not force:
            raise InputError(f"{data} is not empty; --force puts the backup in its place and keeps that folder aside")
        with _folder_beside(data) as work:
            fresh = work / "data"
            fresh.mkdir()
            _extract(archive, fresh)
            stored = _restore_entries(archive, file, settings, fresh) if found.entries else 0
            aside = _put_in_place(fresh, data)
    return RestoredBackup(found, stored, aside)


def _known(name: str) -> bool:
    return name in (MARK, CATALOG) or bool(PROFILE.fullmatch(name) or ENTRY.fullmatch(name))


def _verify(archive: ArchiveReader, file: Path) -> BackupContents:
    """Raises InvalidBackup unless it is a backup that we can read, and whole."""
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
    """Catalogue and profiles. Raises CatalogCorrupt, ConfigError (of a newer ragkv)."""
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
    """Put the KV entries; returns how many the store took. What it does not take is encoded when it is needed."""
    stored = 0
    store = open_store(settings.store, folder, settings.store_timeout, settings.store_ttl, settings.store_bytes)
    try:
        for name, start, size in archive.members():
            entry = ENTRY.fullmatch(name)
            if entry is None:
                continue
            head, body = _entry(memoryview(archive.part(start, size)), file)
            with suppress(StoreError):
                store.put(Key(entry[1]), head, body)
                stored += 1
    finally:
        store.close()
    return stored


def _entry(data: memoryview, file: Path) -> tuple[bytes, list[memoryview]]:
    """(head, layers of the body) of an entry as it stands in a backup."""
    layers, head_size = FRAME.unpack_from(data) if len(data) >= FRAME.size else (MAX_LAYERS + 1, 0)
    start = FRAME.size + 8 * layers
    if layers > MAX_LAYERS or start + head_size > len(data):
        raise InvalidBackup(f"{file} holds an entry that is none")
    sizes = struct.unpack_from(f"<{layers}Q", data, FRAME.size)
    if start + head_size + sum(sizes) != len(data):
        raise InvalidBackup(f"{file} holds an entry that is none")
    head = bytes(data[start : start + head_size])
    body, at = [], start + head_size
    for size in sizes:
        body.append(data[at : at + size])
        at += size
    return head, body


# Files


def _put_in_place(fresh: Path, data: Path) -> Path | None:
    """`fresh` becomes `data`; returns where what was there is now, None when it was empty."""
    if data.is_mount():
        # It cannot be renamed. It is empty, or this fails; the catalogue comes last, so before it there is nothing.
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
def _folder_beside(path: Path) -> Iterator[Path]:
    """A folder on the same disk as `path`, gone afterwards."""
    parent = path if path.is_mount() else path.parent
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
