"""Garbage collection: removes entries of the KV store that nothing refers to.

    orphan      An entry of the model that ingested last to which no chunk refers. A crash left it behind, or the store
                was down when its document was removed.
    foreign     An entry of another model, other settings or another schema: an old one of this catalogue, or one of
                another service that uses the same Redis. The two cases look the same, so foreign entries are removed
                only on request.
    damaged     An entry without a readable head record to which no chunk refers.
    expired     An entry past the store's time to live.
    temporary   A temporary file of a writer that died.

An entry that a chunk refers to always stays, whatever model produced it. So does the KV that a question stored under
the present model for a chunk that another model ingested. The catalogue does not hold its key, but the key can be
computed.

Garbage collection is safe while the service runs; see catalog/claims.py. Entries are removed in batches, each
inside a write transaction in which no chunk refers to them and no ingest has claimed them. An ingest claims its keys
before it looks them up in the store. The age of an entry is not considered; Redis does not know it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ragkv.catalog import Catalog
from ragkv.errors import EntryCorrupt, EntryMissing
from ragkv.store.base import KVStore, StoreStats
from ragkv.store.format.head import chunk_key, made_by
from ragkv.store.format.seal import CHECKSUMS, Seal
from ragkv.types import GRACE_SECONDS, Key

BATCH = 100
"""Entries that are removed in one write transaction, which blocks other writers."""

GarbageKind = Literal["orphan", "foreign", "damaged"]
KINDS: tuple[GarbageKind, ...] = ("orphan", "foreign", "damaged")


@dataclass(frozen=True)
class CollectedGarbage:
    """Entries and bytes of each kind that a garbage collection found.

    Attributes:
        orphan: Orphaned entries.
        foreign: Foreign entries, whether or not they were to be removed.
        damaged: Damaged entries. Their size is unknown and counts as 0.
        expired: Entries past their time to live.
        temporary: Temporary files.
        kept: Number of entries that are no garbage of any kind.
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
) -> CollectedGarbage:
    """Remove garbage from a KV store.

    Args:
        store: The store to clean.
        catalog: The catalogue whose chunks refer to the store.
        foreign: Also remove foreign entries.
        dry_run: Only count the garbage.
        grace: Seconds after which an ingest that did not renew its claim counts as dead.
        seal: The seal that entries are stored under; it determines their keys.

    Raises:
        StoreError: The store failed. Entries that were removed before stay removed.
    """
    sweep = store.sweep(dry_run)
    if not dry_run:
        catalog.drop_expired_claims(grace)
    present = list(store.keys())
    # Read the keys after listing the store: entries stored later are not in `present`, and a chunk that was committed
    # meanwhile is in `used`.
    used, entries, sizes = catalog.keys(), Counter[GarbageKind](), Counter[GarbageKind]()
    candidates = [key for key in present if key not in used]
    current = _current_keys(catalog, seal) if candidates else set()
    for start in range(0, len(candidates), BATCH):
        batch = [key for key in candidates[start : start + BATCH] if key not in current]
        kinds = dict(_classify(store, catalog.fingerprint(), batch))
        with catalog.removing(kinds, grace) as removable:
            for key in removable:
                kind, size = kinds[key]
                entries[kind] += 1
                sizes[kind] += size
                if not dry_run and (foreign or kind != "foreign"):
                    store.delete(key)
    orphan, foreign_found, damaged = (StoreStats(entries[kind], sizes[kind]) for kind in KINDS)
    return CollectedGarbage(
        orphan, foreign_found, damaged, sweep.expired, sweep.temporary, len(present) - entries.total()
    )


def _current_keys(catalog: Catalog, seal: Seal) -> set[Key]:
    """Return the keys that all chunks have under the model that ingested last."""
    fingerprint = catalog.fingerprint()
    if fingerprint is None:
        return set()
    return {chunk_key(fingerprint, seal.salt(collection), tokens) for collection, tokens in catalog.iter_chunk_tokens()}


def _classify(
    store: KVStore, fingerprint: str | None, keys: list[Key]
) -> Iterator[tuple[Key, tuple[GarbageKind, int]]]:
    """Yield (key, (kind of garbage that it would be, bytes)) of the entries that still exist."""
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
        with suppress(EntryMissing, EntryCorrupt):  # Redis evicted a part; the rest is still garbage.
            size += sum(store.layers(key))
        yield key, (kind, size)
