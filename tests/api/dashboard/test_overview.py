"""The figures of the overview match the reports and /metrics exactly."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, expect
from prometheus_client.parser import text_string_to_metric_families

from tests.api.dashboard.conftest import QUESTIONS, Desk


def tile(page: Page, name: str) -> tuple[str, float]:
    """Return the text of a tile and its exact value."""
    found = page.get_by_role("region", name=name, exact=True)
    return found.locator(".value").inner_text(), float(found.get_attribute("data-exact") or "nan")


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
    """Return every sample of /metrics by name and labels."""
    families = text_string_to_metric_families(desk.client.get("/metrics").text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def sample(found: dict[Any, float], name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_every_tile_agrees_with_the_reports_and_with_metrics(desk: Desk) -> None:
    with desk.page() as page:
        answers = page.get_by_role("region", name="Bytes saved").locator(".note")
        expect(answers).to_have_text(f"in {len(desk.answers)} answers")
        scraped, context = metrics(desk), total(desk, "tokens", "context")
        for name, kind in (("Recomputed", "recomputed"), ("Kept", "kept")):
            shown, exact = tile(page, name)
            assert exact == total(desk, "tokens", kind) / context
            of = sample(scraped, "ragkv_tokens_total", kind="context")
            assert exact == sample(scraped, "ragkv_tokens_total", kind=kind) / of
            assert shown == f"{100 * exact:.1f}%"
        read = total(desk, "bytes", "heads") + total(desk, "bytes", "loaded")
        size = total(desk, "bytes", "context_kv")
        assert tile(page, "Loaded")[1] == read / size
        assert tile(page, "Bytes saved")[1] == size - read
        of = sample(scraped, "ragkv_kv_bytes_total", source="context")
        scraped_read = sum(sample(scraped, "ragkv_kv_bytes_total", source=source) for source in ("heads", "loaded"))
        assert tile(page, "Bytes saved")[1] == of - scraped_read
        hits = sum(total(desk, "cache", "hits", tier) for tier in ("gpu", "host", "store"))
        assert tile(page, "Cache hits")[1] == hits / (hits + total(desk, "cache", "misses")) == 1.0
        counted = sum(
            sample(scraped, "ragkv_chunk_lookups_total", tier=t, result="hit") for t in ("gpu", "host", "store")
        )
        assert counted == hits
        assert tile(page, "Waiting")[0] == "0 of 32"


def test_a_new_answer_is_counted_within_seconds(desk: Desk) -> None:
    with desk.page() as page:
        note = page.get_by_role("region", name="Bytes saved").locator(".note")
        expect(note).to_have_text(f"in {len(desk.answers)} answers")
        desk.ask(QUESTIONS[0])
        expect(note).to_have_text(f"in {len(desk.answers)} answers", timeout=5000)
        first = page.get_by_role("region", name="First token", exact=True).first
        assert "full recompute, estimated" in first.locator(".note").inner_text()


def test_a_recent_time_span_differs_from_the_total(desk: Desk) -> None:
    with desk.page() as page:
        page.get_by_role("button", name="five minutes").click()
        expect(page.get_by_role("button", name="five minutes")).to_have_attribute("aria-pressed", "true")
        note = page.get_by_role("region", name="Bytes saved").locator(".note")
        expect(note).to_have_text(f"in {len(desk.answers)} answers")


def test_a_listed_answer_opens_with_its_map(desk: Desk) -> None:
    with desk.page() as page:
        page.get_by_role("button", name=QUESTIONS[1]).first.click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("heading", name=QUESTIONS[1])).to_be_visible()
        expect(dialog.get_by_role("grid")).to_be_visible()
        assert desk.answers[1]["answer"] in dialog.locator(".answer").inner_text()
