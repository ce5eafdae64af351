"""Claims protect KV that an ingest is storing for chunks that are not in the catalogue yet.

An ingest claims all keys of a document before it looks up the first of them in the store. The transaction that puts
the document into the catalogue also releases the claim. A process that removes unreferenced KV does so inside a write
transaction, after `unclaimed` has listed the keys that no chunk refers to and no claim names. So an ingest never
relies on an entry that another process is removing. This holds for every store, whatever the age of the entry.

With PostgreSQL the claim and the commit run together with other writers, and the removal runs alone (database.py): it
waits for claims that are being written, and claims wait for it.

An ingest renews its claim while it works. A claim that was not renewed for `grace` seconds belongs to a dead process.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from sqlalchemy import bindparam, delete, exists, insert, select, update

from ragkv.catalog.statements import upsert, values
from ragkv.catalog.tables import chunks, claimed, claims, facts
from ragkv.catalog.transaction import Transaction
from ragkv.types import Key

_FINGERPRINT = select(facts.c.value).where(facts.c.name == "fingerprint")
_RECORD = upsert(facts, ["name"])
_INSERT = insert(claims).returning(claims.c.row)
_NAME = insert(claimed)
_RENEW = update(claims).where(claims.c.row == bindparam("claim"))
_RELEASE = delete(claims).where(claims.c.row == bindparam("claim"))
_DROP = delete(claims).where(claims.c.renewed <= bindparam("before"))
_KEYS = values("keys", "text")
_LIVE = (
    select(1)
    .select_from(claimed.join(claims, claims.c.row == claimed.c.claim))
    .where(claimed.c.key == _KEYS.c.value, claims.c.renewed > bindparam("since"))
    .where(claimed.c.claim != bindparam("mine"))
)
_UNCLAIMED = (
    select(_KEYS.c.value)
    .distinct()
    .where(~exists(select(1).select_from(chunks).where(chunks.c.key == _KEYS.c.value)), ~exists(_LIVE))
)


def claim(transaction: Transaction, keys: Iterable[Key], fingerprint: str) -> int:
    """Claim keys and return the id of the claim. fingerprint: of the model that produces their KV; it is recorded."""
    if transaction.scalar(_FINGERPRINT) != fingerprint:  # writing it makes other claims wait
        transaction.execute(_RECORD, {"name": "fingerprint", "value": fingerprint})
    row: int = transaction.scalar(_INSERT, {"renewed": time.time()})
    transaction.execute_all(_NAME, [{"key": key, "claim": row} for key in sorted(set(keys))])
    return row


def renew(transaction: Transaction, claim_id: int) -> None:
    """Record that the claim's ingest is still running."""
    transaction.execute(_RENEW, {"claim": claim_id, "renewed": time.time()})


def release(transaction: Transaction, claim_id: int) -> None:
    """Delete a claim that is no longer needed."""
    transaction.execute(_RELEASE, {"claim": claim_id})


def drop_expired(transaction: Transaction, grace: float) -> None:
    """Delete the claims of dead processes: those that were not renewed for `grace` seconds."""
    transaction.execute(_DROP, {"before": time.time() - grace})


def unclaimed(transaction: Transaction, keys: Iterable[Key], grace: float, mine: int | None) -> list[Key]:
    """Return those of `keys` that no chunk refers to and no live claim names. The claim `mine` does not count."""
    parameters = {"keys": transaction.array(keys), "since": time.time() - grace, "mine": mine or 0}  # no row is 0
    return [Key(key) for (key,) in transaction.execute(_UNCLAIMED, parameters)]


def fingerprint(transaction: Transaction) -> str | None:
    """Return the fingerprint recorded with the latest claim, or None before the first claim."""
    found: str | None = transaction.scalar(_FINGERPRINT)
    return found
