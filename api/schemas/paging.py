"""The parameter `after` of listings: the place of the last document of a page, as text.

Sorted by id it is the document's id. Otherwise it is JSON, [sort value, id], so that the next page begins at the right
place also if the document was changed or deleted meanwhile.
"""

from __future__ import annotations

import json

from ragkv.catalog import DocumentOrder
from ragkv.catalog.limits import MAX_NAME
from ragkv.errors import InputError


def write_place(place: tuple[str | float, str], order: DocumentOrder) -> str:
    """Write the place of a document in a listing (`DocumentOrder.place`)."""
    return place[1] if order.sort == "id" else json.dumps(place, ensure_ascii=False, separators=(",", ":"))


def read_place(after: str, order: DocumentOrder) -> tuple[str | float, str] | None:
    """Read what `write_place` wrote; None for "", the first page.

    Raises:
        InputError: The text is not from a listing in this order.
    """
    if not after:
        return None
    if order.sort == "id" and len(after) > MAX_NAME:
        raise _foreign(order)
    if order.sort == "id":
        return after, after
    try:
        value, document_id = json.loads(after, parse_constant=_no_constant)
    except (ValueError, TypeError, RecursionError):
        raise _foreign(order) from None
    kinds = (str,) if order.sort == "title" else (int, float)
    if type(value) not in kinds or not isinstance(document_id, str) or not _storable(value, document_id):
        raise _foreign(order)
    return value, document_id


def _storable(value: str | float, document_id: str) -> bool:
    """Whether SQLite can compare with these values."""
    if not isinstance(value, str) and not -(2**63) <= value < 2**63:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in f"{value}{document_id}")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


def _foreign(order: DocumentOrder) -> InputError:
    return InputError(f"after: send the `after` of a page that was sorted by {order.sort!r}, or leave it out")
