"""What an hour of the machine costs, as a user has told it: one row of the facts."""

from __future__ import annotations

from sqlalchemy import select

from ragkv.catalog.statements import upsert
from ragkv.catalog.tables import facts
from ragkv.catalog.transaction import Transaction
from ragkv.types import HourPrice

_NAME = "hour_price"
_FIND = select(facts.c.value).where(facts.c.name == _NAME)
_RECORD = upsert(facts, ["name"])


def find(transaction: Transaction) -> HourPrice | None:
    """Return the price, or None if nobody has told it."""
    return HourPrice.read(transaction.scalar(_FIND) or "")


def record(transaction: Transaction, price: HourPrice | None) -> None:
    """Record the price; None takes it back."""
    transaction.execute(_RECORD, {"name": _NAME, "value": "" if price is None else str(price)})
