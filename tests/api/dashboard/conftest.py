"""A real service with its dashboard, and a browser, for all tests of the dashboard."""

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
    """A service that acme and zeta may use. client: acme's · answers: all that were given, in order."""

    url: str
    key: str
    client: httpx.Client
    browser: Browser
    answers: list[Any] = field(default_factory=list)

    def ask(self, question: str, **wanted: Any) -> Any:
        """Ask over the API."""
        answered = self.client.post("/v1/answers", json={"question": question, **wanted})
        assert answered.status_code == 200, answered.text
        self.answers.append(answered.json())
        return answered.json()

    @contextmanager
    def page(self, name: str = "Overview", faults: int = 0, **context: Any) -> Iterator[Page]:
        """The dashboard, come in with the key, at this tab. It must not complain, but for so many faults that are part
        of the test, and call nobody but the service."""
        with tab(self.browser, f"{self.url}/dashboard", **context) as (page, noted):
            page.get_by_label("API key").fill(self.key)
            page.get_by_role("button", name="Open the dashboard").click()
            expect(page.get_by_role("status")).to_contain_text("demo")
            noted.faults.clear()  # the form came with 401, which the console tells
            page.get_by_role("tab", name=name).click()
            expect(page.locator(".q-tab-panel")).to_have_count(1)  # the other one slides out
            yield page
            assert len(noted.faults) == faults, noted.faults
            assert noted.hosts == {re.sub("^http://", "", self.url)}


# Not of the session: Playwright keeps a loop running in this thread, and other tests run loops of their own in it.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, or another one that is here; `make test` installs it."""
    assert CHROMIUM, "there is no Chromium; `make test` installs Debian's"
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="package")
def desk(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Desk]:
    """With two documents, and three answers given."""
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
