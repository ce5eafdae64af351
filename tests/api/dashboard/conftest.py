"""Fixtures of the dashboard tests: a real service with its dashboard, and a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from api.middleware.keys import make_key
from tests.api.dashboard.browser import CHROMIUM, chromium, tab
from tests.program import served

HARBOUR = {"id": "harbour", "text": "The harbour of Tarn was built in 1889 by Ada Brook.", "title": "Tarn"}
BRIDGE = {"id": "bridge", "text": "The bridge of Mell was painted green by Otto Lindqvist in 1931.", "title": "Mell"}
QUESTIONS = ("Who built the harbour of Tarn?", "Who painted the bridge of Mell?", "When was the harbour of Tarn built?")


@dataclass
class Desk:
    """A service with the tenants acme and zeta.

    Attributes:
        url: Address of the service.
        key: Key of acme.
        client: HTTP client of acme.
        browser: The browser.
        answers: All answers in order.
    """

    url: str
    key: str
    client: httpx.Client
    browser: Browser
    answers: list[Any] = field(default_factory=list)

    def ask(self, question: str, **options: Any) -> Any:
        """Ask a question with the HTTP API."""
        answered = self.client.post("/v1/answers", json={"question": question, **options})
        assert answered.status_code == 200, answered.text
        self.answers.append(answered.json())
        return answered.json()

    @contextmanager
    def page(self, name: str = "Overview", faults: int = 0, **context: Any) -> Iterator[Page]:
        """Log in and open a tab of the dashboard.

        At the end the page must have as many faults as expected, and must have contacted the service only.

        Args:
            name: Name of the tab.
            faults: Expected number of faults.
            context: Options of the browser context.
        """
        with tab(self.browser, f"{self.url}/dashboard", **context) as (page, log):
            page.get_by_label("API key").fill(self.key)
            page.get_by_role("button", name="Open the dashboard").click()
            expect(page.get_by_role("status")).to_contain_text("tiny")
            log.faults.clear()  # the console reports the 401 of the login page
            page.get_by_role("tab", name=name).click()
            expect(page.locator(".q-tab-panel")).to_have_count(1)  # until the previous tab has slid out
            yield page
            assert len(log.faults) == faults, log.faults
            assert log.hosts == {re.sub("^http://", "", self.url)}


# The scope is not the session: Playwright keeps an event loop running in this thread, and other tests run their own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, which `make test` installs, or another installed Chromium."""
    assert CHROMIUM, "there is no Chromium; `make test` installs Debian's"
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="package")
def desk(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Desk]:
    """A service with two documents and three answers."""
    folder: Path = tmp_path_factory.mktemp("desk")
    (key, pair), (_, other) = make_key("acme"), make_key("zeta")
    with served(folder, RAGKV_API_KEYS=f"{pair},{other}", RAGKV_MAX_TOKENS="8") as (_, client):
        client.headers["Authorization"] = f"Bearer {key}"
        opened = Desk(str(client.base_url).rstrip("/"), key, client, browser)
        sent = client.post("/v1/documents?wait=true", json={"documents": [HARBOUR, BRIDGE]})
        assert sent.json()["status"] == "completed", sent.text
        for question in QUESTIONS:
            opened.ask(question)
        yield opened
