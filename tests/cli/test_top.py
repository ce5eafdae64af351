"""`ragkv top` shows the figures of /metrics, or why there are none. The services are real."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from ragkv.api.middleware.keys import make_key
from ragkv.cli import run
from ragkv.cli.top import SPAN, TopRecord, TopSpan, _refresh, scrape
from ragkv.client import Client
from ragkv.errors import Refused
from ragkv.metrics.figures import duration
from ragkv.metrics.prometheus import ScrapedMetrics
from ragkv.metrics.sums import MetricSums
from tests.api.conftest import BRIDGE, HARBOUR, Service, serving, settings
from tests.redis_server import free_port

KEY, PAIR = make_key("acme")
QUESTIONS = ("Who built the harbour of Tarn?", "Who painted the bridge of Mell?", "When was the harbour built?")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that was asked three questions, and one that is none."""
    with serving(settings(tmp_path_factory.mktemp("asked"), host_bytes=2**26)) as running:
        running.post("/v1/documents?wait=true", {"documents": [HARBOUR, BRIDGE]})
        for question in QUESTIONS:
            assert running.post("/v1/answers", {"question": question}).status_code == 200
        assert running.post("/v1/answers", {"question": " "}).status_code == 422
        yield running


def rows(printed: str) -> dict[str, list[str]]:
    """The cells of each figure."""
    found = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines() if line.strip()]
    return {name: cells for name, *cells in found}


def test_one_frame_shows_the_figures_of_the_tally(asked: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--url", asked.url, "--once"]) == 0
    printed, sums = rows(capsys.readouterr().out), asked.engine_thread.metrics.sums
    assert sums.answered == len(QUESTIONS)
    assert printed["Cache hits"] == [f"{sums.cache_hit:.1%}"]
    assert printed["Hits in host"] == [f"{sums.hit_by('host'):.1%}"]
    assert printed["Recomputed"] == [f"{sums.recompute:.1%}"]
    assert printed["Kept"] == [f"{sums.sequence:.1%}"]
    assert printed["Loaded"] == [f"{sums.load:.1%}"]
    for name, share in (("First token, median", 0.5), ("First token, 95%", 0.95)):
        spent = sums.seconds["ttft"].quantile(share)
        assert spent is not None
        assert printed[name] == [duration(spent)]
    assert printed["Time saved"] == [duration(sums.saved_seconds)]
    assert (printed["Answers"], printed["Not answered"]) == ([str(len(QUESTIONS))], [str(sum(sums.ended.values()))])


def test_the_last_minute_is_the_difference_of_two_looks(asked: Service) -> None:
    with Client(asked.url) as client:
        record = TopRecord()
        record.add(10.0, scrape(client))
        assert record.lately() is None, "one look is no span"
        asked.post("/v1/answers", {"question": QUESTIONS[0]})
        record.add(12.0, scrape(client))
    lately = record.lately()
    assert lately is not None
    assert (lately.sums.answered, lately.seconds) == (1, 2.0)
    assert lately.sums.seconds["ttft"].count == 1
    assert record.ever(record.latest.started + 100) == TopSpan(asked.engine_thread.metrics.sums, 100.0)


def seen(started: float, answers: int) -> ScrapedMetrics:
    return ScrapedMetrics(
        MetricSums(answers={("scout", "dense", "dense"): answers}), started, 0, 0, 32, 0, 0, (), "tiny", "scout"
    )


def test_lately_reaches_back_a_minute_however_long_one_looks() -> None:
    record = TopRecord()
    for second in range(0, 300, 2):
        record.add(float(second), seen(1.0, second))
    lately = record.lately()
    assert lately is not None
    assert (lately.seconds, lately.sums.answered) == (SPAN, SPAN)
    assert len(record._seen) <= SPAN / 2 + 1


def test_a_service_that_was_started_again_begins_anew() -> None:
    record = TopRecord()
    record.add(0.0, seen(1.0, 500))
    record.add(2.0, seen(9.0, 3))
    assert record.lately() is None
    record.add(4.0, seen(9.0, 4))
    assert (lately := record.lately()) is not None
    assert lately.sums.answered == 1


def test_the_terminal_has_its_screen_back_after_ctrl_c(asked: Service, interruptible: None) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "ragkv.cli", "top", "--url", asked.url, "--interval", "0.2"]
    plain = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    shown = b""
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=plain) as program:
        os.close(follower)
        shown += written(leader, b"last ")
        asked.post("/v1/answers", {"question": QUESTIONS[1]})
        program.send_signal(signal.SIGINT)
        shown += written(leader, b"\x1b[?1049l")
        try:
            assert program.wait(60) == 0
        except subprocess.TimeoutExpired:
            pytest.fail(f"it goes on after {shown[-2000:]!r}")
        finally:
            program.kill()
    os.close(leader)
    assert b"\x1b[?1049h" in shown
    assert b"since the start" in shown


class Finalized:
    """Is interrupted while it is finalized, where Python prints an exception and goes on."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_finalizer_ends_it_too(monkeypatch: pytest.MonkeyPatch, interruptible: None) -> None:
    looks = 0

    def interrupted(client: Client) -> ScrapedMetrics:
        nonlocal looks
        looks += 1
        assert looks < 3, "it goes on"
        Finalized()
        return seen(1.0, looks)

    monkeypatch.setitem(_refresh.__globals__, "scrape", interrupted)
    record = TopRecord()
    record.add(0.0, seen(1.0, 0))
    handler = signal.getsignal(signal.SIGINT)
    with Client("http://127.0.0.1:1") as client:
        _refresh(client, record, 0.0, Console(file=io.StringIO()))
    assert looks == 1
    assert signal.getsignal(signal.SIGINT) is handler


def written(terminal: int, until: bytes) -> bytes:
    """What a program writes to a terminal, up to this, and for half a minute at most."""
    shown, deadline = b"", time.monotonic() + 30
    while until not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 65536)
    return shown


def test_a_service_that_wants_a_key_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(settings(tmp_path, api_keys=PAIR)) as locked:
        assert run(["top", "--url", locked.url]) == 1
        assert "wants an API key: set RAGKV_KEY" in capsys.readouterr().err
        assert run(["top", "--url", locked.url, "--key", "ragkv_other"]) == 1
        assert "does not know this API key" in capsys.readouterr().err
        assert run(["top", "--url", locked.url, "--key", KEY]) == 0
        printed = capsys.readouterr().out
    assert rows(printed)["Cache hits"] == ["–"], "nothing was asked yet"
    assert KEY not in printed


def test_where_no_service_is_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert run(["top", "--url", url]) == 1
    assert f"no answer from {url}" in capsys.readouterr().err


def test_a_page_that_is_no_metrics_is_refused(asked: Service) -> None:
    with Client(f"{asked.url}/healthz") as client, pytest.raises(Refused, match="no metrics at"):
        scrape(client)
