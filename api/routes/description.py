"""`/openapi.json` and `/docs`: what the API says about itself, for programs and for people.

The page is written by the service and loads nothing, so it works without a network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from ragkv.api.dashboard.guard import prefix_of
from ragkv.api.middleware.auth import DOCS

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
details { border-top: 1px solid #8888; padding: .5rem 0 }
summary { cursor: pointer; overflow-wrap: anywhere }
.text { white-space: pre-wrap }
dt { font-weight: 600 }
"""

router = APIRouter(include_in_schema=False)


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Describe the API. `servers` says below which path a proxy serves it."""
    schema: dict[str, Any] = request.app.openapi()
    prefix = prefix_of(request.scope)
    return JSONResponse({**schema, "servers": [{"url": prefix}]} if prefix else schema)


@router.get(DOCS)
async def docs(request: Request) -> Response:
    """Show the same as a page."""
    schema: dict[str, Any] = request.app.openapi()
    routes = "".join(
        _route(method, path, operation, schema)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    )
    page = (
        '<!doctype html><html lang="en"><head><title>ragkv: the API</title><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>ragkv {escape(schema['info']['version'])}</h1><p>{escape(schema['info']['summary'])} "
        f'<a href="{prefix_of(request.scope)}/openapi.json">openapi.json</a> is the same for programs.</p>'
        f"{routes}</body></html>"
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})


def _route(method: str, path: str, operation: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    named = [(each["name"], each["in"], each) for each in operation.get("parameters", ())]
    fields = [*named, *_body_fields(operation, schema)]
    rows = "".join(
        f"<dt><code>{escape(name)}</code> ({where})</dt><dd class=text>{escape(field.get('description', ''))}</dd>"
        for name, where, field in fields
    )
    answers = ", ".join(escape(status) for status in operation["responses"])
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code></summary>"
        f"<p class=text>{escape(operation.get('description', ''))}</p><dl>{rows}</dl>"
        f"<p>Answers: {answers}</p></details>"
    )


def _body_fields(
    operation: Mapping[str, Any], schema: Mapping[str, Any]
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (name, "body", schema) of each member of the JSON body."""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    for kind in body.get("oneOf") or body.get("anyOf") or [body]:
        model = schema["components"]["schemas"].get(kind.get("$ref", "").rpartition("/")[2], {})
        for name, field in model.get("properties", {}).items():
            yield name, "body", field
