"""A small text that makes backtracking grow takes no time of the service, at whichever door it comes in."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.api.conftest import Service

HEADING = f"# a{' ' * 6000}b"
TITLE = "Provide a concise, 5-word-or-less title for the conversation"
ALLOWED = 4.0
"""Seconds of processor time of the whole process. The expressions of the release before took ten times as many."""


def chat(text: str) -> Callable[[Service], httpx.Response]:
    def send(service: Service) -> httpx.Response:
        body: dict[str, Any] = {
            "model": service.engine_thread.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
        }
        return service.post("/v1/chat/completions", body)

    return send


DOORS: dict[str, Callable[[Service], httpx.Response]] = {
    "upload": lambda service: service.client.post(
        "/v1/documents?wait=true&collection=hostile", files={"files": ("a.md", HEADING)}
    ),
    "put": lambda service: service.client.put(
        "/v1/documents/b.md?wait=true&collection=hostile", json={"text": HEADING}
    ),
    "markdown by its metadata": lambda service: service.post(
        "/v1/documents?wait=true",
        {"id": "c", "text": HEADING, "metadata": {"format": "markdown"}, "collection": "hostile"},
    ),
    "title with line breaks": chat(f"{TITLE}{chr(10) * 40_000}Conversation:{chr(10) * 6000}x"),
    "history of spaces": chat(f'### Task: {{"title": ""}} <chat_history>{" " * 6000}'),
    "history of line breaks": chat(f'### Task: {{"title": ""}} <chat_history>{chr(10) * 20_000}x</chat_history>'),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_small_text_takes_little_time(service: Service, door: str) -> None:
    start = time.process_time()
    answer = DOORS[door](service)
    assert time.process_time() - start < ALLOWED
    assert answer.status_code in (200, 413), answer.text
    service.client.delete("/v1/collections/hostile")
