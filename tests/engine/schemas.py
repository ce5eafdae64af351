"""Fifty JSON schemas of increasing difficulty."""

from __future__ import annotations

from typing import Any

WORD = {"type": "string", "maxLength": 12}
SHORT = {"type": "string", "maxLength": 4}


def record(required: bool = True, **properties: Any) -> dict[str, Any]:
    """An object of these fields and no others."""
    closed = {"type": "object", "properties": properties, "additionalProperties": False}
    return closed | ({"required": list(properties)} if required else {})


def array(items: dict[str, Any], least: int = 0, most: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


PLACE = {"$ref": "#/$defs/place"}
TREE = {"$ref": "#/$defs/node"}

SCHEMAS: dict[str, dict[str, Any]] = {
    # one value
    "a string": SHORT,
    "true or false": {"type": "boolean"},
    "nothing": {"type": "null"},
    "a whole number": {"type": "integer", "minimum": -999, "maximum": 999},
    "a year": {"type": "integer", "minimum": 1000, "maximum": 2100},
    "a share": {"type": "number", "minimum": 0, "maximum": 1},
    "a positive number": {"type": "number", "exclusiveMinimum": 0, "maximum": 50},
    "tens": {"type": "integer", "multipleOf": 10, "minimum": 0, "maximum": 100},
    "one of words": {"enum": ["harbour", "bridge", "lighthouse"]},
    "one of values": {"enum": ["red", 7, None, True]},
    "a constant": {"const": {"kind": "harbour", "built": [1889]}},
    "a string or nothing": {"type": ["string", "null"], "maxLength": 4},
    # strings
    "a long enough string": {"type": "string", "minLength": 3, "maxLength": 6},
    "a pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "a date": {"type": "string", "format": "date"},
    "a time": {"type": "string", "format": "time"},
    "a moment": {"type": "string", "format": "date-time"},
    "a uuid": {"type": "string", "format": "uuid"},
    "a version": {"type": "string", "pattern": "^(0|[1-9][0-9]?)\\.(0|[1-9][0-9]?)$"},
    # objects
    "one field": record(builder=WORD),
    "fields of several types": record(builder=WORD, year={"type": "integer", "maximum": 2100, "minimum": 0}),
    "fields that may be null": record(
        builder={"type": ["string", "null"], "maxLength": 8}, old={"type": ["boolean", "null"]}
    ),
    "optional fields": record(required=False, builder=WORD, town=WORD),
    "some required": record(required=False, builder=WORD, town=WORD) | {"required": ["town"]},
    "an empty object": record(),
    "nested": record(harbour=record(builder=WORD, opened=record(year={"type": "integer", "minimum": 0, "maximum": 9}))),
    "deeply nested": record(a=record(b=record(c=record(d=record(e=SHORT))))),
    "names with signs": record(**{"the name": SHORT, "größe": {"type": "boolean"}, 'a "quote"': {"type": "null"}}),
    "many fields": record(**{f"field_{number}": {"type": "boolean"} for number in range(12)}),
    "any fields": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "named by a pattern": {
        "type": "object",
        "patternProperties": {"^n[0-9]$": {"type": "null"}},
        "additionalProperties": False,
    },
    # arrays
    "a list of words": array(SHORT),
    "a list of numbers": array({"type": "integer", "minimum": 0, "maximum": 9}, 1, 5),
    "a list that is not empty": array({"enum": ["a", "b"]}, 2, 4),
    "a pair": {"type": "array", "prefixItems": [SHORT, {"type": "boolean"}], "items": False, "minItems": 2},
    "a pair and more": {
        "type": "array",
        "prefixItems": [{"type": "null"}],
        "items": {"type": "boolean"},
        "maxItems": 3,
    },
    "a list of lists": array(array({"type": "boolean"}, 0, 2), 1, 2),
    "a list of records": array(record(name=SHORT, old={"type": "boolean"}), 1, 2),
    "a record of lists": record(
        names=array(SHORT, 0, 2), years=array({"type": "integer", "minimum": 0, "maximum": 99}, 1, 2)
    ),
    # choices and references
    "any of two types": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
    "any of two records": {
        "anyOf": [record(kind={"const": "harbour"}, depth={"enum": [1, 2]}), record(kind={"const": "bridge"})]
    },
    "one of two records": {"oneOf": [record(ship={"type": "boolean"}), record(train={"type": "boolean"})]},
    "all of two parts": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "a reference": record(at=PLACE) | {"$defs": {"place": record(town=WORD)}},
    "references in a list": array(PLACE, 1, 2) | {"$defs": {"place": record(town=SHORT, sea={"type": "boolean"})}},
    "a reference to a reference": {
        "$ref": "#/$defs/first",
        "$defs": {"first": {"$ref": "#/$defs/second"}, "second": {"enum": [1, 2]}},
    },
    "a tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": record(leaf={"type": "boolean"}, next={"anyOf": [{"type": "null"}, TREE]})},
    },
    "a tree with lists": {
        "$ref": "#/$defs/node",
        "$defs": {"node": record(name={"enum": ["x", "y"]}, parts={"type": "array", "items": TREE, "maxItems": 1})},
    },
    # what people send
    "an invoice": record(
        number={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
        date={"type": "string", "format": "date"},
        currency={"enum": ["EUR", "USD", "GBP"]},
        lines=array(record(text=SHORT, amount={"type": "number", "minimum": 0, "maximum": 999}), 1, 2),
        paid={"type": "boolean"},
    ),
    "a contract": record(
        parties=array(record(name=SHORT, role={"enum": ["buyer", "seller"]}), 2, 2),
        term={"anyOf": [record(months={"type": "integer", "minimum": 1, "maximum": 99}), {"type": "null"}]},
        law={"type": ["string", "null"], "maxLength": 6},
    ),
}
