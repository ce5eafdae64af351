"""Fixtures of the dashboard tests: one real service with its dashboard, and one page of a browser, for all tests."""

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
from prometheus_client.parser import text_string_to_metric_families

from ragkv.api.middleware.keys import make_key
from tests.api.dashboard.browser import CHROMIUM, PageLog, chromium, tab
from tests.api.dashboard.loaded import ANSWERS
from tests.program import served

HARBOUR = {"id": "harbour", "text": "The harbour of Tarn was built in 1889 by Ada Brook.", "title": "Tarn"}
BRIDGE = {
    "id": "bridge.md",
    "text": "## Bridges\n\nThe bridge of Mell was painted green by Otto Lindqvist in 1931.",
    "title": "Mell",
}
QUESTIONS = ("Who built the harbour of Tarn?", "Who painted the bridge of Mell?", "When was the harbour of Tarn built?")
PROGRAM = ("-m", "tests.api.dashboard.loaded", "serve", "--port", "0")


@dataclass
class Desk:
    """A service with the tenants acme and zeta, which is the operator.

    Attributes:
        url: Address of the service.
        pid: Its process.
        key: Key of acme, which has two documents and asks.
        other_key: Key of zeta, which has got ANSWERS answers and may send one request a minute.
        client: HTTP client of acme.
        browser: The browser.
        shown: The page, logged in as acme, and what it did.
        before: The samples of /metrics before acme asked.
        answers: All answers of acme in order.
    """

    url: str
    pid: int
    key: str
    other_key: str
    client: httpx.Client
    browser: Browser
    shown: tuple[Page, PageLog]
    before: dict[Any, float]
    answers: list[Any] = field(default_factory=list)

    def ask(self, question: str, **options: Any) -> Any:
        """Ask a question with the HTTP API."""
        answered = self.client.post("/v1/answers", json={"question": question, **options})
        assert answered.status_code == 200, answered.text
        self.answers.append(answered.json())
        return answered.json()

    def newest(self) -> Any:
        """Fetch the newest answer, which was asked for on the page."""
        newest = self.client.get("/v1/answers?limit=1").json()["answers"][0]["id"]
        if not self.answers or self.answers[-1].get("id") != newest:
            self.answers.append(self.client.get(f"/v1/answers/{newest}").json())
        return self.answers[-1]

    @contextmanager
    def page(self, name: str, faults: int = 0, width: int = 1280, scheme: Any = "light") -> Iterator[Page]:
        """Show a tab of the dashboard.

        At the end the page must have as many faults as expected, and must have contacted the service only.

        Args:
            name: Name of the tab.
            faults: Expected number of faults.
            width: Of the page, in pixels.
            scheme: Colour scheme of the system, `light` or `dark`.
        """
        page, log = self.shown
        log.faults.clear()
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        page.get_by_role("tab", name=name).click()
        expect(page.locator(".q-tab-panel")).to_have_count(1)
        if name == "Ask":
            page.get_by_role("button", name="New conversation").click()
            expect(page.get_by_role("region", name="Answer")).to_have_count(0)
        try:
            yield page
        except BaseException:
            page.reload()  # what a failed test leaves open must not make others fail
            raise
        assert len(log.faults) == faults, log.faults
        assert log.hosts == {re.sub("^http://", "", self.url)}


def read_metrics(client: httpx.Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample of /metrics by name and labels."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def log_in(page: Page, key: str) -> None:
    """Open the dashboard with a key."""
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Open the dashboard").click()
    expect(page.get_by_role("status")).to_contain_text("tiny")


# The scope is not the session: Playwright keeps an event loop running in this thread, and other tests run their own.
@pytest.fixture(scope="package")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A service with two documents and three answers, in Debian's Chromium or another installed one."""
    assert CHROMIUM, "there is no Chromium; `make test` installs Debian's"
    folder: Path = tmp_path_factory.mktemp("desk")
    (key, pair), (other_key, other) = make_key("acme"), make_key("zeta")
    settings = {
        "RAGKV_API_KEYS": f"{pair},{other};requests=1",
        "RAGKV_MAX_TOKENS": "8",
        "RAGKV_HISTORY": str(ANSWERS),
        "RAGKV_OPERATORS": "zeta",
    }
    with served(folder, PROGRAM, **settings) as (process, client), chromium() as browser:
        client.headers["Authorization"] = f"Bearer {key}"
        url = str(client.base_url).rstrip("/")
        sent = client.post("/v1/documents?wait=true", json={"documents": [HARBOUR, BRIDGE]})
        assert sent.json()["status"] == "completed", sent.text
        with tab(browser, f"{url}/dashboard") as (page, log):
            log_in(page, key)
            opened = Desk(url, process.pid, key, other_key, client, browser, (page, log), read_metrics(client))
            for question in QUESTIONS:
                opened.ask(question)
            yield opened
