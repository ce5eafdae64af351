"""Additions to the OpenAPI schema that FastAPI cannot derive: API keys, and the errors of the routes of other APIs."""

from __future__ import annotations

from typing import Any

from ragkv.api.error_forms import form_of
from ragkv.api.middleware.auth import PUBLIC_PATHS

SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key made with `ragkv key TENANT`."},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key in its own header."},
}


def add_security(schema: dict[str, Any], required: bool) -> dict[str, Any]:
    """Add the security schemes to an OpenAPI schema, in place, and return it.

    Args:
        schema: What FastAPI generated.
        required: Whether the service has API keys, so that a request without one is refused.
    """
    schema.setdefault("components", {})["securitySchemes"] = SECURITY_SCHEMES
    schema["security"] = [{name: []} for name in SECURITY_SCHEMES] + ([] if required else [{}])
    for path in PUBLIC_PATHS & schema["paths"].keys():
        for operation in schema["paths"][path].values():
            operation["security"] = []
    for path in filter(form_of, schema["paths"]):
        for operation in schema["paths"][path].values():
            operation["responses"].pop("422", None)  # an invalid request is a 400 on these routes
    return schema
