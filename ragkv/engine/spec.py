"""Specs of methods and policies in a request: NAME, or NAME:FIELD=VALUE,... with fields of a frozen dataclass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ragkv.errors import InputError

Fields = Mapping[str, Any]
"""Maps field names to types."""


def fields_of(kind: Callable[..., Any], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass that a request may set, with their types.

    Args:
        kind: The dataclass.
        without: Fields that a request may not set.
    """
    types = _types(kind)
    own_first = sorted(fields(kind), key=lambda f: f.kw_only is True)  # type: ignore[arg-type]  # shared ones come last
    return {f.name: types[f.name] for f in own_first if f.name not in without}


@cache
def _types(kind: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the types of a dataclass. Resolving them takes half a millisecond, and every question asks for all."""
    return get_type_hints(kind)


def parse(spec: str, what: str, known: Mapping[str, Fields]) -> tuple[str, dict[str, Any]]:
    """Parse a spec.

    Args:
        spec: NAME or NAME:FIELD=VALUE,...
        what: Kind of thing that the spec names, for messages: `method`, for example.
        known: Known names and their fields.

    Returns:
        The name and the values of the given fields.

    Raises:
        InputError: The name, a field or a value is not valid. The message lists the valid ones.
    """
    name, _, given = spec.partition(":")
    if name not in known:
        raise InputError(f"{what} {name!r} does not exist; choose one of {', '.join(known)}")
    if given and not known[name]:
        raise InputError(f"{what} {name} has no fields to set")
    values: dict[str, Any] = {}
    for pair in given.split(",") if given else ():
        field, _, text = pair.partition("=")
        if field not in known[name]:
            raise InputError(f"{what} {name} has no field {field!r}; it has {', '.join(known[name])}")
        if field in values:
            raise InputError(f"{what} {name}: {field} is given twice")
        values[field] = _convert(f"{what} {name}: {field}", known[name][field], text)
    return name, values


def _convert(field: str, kind: Any, text: str) -> Any:
    """Convert `text` to `kind`: bool, int, float, a value of a Literal, or a tuple of these separated by "/"."""
    expected = _expected(kind)
    try:
        if get_origin(kind) is Literal:
            return dict(zip(get_args(kind), get_args(kind), strict=True))[text]
        if get_origin(kind) is tuple:
            return tuple(_convert(field, get_args(kind)[0], part) for part in text.split("/"))
        converters: Mapping[Any, Callable[[str], Any]] = {
            int: int,
            float: float,
            bool: {"true": True, "false": False}.__getitem__,
        }
        return converters[kind](text)
    except (KeyError, ValueError):
        raise InputError(f"{field} is {expected}, not {text!r}") from None


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        return f"{_expected(get_args(kind)[0])}, or several with / between them"
    return {int: "a whole number", float: "a number", bool: "true or false"}[kind]
