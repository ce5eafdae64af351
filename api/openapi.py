"""What FastAPI cannot know for the OpenAPI schema: which requests need a key, and whose errors are OpenAI's."""

from __future__ import annotations

from typing import Any

from api.errors import speaks_openai
from api.middleware.auth import OPEN

SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `ragkv key TENANT`."},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same, in a header of its own."},
}


def secured(schema: dict[str, Any], needed: bool) -> dict[str, Any]:
    """`schema`, completed. needed: whether this service has keys, so that none will not do."""
    schema.setdefault("components", {})["securitySchemes"] = SCHEMES
    schema["security"] = [{name: []} for name in SCHEMES] + ([] if needed else [{}])
    for path in OPEN & schema["paths"].keys():
        for operation in schema["paths"][path].values():
            operation["security"] = []
    for path in filter(speaks_openai, schema["paths"]):
        for operation in schema["paths"][path].values():
            operation["responses"].pop("422", None)  # what is not as it must be is a 400 there
    return schema
