"""`ragkv gc`, `ragkv backup`, `ragkv restore`: maintenance of the stored data. None of them loads a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.common import Data, Store, err, out, printable, settings_from
from ragkv.errors import ConfigError
from ragkv.types import GRACE_SECONDS

_KINDS = {
    "orphan": "belong to no chunk",
    "expired": "are past their time",
    "damaged": "are damaged and belong to no chunk",
    "foreign": "are of other models, settings or services",
    "temporary": "files were left by writers that died",
}


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    fingerprints: Annotated[
        bool,
        typer.Option("--fingerprints", help="Also what other models and settings stored; it may be another service's."),
    ] = False,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds after which a silent ingest counts as dead.", show_default=True)
    ] = GRACE_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    data: Data = None,
    store: Store = None,
) -> int:
    """Remove stored KV that is no longer needed. Safe while a service runs."""
    settings = settings_from(data, store)
    where = settings.catalog_address
    if isinstance(where, Path) and not where.is_file():
        # With a new, empty catalogue, everything in a shared store would count as garbage.
        raise ConfigError(f"there is no catalogue in {settings.data}; name the data folder with --data")
    from ragkv.admin.gc import collect_garbage
    from ragkv.catalog import Catalog
    from ragkv.store import open_store
    from ragkv.store.format.seal import make_seal

    opened = open_store(settings.store, settings.data, settings.store_timeout, settings.store_ttl)
    catalog = Catalog.open(where, opened.give_way)
    try:
        opened.ping()
        seal = make_seal(settings.store_secret.get_secret_value())
        found = collect_garbage(opened, catalog, foreign=fingerprints, dry_run=dry_run, grace=grace, seal=seal)
    finally:
        opened.close()
        catalog.close()
    if as_json:
        typer.echo(json.dumps({"dry_run": dry_run, "fingerprints": fingerprints, **asdict(found)}))
        return 0
    console = out()
    for kind, words in _KINDS.items():
        stats = getattr(found, kind)
        if stats.entries:
            left = dry_run or (kind == "foreign" and not fingerprints)
            done = "left" if left else "removed"
            console.print(f"{done:<8} {stats.entries:>8} {_size(stats.bytes):>12}  {words}")
    console.print(f"{'kept':<8} {found.kept:>8}")
    if found.foreign.entries and not fingerprints:
        err().print("--fingerprints removes what other models, settings or services stored", style="dim")
    return 0


def backup(
    file: Annotated[Path, typer.Argument(help="File to write; an older backup there is replaced.", metavar="FILE")],
    with_kv: Annotated[bool, typer.Option("--with-kv", help="The stored KV as well.")] = False,
    data: Data = None,
    store: Store = None,
) -> int:
    """Write catalogue, profiles and, if asked for, the stored KV to one file. A running service is not interrupted."""
    settings = settings_from(data, store)
    from ragkv.admin.backup import write_backup

    done = write_backup(file, settings, with_kv)
    console = out()
    console.print(
        f"{done.documents} documents, {done.chunks} chunks, {done.profiles} profiles, {done.entries} KV entries"
    )
    console.print(f"{_size(done.bytes)} in {printable(str(file))}")
    return 0


def restore(
    file: Annotated[Path, typer.Argument(help="A backup.", metavar="FILE")],
    force: Annotated[
        bool,
        typer.Option("--force", help="Put it in place of a data folder that is not empty; that one is kept aside."),
    ] = False,
    data: Data = None,
    store: Store = None,
) -> int:
    """Make a data folder from a backup. Stop the service first.

    Where RAGKV_CATALOG names a database, fill that; it must be empty.
    """
    settings = settings_from(data, store)
    from ragkv.admin.restore import restore_backup

    done = restore_backup(file, settings, force)
    console = out()
    found = done.found
    place = "the database" if settings.catalog.get_secret_value() else settings.data
    console.print(f"{found.documents} documents, {found.chunks} chunks, {found.profiles} profiles in {place}")
    if found.entries:
        console.print(f"{done.stored} of {found.entries} KV entries in the store; the others are encoded when needed")
    if done.aside:
        err().print(f"what was there before is now in {printable(str(done.aside))}", style="dim")
    return 0


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
