"""The overview: its figures match the reports and /metrics exactly, and its charts hide nothing."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from ragkv.api.dashboard.charts import Values, points, with_gaps
from ragkv.api.dashboard.ranges import read_range
from ragkv.api.dashboard.terms import TERMS
from tests.api.dashboard.browser import tab
from tests.api.dashboard.conftest import QUESTIONS, Desk, log_in, read_metrics
from tests.api.dashboard.loaded import ANSWERS
from tests.api.dashboard.test_ask import choose_option


def tile(page: Page, name: str) -> tuple[str, float]:
    """Return the text of a tile and its exact value."""
    found = page.get_by_role("region", name=name, exact=True)
    return found.locator(".value").inner_text(), float(
        (found.get_attribute("data-exact") or "nan").replace("None", "nan")
    )


def total(desk: Desk, *path: str) -> float:
    """Sum a field over all reports."""
    found = 0
    for answer in desk.answers:
        value: Any = answer["report"]
        for name in path:
            value = value[name]
        found += value
    return found


def metrics(desk: Desk) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample of /metrics by name and labels, less what it was before acme asked."""
    return {key: value - desk.before.get(key, 0.0) for key, value in read_metrics(desk.client).items()}


def sample(found: dict[Any, float], name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def answered(page: Page) -> Locator:
    return page.get_by_role("region", name="Time saved").locator(".note")


def test_every_tile_agrees_with_the_reports_and_with_metrics(desk: Desk) -> None:
    with desk.page("Overview") as page:
        expect(answered(page)).to_contain_text(f"in {len(desk.answers)} answers")
        scraped, context = metrics(desk), total(desk, "tokens", "context")
        for name, kind in (("Recomputed", "recomputed"), ("Kept", "kept")):
            shown, exact = tile(page, name)
            assert exact == total(desk, "tokens", kind) / context
            of = sample(scraped, "ragkv_tokens_total", kind="context")
            assert exact == pytest.approx(sample(scraped, "ragkv_tokens_total", kind=kind) / of)
            assert shown == f"{100 * exact:.1f}%"
        read = total(desk, "bytes", "heads") + total(desk, "bytes", "loaded")
        size = total(desk, "bytes", "context_kv")
        assert tile(page, "Loaded")[1] == read / size
        full = sample(scraped, "ragkv_full_seconds_total")
        assert tile(page, "Time saved")[1] == pytest.approx(full - sample(scraped, "ragkv_compared_seconds_total"))
        assert tile(page, "Money saved")[0] == "–", "nobody has told the price"
        hits = sum(total(desk, "cache", "hits", tier) for tier in ("gpu", "host", "store"))
        assert tile(page, "Cache hits")[1] == hits / (hits + total(desk, "cache", "misses")) == 1.0
        counted = sum(
            sample(scraped, "ragkv_chunk_lookups_total", tier=t, result="hit") for t in ("gpu", "host", "store")
        )
        assert counted == hits
        assert tile(page, "Waiting")[0] == "0 of 32"


def test_the_page_says_that_nobody_measured_the_quality_of_this_model(desk: Desk) -> None:
    with desk.page("Overview") as page:
        expect(page.get_by_text("not measured on your documents")).to_be_visible()


def test_a_new_answer_is_counted_within_seconds(desk: Desk) -> None:
    with desk.page("Overview") as page:
        expect(answered(page)).to_contain_text(f"in {len(desk.answers)} answers")
        desk.ask(QUESTIONS[0])
        expect(answered(page)).to_contain_text(f"in {len(desk.answers)} answers", timeout=5000)
        median, full = tile(page, "First token, median")[1], tile(page, "Full prefill, estimated")[1]
        assert 0 < median <= tile(page, "First token, 95%")[1]
        assert full > 0


def test_any_range_of_time_can_be_chosen(desk: Desk) -> None:
    with desk.page("Overview") as page:
        buttons = page.get_by_role("group", name="Time range")
        buttons.get_by_role("button", name="five minutes").click()
        expect(buttons.get_by_role("button", name="five minutes")).to_have_attribute("aria-pressed", "true")
        expect(answered(page)).to_contain_text(f"in {len(desk.answers)} answers")
        buttons.get_by_role("button", name="custom").click()
        buttons.get_by_label("from").fill("2020-01-01T00:00")
        buttons.get_by_label("to", exact=True).fill("2020-01-02T00:00")
        buttons.get_by_label("to", exact=True).press("Tab")
        expect(answered(page)).to_contain_text("in 0 answers")
        buttons.get_by_role("button", name="since the start").click()
        expect(answered(page)).to_contain_text(f"in {len(desk.answers)} answers")


def test_a_term_is_explained_to_the_mouse_and_to_the_keyboard(desk: Desk) -> None:
    with desk.page("Overview") as page:
        term = page.get_by_role("button", name="Kept", exact=True)
        explained = page.get_by_role("tooltip").filter(has_text=TERMS["Kept"])
        term.hover()
        expect(explained).to_be_visible()
        page.mouse.move(0, 0)
        expect(explained).to_be_hidden()
        term.focus()
        expect(explained).to_be_visible()
        page.keyboard.press("Escape")
        expect(explained).to_be_hidden()
        expect(term).to_have_accessible_description(TERMS["Kept"])


def test_a_listed_answer_opens_with_its_map(desk: Desk) -> None:
    desk.ask(QUESTIONS[1])
    with desk.page("Overview") as page:
        row = page.get_by_role("row", name=QUESTIONS[1]).first
        expect(row).to_contain_text("Otto Lindqvist")
        row.get_by_role("button", name=QUESTIONS[1]).click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("heading", name=QUESTIONS[1])).to_be_visible()
        expect(dialog.get_by_role("grid")).to_be_visible()
        expect(dialog.locator(".answer")).to_contain_text("Otto Lindqvist")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()


def test_an_operator_sees_every_tenant_and_another_tenant_itself_only(desk: Desk) -> None:
    with desk.page("Overview") as page:
        expect(page.get_by_text("tenant acme")).to_be_visible()
        expect(page.get_by_role("region", name="Tenants")).to_have_count(0)
    with tab(desk.browser, f"{desk.url}/dashboard") as (page, _):
        log_in(page, desk.other_key)
        page.get_by_role("tab", name="Overview").click()
        expect(answered(page)).to_contain_text(f"in {ANSWERS + len(desk.answers):,} answers")
        tenants = page.get_by_role("region", name="Tenants")
        expect(tenants.get_by_role("row", name="acme").get_by_role("cell").nth(1)).to_have_text(str(len(desk.answers)))
        expect(tenants.get_by_role("row", name="zeta").get_by_role("cell").nth(1)).to_have_text(f"{ANSWERS:,}")
        choose_option(page, "Tenant", "acme")
        expect(answered(page)).to_contain_text(f"in {len(desk.answers)} answers")


def test_missing_samples_and_missing_values_leave_gaps() -> None:
    rows: list[tuple[float, Values]] = [(0.0, [1.0]), (10.0, [2.0]), (60.0, [3.0]), (70.0, [4.0])]
    assert with_gaps(rows, 10.0) == [*rows[:2], (50.0, []), *rows[2:]]


def test_a_value_alone_is_a_dot_and_a_line_has_none() -> None:
    drawn = points([(0, 1.0), (1, None), (2, 3.0), (3, 4.0)])
    assert [each["symbol"] for each in drawn] == ["circle", "none", "none", "none"]
    assert [each["value"] for each in drawn] == [[0, 1.0], [1, None], [2, 3.0], [3, 4.0]]


def test_the_axis_of_shares_ends_at_100_percent_and_that_of_times_is_logarithmic(desk: Desk) -> None:
    with desk.page("Overview") as page:
        labels = page.get_by_role("region", name="Ratios").locator("svg text")
        expect(labels.filter(has_text=re.compile("^100$"))).to_have_count(1)
        expect(labels.filter(has_text=re.compile("^120$"))).to_have_count(0)
        times = page.get_by_role("region", name="First token").last.locator("svg text")
        expect(times.filter(has_text=re.compile("^1,000$"))).to_have_count(1)
        assert not times.filter(has_text=re.compile("^(200|500|1,500|2,000)$")).count(), "powers of ten"


@pytest.mark.parametrize("sent", [None, "x", ["x"], [None], [float("nan")], {"a": 1}])
def test_anything_but_a_range_is_the_time_since_the_start(sent: Any) -> None:
    assert read_range(sent).whole


def test_a_range_ends_now_or_where_it_says() -> None:
    start, end = read_range([60]).moments()
    assert (time.time() - start, end) == (pytest.approx(60, abs=1), math.inf)
    assert read_range([10, 20]).moments() == (10, 20)


def test_an_operator_tells_the_price_of_an_hour_and_every_place_has_it(desk: Desk) -> None:
    with desk.page("Overview") as page:
        expect(page.get_by_label("Price of an hour")).to_have_count(0)
    with tab(desk.browser, f"{desk.url}/dashboard") as (page, _):
        log_in(page, desk.other_key)
        page.get_by_role("tab", name="Overview").click()
        price = page.get_by_label("Price of an hour")
        price.fill("much")
        price.press("Enter")
        expect(page.get_by_text("Write an amount")).to_be_visible()
        price.fill("3600 EUR")
        price.press("Enter")
        money = page.get_by_role("region", name="Money saved")
        expect(money.locator(".note")).to_have_text("at 3600 EUR an hour", timeout=15_000)
        saved = tile(page, "Time saved")[1]
        assert tile(page, "Money saved")[1] == pytest.approx(saved)
        assert money.locator(".value").inner_text().endswith(" EUR")
        assert sample(read_metrics(desk.client), "ragkv_hour_price", currency="EUR") == 3600
        price.fill("")
        price.press("Enter")
        expect(money.locator(".value")).to_have_text("–", timeout=15_000)
