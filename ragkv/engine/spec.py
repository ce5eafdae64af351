"""What a request asks for by name: NAME, or NAME:FIELD=VALUE,… with the fields of a frozen dataclass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ragkv.errors import InputError

Fields = Mapping[str, Any]
"""Field name -> type."""


def fields_of(kind: Callable[..., Any], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a request may set of a dataclass: name -> type."""
    types = get_type_hints(kind)
    return {f.name: types[f.name] for f in fields(kind) if f.name not in without}  # type: ignore[arg-type]


def parse(spec: str, what: str, known: Mapping[str, Fields]) -> tuple[str, dict[str, Any]]:
    """(name, values of the fields given). what: `method`, for messages · known: names and their fields.

    Raises InputError telling what there is.
    """
    name, _, given = spec.partition(":")
    if name not in known:
        raise InputError(f"{what} {name!r} does not exist; choose one of {', '.join(known)}")
    if given and not known[name]:
        raise InputError(f"{what} {name} has no fields to set")
    chosen: dict[str, Any] = {}
    for pair in given.split(",") if given else ():
        field, _, text = pair.partition("=")
        if field not in known[name]:
            raise InputError(f"{what} {name} has no field {field!r}; it has {', '.join(known[name])}")
        if field in chosen:
            raise InputError(f"{what} {name}: {field} is given twice")
        chosen[field] = _value(f"{what} {name}: {field}", known[name][field], text)
    return name, chosen


def _value(field: str, kind: Any, text: str) -> Any:
    """`text` as a field of type `kind`: bool, int, float, one of a Literal, or numbers with "/" between them."""
    expected = _expected(kind)
    try:
        if get_origin(kind) is Literal:
            return dict(zip(get_args(kind), get_args(kind), strict=True))[text]
        if get_origin(kind) is tuple:
            return tuple(get_args(kind)[0](part) for part in text.split("/"))
        readers: Mapping[Any, Callable[[str], Any]] = {
            int: int,
            float: float,
            bool: {"true": True, "false": False}.__getitem__,
        }
        return readers[kind](text)
    except (KeyError, ValueError):
        raise InputError(f"{field} is {expected}, not {text!r}") from None


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        return f"{'whole ' if get_args(kind)[0] is int else ''}numbers with / between them"
    return {int: "a whole number", float: "a number", bool: "true or false"}[kind]
