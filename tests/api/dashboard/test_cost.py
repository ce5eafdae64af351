"""The page costs the service little, also after ten thousand answers."""

from __future__ import annotations

import os
import time
from pathlib import Path

from playwright.sync_api import expect

from tests.api.dashboard.browser import tab
from tests.api.dashboard.conftest import Desk, log_in
from tests.api.dashboard.loaded import ANSWERS

LOADED_TIMES = 40
WATCHED_SECONDS, WATCHED_TIMES = 4, 5
MOST_SHARE = 0.02


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_page_loads_within_150_milliseconds(desk: Desk) -> None:
    took = [1.0]
    while len(took) <= LOADED_TIMES and min(took) >= 0.150:  # what else the machine does only adds
        began = time.perf_counter()
        assert desk.client.get("/dashboard/").status_code == 200
        took.append(time.perf_counter() - began)
    assert min(took) < 0.150, took


def test_an_open_page_costs_less_than_two_hundredths_of_a_processor(desk: Desk) -> None:
    desk.shown[0].goto("about:blank")  # the page of acme would cost something, too
    with tab(desk.browser, f"{desk.url}/dashboard") as (page, noted):
        log_in(page, desk.other_key)
        noted.faults.clear()
        page.get_by_role("tab", name="Overview").click()
        expect(page.get_by_role("region", name="Time saved").locator(".note")).to_contain_text("answers")
        expect(page.get_by_role("button", name=f"Question {ANSWERS - 1}?")).to_be_visible()
        page.wait_for_timeout(2000)
        share = 1.0
        for _ in range(WATCHED_TIMES):  # what else the machine does only adds
            began, before = time.monotonic(), cpu_seconds(desk.pid)
            page.wait_for_timeout(1000 * WATCHED_SECONDS)
            share = min(share, (cpu_seconds(desk.pid) - before) / (time.monotonic() - began))
            if share < MOST_SHARE:
                break
        assert noted.faults == []
    desk.shown[0].goto(f"{desk.url}/dashboard")
    print(f"an open page: {share:.2%} of a processor")
    assert share < MOST_SHARE
