"""`ragkv bench store`: sparse loads from disk and Redis."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.common import Json, Store, out, progress, settings_from, write_json

if TYPE_CHECKING:
    from benchmarks.store import StoreResult


def store(
    file: Json = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed loads of each reader.")] = 100,
    layer_mib: Annotated[int, typer.Option(min=4, max=512, help="Size of each of the entry's 8 layers, MiB.")] = 16,
    store: Store = None,
) -> int:
    """Sparse loads from disk and Redis, compared with other readers; starts a redis-server unless --store names one."""
    settings = settings_from(None, store, None, None)
    from benchmarks.store import StoreParams
    from benchmarks.store import store as measure

    params = StoreParams(layer_bytes=layer_mib * 2**20, repeat=repeat)
    with progress() as report:
        result = measure(settings.store, settings.store_timeout, params, report)
    write_json(file, dataclasses.asdict(result))
    _show_store(result)
    return 0


def _show_store(result: StoreResult) -> None:
    """Print the figures as aligned text; GB are 10^9 bytes."""
    console = out()
    console.print(f"Redis: {result.server}; redis-py {'with' if result.hiredis else 'without'} hiredis")
    console.print(
        f"{result.cores} cores; {result.share:.0%} of the blocks of an entry of {result.entry_bytes / 2**20:.0f} MiB, "
        f"median of {result.repeat} loads"
    )
    console.print(f"{'range':<9}{'reader':<16}{'GB/s':>7}{'p50 ms':>9}{'p99 ms':>9}  checksums", style="bold")
    for row in sorted(result.rows, key=lambda row: row.range_bytes or row.bytes):
        size = f"{row.range_bytes // 1024} KiB" if row.range_bytes else "whole"
        checked = "verified" if row.verified else "none"
        console.print(f"{size:<9}{row.reader:<16}{row.gb_per_s:>7.2f}{row.p50:>9.1f}{row.p99:>9.1f}  {checked}")
    for one in result.comparisons:
        console.print(
            f"redis at {one.range_bytes // 1024} KiB: {one.to_get:.2f}x redis-py GET, {one.to_socket:.2f}x the best "
            f"plain socket, {one.to_whole:.3f} of the time for the whole entry"
        )
