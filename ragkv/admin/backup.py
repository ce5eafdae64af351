"""Backup: one file with everything that cannot be rebuilt, and on request with the stored KV. restore.py reads it.

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
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ragkv import __version__
from ragkv.admin.archive import SLICE, ArchiveWriter, starts_with
from ragkv.catalog import Catalog
from ragkv.config import Settings
from ragkv.errors import ConfigError, EntryCorrupt, EntryMissing, InputError
from ragkv.store import open_store
from ragkv.store.base import KVStore, Range
from ragkv.store.disk_files import flush_folder
from ragkv.types import Key

MARK, MAGIC, FORMAT = "ragkv-backup", b"ragkv backup ", 1
CATALOG = "catalog.sqlite"
PROFILE = re.compile(r"profiles/([\w-]{1,80}\.json)", re.ASCII)
FRAME = struct.Struct("<IQ")


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


def write_backup(file: Path, settings: Settings, with_kv: bool) -> BackupContents:
    """Write a backup of the data folder to `file`, atomically. Only the owner can read the file.

    If this raises, `file` is unchanged.

    Args:
        file: Where to write. An older backup there is replaced.
        settings: Settings of the service; they name the data folder and the store.
        with_kv: Also back up the stored KV.

    Raises:
        ConfigError: The data folder has no catalogue, or the catalogue is in PostgreSQL.
        CatalogCorrupt: The catalogue is damaged.
        InputError: `file` exists and is not a backup.
        StoreUnavailable: The store is down (only with `with_kv`).
        OSError: The file cannot be written.
    """
    if settings.catalog.get_secret_value():
        hint = "back it up with pg_dump, and the profiles in the data folder with cp"
        raise ConfigError("the catalogue is in PostgreSQL, and a backup holds a file", hint)
    file, source = file.resolve(), settings.data / CATALOG
    if not source.is_file():
        raise ConfigError(f"there is no catalogue in {settings.data}; name the data folder with --data")
    if file.exists() and not starts_with(file, MARK, MAGIC):
        raise InputError(f"{file} exists and is no backup; name another file")
    with temporary_sibling(file) as work:
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
    tar.write_manifest({"format": FORMAT, "ragkv": __version__, **asdict(contents)})
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


@contextmanager
def temporary_sibling(path: Path) -> Iterator[Path]:
    """Create a folder on the same disk as `path`, and remove it afterwards."""
    parent = path if path.is_mount() else path.parent
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
