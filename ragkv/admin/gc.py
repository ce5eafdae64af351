"""Collection of garbage: what lies in the KV store for nobody.

    orphan     of the model that ingested last, and no chunk of the catalogue is its: a crash left it, or a store that
               was down when its document was removed
    foreign    of another model, other settings or another schema: old ones of this catalogue, or those of another
               service that uses the same Redis. Nobody can tell these apart, so they go only when that is asked for
    damaged    no readable head, and no chunk refers to it
    expired    past the store's lifetime        temporary   files of writers that died

What a chunk refers to always stays, whatever made it. So does KV that a question stored anew under the present model
for a chunk which another one has ingested: the catalogue does not name its key, but its key can be computed.

Safe beside a running service: see catalog/claims.py. Entries are removed inside a write transaction, a hundred at a
time, in which nobody refers to them and no ingest has claimed them; an ingest claims before it looks into the store.
How old an entry is plays no part, which is as well, because Redis could not tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ragkv.catalog import GRACE_SECONDS, Catalog
from ragkv.errors import EntryCorrupt, EntryMissing
from ragkv.store.base import KVStore, StoreStats
from ragkv.store.format.head import chunk_key, made_by
from ragkv.store.format.seal import CHECKSUMS, Seal
from ragkv.types import Key

AT_ONCE = 100

GarbageKind = Literal["orphan", "foreign", "damaged"]
KINDS: tuple[GarbageKind, ...] = ("orphan", "foreign", "damaged")


@dataclass(frozen=True)
class GarbageCollector:
    """How much of each kind there was, in entries and bytes; of damaged entries the size is not known.

    kept: entries that stay, foreign ones that were not asked for not among them.
    """

    orphan: StoreStats
    foreign: StoreStats
    damaged: StoreStats
    expired: StoreStats
    temporary: StoreStats
    kept: int


def collect_garbage(
    store: KVStore,
    catalog: Catalog,
    *,
    foreign: bool = False,
    dry_run: bool = False,
    grace: float = GRACE_SECONDS,
    seal: Seal = CHECKSUMS,
) -> GarbageCollector:
    """Remove garbage; with `dry_run` only count it. seal: what entries are stored under.

    foreign: that of other models too · grace: seconds after which an ingest that gave no sign of life counts as dead.
    Raises StoreError; what was removed until then stays removed.
    """
    swept = store.sweep(dry_run)
    if not dry_run:
        catalog.forget_claims(grace)
    present = list(store.keys())
    # Read after the list: what is stored later is not on it, and what is referred to by now is not garbage.
    used, entries, sizes = catalog.keys(), Counter[GarbageKind](), Counter[GarbageKind]()
    loose = [key for key in present if key not in used]
    wanted = _wanted(catalog, seal) if loose else set()
    for start in range(0, len(loose), AT_ONCE):
        batch = [key for key in loose[start : start + AT_ONCE] if key not in wanted]
        kinds = dict(_look(store, catalog.fingerprint(), batch))
        with catalog.removing(kinds, grace) as free:
            for key in free:
                kind, size = kinds[key]
                entries[kind] += 1
                sizes[kind] += size
                if not dry_run and (foreign or kind != "foreign"):
                    store.delete(key)
    orphan, other, damaged = (StoreStats(entries[kind], sizes[kind]) for kind in KINDS)
    return GarbageCollector(orphan, other, damaged, swept.expired, swept.temporary, len(present) - entries.total())


def _wanted(catalog: Catalog, seal: Seal) -> set[Key]:
    """The keys of all chunks under the model that ingested last."""
    fingerprint = catalog.fingerprint()
    if fingerprint is None:
        return set()
    return {chunk_key(fingerprint, seal.salt(collection), tokens) for collection, tokens in catalog.contents()}


def _look(store: KVStore, fingerprint: str | None, keys: list[Key]) -> Iterator[tuple[Key, tuple[GarbageKind, int]]]:
    """(key, (what it would be if nobody wanted it, its bytes)) of the entries that are still there."""
    for key in keys:
        try:
            head = store.head(key)
            kind: GarbageKind = "orphan" if made_by(head, key) == fingerprint else "foreign"
        except EntryMissing:
            continue
        except EntryCorrupt:
            yield key, ("damaged", 0)
            continue
        size = len(head)
        with suppress(EntryMissing, EntryCorrupt):  # A part of it was evicted; the rest is garbage all the same.
            size += sum(store.layers(key))
        yield key, (kind, size)
