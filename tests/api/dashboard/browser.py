"""A browser, headless, that notes what a page complains of and whom it calls."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


@dataclass
class Noted:
    """faults: errors and warnings of the console, exceptions, requests that failed · hosts: that were called."""

    faults: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser. Its sandbox needs what containers do not give; what it opens here is our own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def tab(browser: Browser, url: str, **context: Any) -> Iterator[tuple[Page, Noted]]:
    """A page with nothing remembered, at `url`, and what was noted of it."""
    noted = Noted()
    with browser.new_context(**context) as surroundings:
        surroundings.on("request", lambda request: noted.hosts.add(urlsplit(request.url).netloc))
        surroundings.on("requestfailed", lambda request: noted.faults.append(f"failed: {request.url}"))
        page = surroundings.new_page()
        page.on("websocket", lambda socket: noted.hosts.add(urlsplit(socket.url).netloc))
        page.on("pageerror", lambda error: noted.faults.append(str(error)))
        page.on("console", lambda said: said.type in ("error", "warning") and noted.faults.append(said.text))
        page.goto(url)
        yield page, noted
