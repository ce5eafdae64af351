"""Versions: what is known of the present version of each document beside the table `documents`.

With SQLite, triggers write the number and the bytes (derived.py).

Every function runs inside a write transaction of the caller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import bindparam, update

from ragkv.catalog.statements import upsert
from ragkv.catalog.tables import versions
from ragkv.catalog.transaction import Transaction

_SET_PAGES = update(versions).where(versions.c.document == bindparam("of"))
_RECORD = upsert(
    versions,
    ["document"],
    lambda new: {"number": versions.c.number + new.number, "bytes": new.bytes, "pages": new.pages},
)


def record(transaction: Transaction, document: int, text: str, pages: Sequence[tuple[int, int]], differs: bool) -> None:
    """Record a version that was just written.

    Args:
        transaction: The transaction.
        document: Row of the document.
        text: Its text.
        pages: Where its pages begin.
        differs: Whether the content differs from the last version, if there was one.
    """
    listed = json.dumps(list(pages))
    if transaction.dialect == "sqlite":
        transaction.execute(_SET_PAGES, {"of": document, "pages": listed})
        return
    # A first version gets number 1, which is also what a different content adds.
    number, size = int(differs), len(text.encode())
    transaction.execute(_RECORD, {"document": document, "number": number, "bytes": size, "pages": listed})
