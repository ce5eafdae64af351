"""The page that describes the API works without a network."""

from __future__ import annotations

import re
from pathlib import Path

from ragkv.api.middleware.keys import make_key
from tests.api.conftest import Service, serving, settings


def test_the_page_names_every_route_with_its_parameters(service: Service) -> None:
    page, schema = service.client.get("/docs"), service.client.get("/openapi.json").json()
    assert page.headers["content-type"].startswith("text/html")
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert f"<b>{method.upper()}</b> <code>{path}</code>" in page.text
            for parameter in operation.get("parameters", ()):
                assert f"<code>{parameter['name']}</code> ({parameter['in']})" in page.text
    for field in ("question", "messages", "documents", "deadline_s"):
        assert f"<code>{field}</code> (body)" in page.text


def test_the_page_loads_nothing(service: Service) -> None:
    page = service.client.get("/docs")
    assert not re.search(r"<script|<link|<img|https?://[^ ]*\.(js|css)|src=", page.text)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    below = service.client.get("/docs/", headers={"X-Forwarded-Prefix": "/rag"})
    assert 'href="/rag/openapi.json"' in below.text


def test_a_browser_without_a_key_is_asked_for_one(tmp_path: Path) -> None:
    key, pair = make_key("acme")
    with serving(settings(tmp_path, api_keys=pair)) as running:
        asked = running.client.get("/docs", headers={"Accept": "text/html", "X-Forwarded-Prefix": "/rag"})
        assert (asked.status_code, 'action="/rag/dashboard/login"' in asked.text) == (401, True)
        assert running.client.get("/docs").json()["code"] == "no_api_key"
        assert running.client.get("/docs", headers={"X-API-Key": key}).status_code == 200
