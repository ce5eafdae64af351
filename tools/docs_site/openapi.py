"""The reference of the HTTP API as a page without scripts, made of the schema that the service itself serves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

_COMPONENTS = "#/components/schemas/"
_FIELD = ("type", "required, or default", "")
_INTRODUCTION = """# HTTP reference

Every route of the service, as its OpenAPI document describes it. A running service serves the same document at
`/openapi.json`; [this copy](openapi.json) is of a service without API keys. [The HTTP API](../api.md) explains the
routes with examples, and lists the [errors](../api.md#errors).
"""


def read_schema() -> dict[str, Any]:
    """Return the OpenAPI document of a service with the default settings. No engine is opened."""
    from ragkv.api.app import create_app
    from ragkv.config import Settings

    defaults = {name: field.get_default(call_default_factory=True) for name, field in Settings.model_fields.items()}
    found: dict[str, Any] = create_app(Settings(**defaults | {"dashboard": False})).openapi()
    return found


def reference_of(schema: Schema) -> str:
    """Return the page: a section for each route, then one for each object.

    Args:
        schema: The OpenAPI document.
    """
    parts = [_INTRODUCTION, "## Routes"]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts += _operation(method, path, operation)
    parts.append("## Objects")
    for name, described in sorted(schema["components"]["schemas"].items()):
        parts += [f"### {name}", _prose(described)]
        parts += _fields(described) or [f"Type: {type_of(described)}."]
    return "\n\n".join(part for part in parts if part) + "\n"


def type_of(schema: Schema) -> str:
    """Return the type that a schema describes, with links to the objects that it names."""
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(_COMPONENTS)
        return f"[{name}](#{name.lower()})"
    for combined in ("anyOf", "oneOf"):
        if combined in schema:
            return " or ".join(dict.fromkeys(map(type_of, schema[combined])))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(values := schema.get("additionalProperties"), Mapping):
        return f"object of {type_of(values)}"
    kind = schema.get("type", "any JSON value")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _operation(method: str, path: str, operation: Schema) -> Iterator[str]:
    yield f"### {method.upper()} {path}"
    yield _prose(operation)
    if parameters := operation.get("parameters"):
        rows = [(each["in"], _field(each["name"], each["schema"] | each, each["required"])) for each in parameters]
        yield _table(("parameter", "in", *_FIELD), [(name, place, *rest) for place, (name, *rest) in rows])
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        yield f"Body, `{kind}`: {_named(body['schema'])}"
        yield from _fields(body["schema"])
    answers = sorted(operation["responses"].items())
    contents = [
        (f"`{code}`", _line(each["description"]), _contents(each)) for code, each in answers if code[0] in "123"
    ]
    yield _table(("status", "", "body"), contents)
    if codes := [f"`{code}`" for code, _ in answers if code[0] in "45"]:
        yield f"Errors: {', '.join(codes)}."


def _named(schema: Schema) -> str:
    return f"{schema['title']}, with these fields" if "properties" in schema and "title" in schema else type_of(schema)


def _contents(response: Schema) -> str:
    """Return the types of a response's body."""
    found = []
    for kind, body in response.get("content", {}).items():
        schema = body.get("schema") or body.get("itemSchema") or {}
        named = schema.get("title", "object") if "properties" in schema else type_of(schema)
        found.append(f"`{kind}`: {'events' if 'itemSchema' in body else named}")
    return "; ".join(found)


def _fields(schema: Schema) -> list[str]:
    """Return the table of an object's fields, or nothing."""
    if not (properties := schema.get("properties")):
        return []
    required = schema.get("required", ())
    rows = [_field(name, each, name in required) for name, each in properties.items()]
    return [_table(("field", *_FIELD), rows)]


def _field(name: str, schema: Schema, required: bool) -> tuple[str, ...]:
    default = f"`{json.dumps(schema['default'], ensure_ascii=False)}`" if "default" in schema else ""
    return f"`{name}`", _limited(schema), "yes" if required else default, _line(schema.get("description", ""))


def _limited(schema: Schema) -> str:
    """Return the type with its limits."""
    limits = {
        "minimum": "≥ ",
        "maximum": "≤ ",
        "minLength": "length ≥ ",
        "maxLength": "length ≤ ",
        "maxItems": "items ≤ ",
    }
    parts = [schema, *(each for each in schema.get("anyOf", ()) if each.get("type") != "null")]
    told = [f"{sign}{part[name]}" for part in parts for name, sign in limits.items() if name in part]
    return ", ".join([type_of(schema), *told])


def _prose(described: Schema) -> str:
    return str(described.get("description", "")).strip()


def _line(text: str) -> str:
    return " ".join(text.split())


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
