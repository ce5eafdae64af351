"""Filters of other frameworks as filters of ragkv: `{key: value or [values]}`, all of which must match."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ragkv.errors import InputError
from ragkv.types import Filter, Scalar

EQUAL, IN = "==", "in"


def filter_of(conditions: Iterable[tuple[str, str, Any]]) -> Filter:
    """Return the filter that demands all conditions.

    Args:
        conditions: (key, operator, value) of each.

    Raises:
        InputError: A condition cannot be expressed.
    """
    found: dict[str, Scalar | list[Scalar]] = {}
    for key, operator, value in conditions:
        if operator not in (EQUAL, IN):
            raise unsupported(f"the operator {operator!r}")
        if key in found:
            raise unsupported(f"two conditions on {key!r}")
        found[key] = list(value) if operator == IN else value
    return found


def unsupported(what: str) -> InputError:
    """Return the error that names what ragkv's filters do not have."""
    return InputError(f"filters of ragkv do not have {what}", f"use {EQUAL!r} and {IN!r}, each key once, joined by AND")
