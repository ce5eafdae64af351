"""A headless browser that records the errors of a page and the hosts it contacts."""

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
class PageLog:
    """What a page did.

    Attributes:
        faults: Console errors and warnings, exceptions and failed requests.
        hosts: Hosts that the page contacted.
    """

    faults: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the browser without a sandbox, which containers do not support. It opens only our own pages."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def tab(browser: Browser, url: str, **context: Any) -> Iterator[tuple[Page, PageLog]]:
    """Open `url` in a fresh browser context; yield the page and what it did."""
    log = PageLog()
    with browser.new_context(**context) as session:
        session.on("request", lambda request: log.hosts.add(urlsplit(request.url).netloc))
        session.on("requestfailed", lambda request: log.faults.append(f"failed: {request.url}"))
        page = session.new_page()
        page.on("websocket", lambda socket: log.hosts.add(urlsplit(socket.url).netloc))
        page.on("pageerror", lambda error: log.faults.append(str(error)))
        page.on("console", lambda line: line.type in ("error", "warning") and log.faults.append(line.text))
        page.goto(url)
        yield page, log
