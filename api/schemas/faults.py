"""Validation errors in the words of the API: the place in the request, and what it must be.

Pydantic names its own parts in both: the tag of a union in the place (`body.document.id`), classes and functions in the
message. A client knows neither.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

_MESSAGES = {
    "missing": "is required",
    "extra_forbidden": "is no field of this request",
    "unexpected_keyword_argument": "is no field of this request",
    "json_invalid": "is not valid JSON",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "none_required": "must be null",
}
"""Messages by pydantic's type of error."""
_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}
_SHOULD = re.compile(r"^(Value error, |(\w+ )?should )")
_PLACES = 8
"""Parts of a place that are shown."""


def readable(
    errors: Iterable[Mapping[str, Any]], body: Any = None, fields: Collection[str] = ()
) -> list[dict[str, str]]:
    """Convert validation errors to [{"at", "message"}], one for each place.

    Args:
        errors: As pydantic or FastAPI describes them.
        body: The body that was validated. A step in a place that it does not have is a name of pydantic.
        fields: Names of the fields that a body may have, of which one that is like an unknown name is told.
    """
    found: dict[str, list[str]] = {}
    for error in errors:
        messages = found.setdefault(_place(error, body), [])
        message = _message(error) + (_meant(error, fields) if error["type"] in _UNKNOWN else "")
        if message not in messages:
            messages.append(message)
    return [{"at": at, "message": ", or ".join(messages)} for at, messages in found.items()]


@lru_cache(maxsize=256)
def fields_of(body: Any) -> frozenset[str]:
    """Return the names of all fields of a body, those of the objects in it included. body: its type."""
    schema = TypeAdapter(body).json_schema()
    objects = (schema, *schema.get("$defs", {}).values())
    return frozenset(name for each in objects for name in each.get("properties", {}))


def _meant(error: Mapping[str, Any], fields: Collection[str]) -> str:
    near = get_close_matches(str(error["loc"][-1]), fields, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _place(error: Mapping[str, Any], body: Any) -> str:
    """Return the path to a value, without names of pydantic."""
    location: Sequence[Any] = error["loc"][:_PLACES]
    if error["type"] == "json_invalid" or (location[0] == "body" and isinstance(body, str | int | float | None)):
        return "body"
    if location[0] != "body" or not isinstance(body, dict | list):
        return ".".join(map(str, location))
    path, value = ["body"], body
    for number, step in enumerate(location[1:], 2):
        last = number == len(location)
        if _has(value, step):
            value = value[step]
        elif not (last and error["type"] == "missing"):
            continue
        path.append(step)
    return ".".join(map(str, path))


def _has(value: Any, step: Any) -> bool:
    if isinstance(value, list):
        return isinstance(step, int) and step < len(value)
    return isinstance(value, dict) and step in value


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] in _MESSAGES:
        return _MESSAGES[error["type"]]
    text = str(error["msg"])
    return _SHOULD.sub(lambda found: "must " if "should" in found[0] else "", text)
