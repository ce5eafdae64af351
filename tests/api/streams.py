"""Client for server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.api.conftest import Service

Events = Iterator[tuple[str, Any]]
"""Pairs (event, data); a comment is ("", text)."""


def events_of(response: httpx.Response) -> Events:
    """Yield the events of a response as they arrive."""
    name, data = "message", []
    for line in response.iter_lines():
        if line.startswith(":"):
            yield "", line[1:].strip()
        elif line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data.append(line.removeprefix("data: "))
        elif not line and data:
            yield name, json.loads("\n".join(data))
            name, data = "message", []


@contextmanager
def streamed(service: Service, question: str, **more: Any) -> Iterator[tuple[httpx.Response, Events]]:
    """Ask a question and stream the answer."""
    body = {"question": question, "stream": True, **more}
    with service.client.stream("POST", "/v1/answers", json=body) as response:
        yield response, events_of(response)
