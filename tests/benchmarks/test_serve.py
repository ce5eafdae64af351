"""`bench serve`: its loops, and a load over HTTP for a real service whose pool counters equal the reports."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load import PlannedQuestion
from benchmarks.serve import Clock, PoolSums, TimedAnswer, closed_loop, open_loop, pool_counters
from ragkv.cli import run
from tests.api.conftest import Service, serving, settings
from tests.api.test_pool import DECODE, POOL, disable_stops

PLACES = ("Tarn", "Mell", "Ostrey", "Lindmouth")
WORKS = ("harbour", "bridge", "lighthouse", "chapel", "mill")
QUEUE = 4
LONGEST = 4


def ignore(done: int, total: int) -> None:
    pass


# Loops


def planned(*times: float) -> list[PlannedQuestion]:
    return [PlannedQuestion(f"question {at}", at=at) for at in times]


def test_arrivals_never_wait_for_answers() -> None:
    async def ask(question: PlannedQuestion, scheduled: float, clock: Clock) -> TimedAnswer:
        sent = clock()
        await asyncio.sleep(0.5)
        return TimedAnswer(scheduled, sent, (), clock())

    found = asyncio.run(open_loop(planned(0.0, 0.05, 0.1, 0.1), ask, ignore))
    assert [each.scheduled for each in found] == [0.0, 0.05, 0.1, 0.1]
    assert all(each.sent >= each.scheduled for each in found)
    assert max(each.sent for each in found) < min(each.ended for each in found), "all were in flight at once"


def test_a_question_that_the_client_sends_late_counts_from_its_arrival() -> None:
    """Coordinated omission: while the first call blocks the client, the next questions have arrived and wait."""

    async def ask(question: PlannedQuestion, scheduled: float, clock: Clock) -> TimedAnswer:
        sent = clock()
        if question.at == 0.0:
            time.sleep(0.3)  # blocks the event loop on purpose
        return TimedAnswer(scheduled, sent, (clock(),), clock())

    blocked, *late = asyncio.run(open_loop(planned(0.0, 0.1, 0.2), ask, ignore))
    assert blocked.ttft >= 0.3
    for each in late:
        assert each.ended - each.sent < 0.05, "measured from its sending, the wait would be invisible"
        assert each.ttft >= 0.3 - each.scheduled


def test_a_closed_loop_keeps_as_many_in_flight_as_it_is_told() -> None:
    flying, most, progress = 0, 0, list[tuple[int, int]]()

    async def ask(question: PlannedQuestion, scheduled: float, clock: Clock) -> TimedAnswer:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.01 * (1 + int(question.text) % 3))
        flying -= 1
        return TimedAnswer(scheduled, clock(), (), clock(), message=question.text)

    asked = [PlannedQuestion(str(i)) for i in range(10)]
    found = asyncio.run(closed_loop(asked, 3, ask, lambda *args: progress.append(args)))
    assert most == 3
    assert [each.message for each in found] == [each.text for each in asked], "in the order of the load"
    assert progress == [(i, 10) for i in range(1, 11)]
    assert found[0].scheduled == pytest.approx(0.0, abs=0.05)
    assert found[-1].scheduled > min(each.ended for each in found)


def test_a_service_without_a_pool_has_no_counters() -> None:
    assert pool_counters("# TYPE ragkv_documents gauge\nragkv_documents 3.0\n") is None
    text = (
        'ragkv_pool_reads_total{result="hit"} 5\nragkv_pool_reads_total{result="miss"} 3\nragkv_pool_loaded_total 4\n'
    )
    assert pool_counters(text) == PoolSums(8, 5, 4)
    assert PoolSums(8, 5, 4).since(PoolSums(6, 5, 1)) == PoolSums(2, 0, 3)


# A service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with a pool, four documents and a short queue, which counts its pool every fifth of a second."""
    documents = [
        {
            "id": place,
            "title": place,
            "text": "\n\n".join(
                f"The {work} of {place} was built by builder number {10 * i + at}." for at, work in lines
            ),
            "metadata": {"kind": "place", "place": place},
        }
        for i, place in enumerate(PLACES)
        for lines in [list(enumerate(WORKS * 2))]
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module in ("engine_thread", "engine_health"):
            patch.setattr(f"ragkv.api.runtime.{module}.IDLE_SECONDS", 0.2)
        with serving(settings(tmp_path_factory.mktemp("load"), pool_bytes=POOL, queue=QUEUE, batch=2)) as running:
            assert running.post("/v1/documents?wait=true", {"documents": documents}).status_code == 200
            running.engine_thread.submit(disable_stops).result(30)
            yield running


def bench(service: Service, file: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    """Run the command; returns the figures."""
    words = ["bench", "serve", "--url", service.url, "--json", file, "--max-tokens", LONGEST, *arguments]
    assert run(list(map(str, words))) == code
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_reports_of_a_load_equal_the_counters_of_the_pool(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = f"--concurrency 2 --questions 3 --method full --method reuse --decode {DECODE} --top-k 2".split()
    table, plot = tmp_path / "table.md", tmp_path / "plot.svg"
    found = bench(service, tmp_path / "figures", *chosen, "--ttft-limit", 60, "--table", table, "--plot", plot)
    for each, name in zip(found["methods"], ("full", "reuse"), strict=True):
        assert (each["method"], each["decode"], each["answered"], each["failed"]) == (name, "psa", 3, {})
        assert each["tokens"] == 3 * LONGEST
        assert each["pool"] == each["counters"]
        assert 0 < each["pool"]["hits"] < each["pool"]["read"]
        assert 0 < each["keys_read"] < 1
        assert 0 < each["ttft_ms"]["p50"] <= each["ttft_ms"]["p90"] <= each["ttft_ms"]["p99"]
        assert each["within_limit"] == 1.0
        assert each["goodput"] == each["achieved_rate"]
        assert all(one["scheduled"] <= one["sent"] < one["first"] < one["ended"] for one in each["answers"])
    full, reuse = found["methods"]
    assert (full["cache_hit"], reuse["cache_hit"], reuse["recompute"]) == (None, 1.0, 0.0)
    printed = capsys.readouterr().out
    assert "full: the reports equal the counters\nreuse: the reports equal the counters" in printed
    assert table.read_text().count("| reuse |") == 4
    assert "<svg" in plot.read_text()


def test_a_question_is_asked_over_the_documents_that_are_drawn_for_it(service: Service, tmp_path: Path) -> None:
    asked = ("--questions", 5, "--documents", 2, "--zipf", 1, "--rate", 20, "--method", "full", "--warmup", 0)
    (found,) = bench(service, tmp_path / "figures", *asked)["methods"]
    assert found["answered"] + sum(found["failed"].values()) == 5
    recorded = service.client.get("/v1/answers", params={"limit": found["answered"]}).json()["answers"]
    for each in recorded:
        answer = service.client.get(f"/v1/answers/{each['id']}").json()
        documents = {chunk["document_id"] for chunk in answer["report"]["chunks"]}
        assert len(documents) == 2
        texts = [service.client.get(f"/v1/documents/{id}?text=true").json()["text"] for id in documents]
        quoted = answer["question"].partition('"')[2].rpartition('"')[0]
        assert any(quoted in " ".join(text.split()) for text in texts), "it quotes one of them"


def test_a_trace_that_comes_too_fast_is_refused_and_not_asked_again(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "trace.jsonl"
    lines.write_text(
        "\n".join(json.dumps({"question": f"Who built {i}?", "documents": ["Mell"], "at": i / 1000}) for i in range(14))
    )
    chosen = ("--questions-file", lines, "--method", "full", "--ttft-limit", 60)
    (found,) = bench(service, tmp_path / "figures", *chosen)["methods"]
    assert found["asked"] == 14
    assert found["answered"] >= QUEUE
    assert set(found["failed"]) == {"busy"}
    assert found["answered"] + found["failed"]["busy"] == 14
    assert found["within_limit"] == found["answered"] / 14
    assert found["offered_rate"] == pytest.approx(14 / 0.013)
    assert "failed" in capsys.readouterr().out
    last = max(each["sent"] for each in found["answers"])
    assert last < max(each["ended"] for each in found["answers"] if not each["error"])


def test_a_load_that_cannot_be_asked_is_told(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ("bench", "serve", "--url", service.url)
    lines = tmp_path / "trace.jsonl"
    lines.write_text('{"question": "Why?", "documents": ["Nowhere"], "at": 0}')
    for words, code, message in (
        (("--rate", "1", "--concurrency", "1"), 2, "leave one out"),
        (("--documents", "2", "--questions-file", lines), 2, "name their documents"),
        (("--documents", "5"), 1, "as many, there are 4"),
        (("--questions-file", lines), 1, "no document 'Nowhere'"),
        (("--questions-file", lines, "--zipf", "1"), 1, "in its own order"),
        (("-c", "empty"), 1, "has no documents"),
        (("--plot", "plot.txt"), 1, "a plot is a"),
    ):
        assert run([*there, *map(str, words)]) == code, words
        assert message in capsys.readouterr().err
    assert run([*there, "--method", "guess", "--questions", "2"]) == 1
    assert "guess: 2 invalid_request (method 'guess' does not exist" in capsys.readouterr().out


def test_a_service_is_opened_in_process_and_answers_as_over_http(service: Service, tmp_path: Path) -> None:
    load = ("--questions", 4, "--concurrency", 2, "--method", "reuse", "--json", tmp_path / "figures")
    over = bench(service, tmp_path / "over", *load[:-2])["methods"][0]
    data = str(service.app.state.settings.data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAGKV_POOL_BYTES", str(POOL))
        words = ["bench", "serve", "--in-process", "--data", data, "--max-tokens", LONGEST, *load]
        assert run(list(map(str, words))) == 0
        assert run(["bench", "serve", "--in-process", "--url", service.url]) == 2
    here = json.loads((tmp_path / "figures").read_text())["methods"][0]
    assert here["answered"] == over["answered"] == 4
    assert all(0 < answer["first"] <= answer["ended"] for answer in here["answers"])
    assert here["cache_hit"] == over["cache_hit"] == 1.0
    assert here["sequence"] == over["sequence"]
