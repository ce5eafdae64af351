"""What the service logs: one shape, whose it is, and nothing that users wrote."""

from __future__ import annotations

import http.server
import io
import json
import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from api.middleware.keys import make_key
from api.observability.logs import Form, escaped, written
from api.runtime.request_context import RequestContext, working_for
from ragkv.errors import StoreError
from tests.api.conftest import HARBOUR
from tests.program import served

MARK = "zwetschge"
BROKEN = """
import sys
from ragkv.cli import run
from ragkv.engine.engine import Engine

begin = Engine.prefill

def broken(self, question, **wanted):
    if "explode" in question:
        raise ZeroDivisionError(question)
    return begin(self, question, **wanted)

Engine.prefill = broken
sys.exit(run(["serve", "--port", "0"]))
"""


@dataclass(frozen=True)
class Told:
    """What became of a service: its lines, the ids of the responses it gave, by what they were to, and the spans that
    a collector got. key: that opened it."""

    text: str
    lines: list[dict[str, Any]]
    ids: dict[str, str]
    spans: list[Any]
    key: str

    def of(self, what: str) -> list[dict[str, Any]]:
        """The lines of one request."""
        return [line for line in self.lines if line.get("request_id") == self.ids[what]]


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """A collector of traces: its address, and what it got."""
    got: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A program that was asked this and that, with keys and traces on, and then stopped."""
    folder, (key, pair), ids = tmp_path_factory.mktemp("logs"), make_key("acme"), {}
    chosen = {"RAGKV_LOG": "json", "RAGKV_API_KEYS": pair, "RAGKV_TRACES": "1", "RAGKV_MAX_TOKENS": "4"}
    with (
        collector() as (address, got),
        served(folder, ["-c", BROKEN], OTEL_EXPORTER_OTLP_ENDPOINT=address, **chosen) as (process, client),
    ):
        auth = {"Authorization": f"Bearer {key}"}

        def ask(what: str, method: str, path: str, body: Any = None, **headers: str) -> None:
            # A connection each: the server closes one on which something failed.
            response = httpx.request(method, f"{client.base_url}{path}", json=body, headers=auth | headers, timeout=60)
            ids[what] = response.headers["x-request-id"]

        ask("filled", "POST", "/v1/documents?wait=true", {**HARBOUR, "text": f"{HARBOUR['text']} {MARK}"})
        ask("asked", "POST", "/v1/answers", {"question": f"Who is {MARK}?"}, **{"X-Request-ID": "mine.1"})
        ask("streamed", "POST", "/v1/answers", {"question": f"Who is {MARK}?", "stream": True})
        ask("exploded", "POST", "/v1/answers", {"question": f"explode {MARK}"})
        ask("missed", "GET", f"/v1/documents/{MARK}?collection={MARK}")
        ask("nowhere", "GET", f"/{MARK}?{MARK}={MARK}")
        ask("strange", "GET", "/v1/documents", Authorization=f"Bearer {key}x")
        ask("health", "GET", "/healthz")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    text, spans = (folder / "log").read_text(), []
    for body in got:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            assert any(
                a.key == "service.name" and a.value.string_value == "ragkv" for a in resource.resource.attributes
            )
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert MARK not in "".join(map(str, spans))
    return Told(text, [json.loads(line) for line in text.splitlines()], ids, spans, key)


def test_every_line_says_when_how_grave_by_whom_and_what(told: Told) -> None:
    assert all(list(line)[:4] == ["time", "level", "logger", "event"] for line in told.lines)


def test_a_request_is_one_line_with_the_id_of_its_response(told: Told) -> None:
    assert told.ids["asked"] == "mine.1"
    (line,) = told.of("asked")
    assert (line["event"], line["method"], line["route"], line["status"]) == ("request", "POST", "/v1/answers", 200)
    assert (line["level"], line["tenant"], line["answered_by"]) == ("info", "acme", "scout")
    assert 0 < line["ttft_ms"] < line["ms"]
    assert all(line[name] >= 0 for name in ("sequence", "recompute", "load", "cache_hit"))
    (streamed,) = told.of("streamed")
    assert streamed["answered_by"] == "scout"


def test_routes_are_told_by_their_templates_and_refusals_by_their_codes(told: Told) -> None:
    missed, nowhere, strange = (told.of(what)[-1] for what in ("missed", "nowhere", "strange"))
    assert (missed["route"], missed["status"], missed["fault"]) == (
        "/v1/documents/{document_id}",
        404,
        "not_found",
    )
    assert (nowhere["route"], nowhere["status"]) == ("unmatched", 404)
    assert (strange["status"], strange["fault"]) == (401, "invalid_api_key")
    assert "tenant" not in strange


def test_a_fault_is_told_by_the_engines_thread_and_by_the_server_as_one_requests(told: Told) -> None:
    engine, line, server = sorted(told.of("exploded"), key=lambda line: line["time"])
    assert (engine["event"], engine["level"]) == ("a question failed: ZeroDivisionError", "error")
    assert (line["status"], line["fault"]) == (500, "internal")
    assert (server["logger"], server["exception"]) == ("uvicorn.error", "ZeroDivisionError")
    assert server["at"][-1].endswith(" broken")
    assert {each["tenant"] for each in (engine, line, server)} == {"acme"}


def test_nothing_that_users_wrote_and_no_key_is_in_the_log(told: Told) -> None:
    assert len(told.lines) >= 9
    assert MARK not in told.text
    assert told.key not in told.text


def test_looking_at_its_health_is_no_line_and_no_trace(told: Told) -> None:
    assert not told.of("health")
    assert "GET /healthz" not in {span.name for span in told.spans}


def test_what_was_traced_reaches_the_collector_before_the_service_ends(told: Told) -> None:
    names = [span.name for span in told.spans]
    assert names.count("POST /v1/answers") == 3
    assert names.count("retrieve") == names.count("decode") == 2


def lines(form: Form, level: str = "info") -> tuple[logging.Logger, io.StringIO, Any]:
    """A logger of ours, where its lines go, and what has them go there."""
    stream = io.StringIO()
    return logging.getLogger("ragkv.test"), stream, written(form, level, stream)


@given(st.text())
def test_no_value_makes_two_lines_of_one(value: str) -> None:
    for form in ("text", "json"):
        logger, stream, there = lines(form)
        with there, working_for(RequestContext("id-1", value)):
            logger.warning("said %s", value, extra={"value": value})
        (line,) = stream.getvalue().splitlines()
        assert line.isprintable()
        if form == "json":
            told = json.loads(line)
            assert told["value"] == value or "://" in value
            assert told["request_id"] == "id-1"


def test_text_shows_control_characters_instead_of_sending_them() -> None:
    logger, stream, there = lines("text")
    with there:
        logger.warning("a\nb", extra={"value": 'c\r\n\x1b[31m"\u202e', "plain": "/v1/{id:path}"})
    assert stream.getvalue().endswith(r' a\nb value="c\r\n\x1b[31m\"\u202e" plain=/v1/{id:path}' + "\n")
    assert escaped("Käse\x7f") == r"Käse\x7f"


def test_passwords_in_addresses_are_left_out() -> None:
    logger, stream, there = lines("json")
    with there:
        logger.warning("no %s", "redis://user:ge/heim@h:1".replace("/h", "h"), extra={"to": "http://:ge@heim@h/x@y"})
    told = json.loads(stream.getvalue())
    assert (told["event"], told["to"]) == ("no redis://***@h:1", "http://***@h/x@y")


@pytest.mark.parametrize(("level", "words"), [("info", False), ("debug", True)])
def test_an_exception_is_its_kinds_and_its_places_and_speaks_only_where_it_is_ours(level: str, words: bool) -> None:
    logger, stream, there = lines("json", level)
    with there:
        try:
            try:
                raise KeyError(MARK)
            except KeyError as error:
                raise StoreError("the store is down") from error
        except StoreError:
            logger.exception("it failed")
        try:
            Path(f"/nowhere/{MARK}").read_text()
        except OSError:
            logger.exception("it failed")
    ours, systems = map(json.loads, stream.getvalue().splitlines())
    assert ours["exception"].startswith("StoreError: the store is down from KeyError")
    assert systems["exception"].startswith("FileNotFoundError: ")
    assert "No such file" in systems["exception"]
    assert ours["at"][-1].startswith("api/test_logs.py:")
    assert (MARK in stream.getvalue()) is words


def test_warnings_of_python_are_lines_and_afterwards_all_is_as_before() -> None:
    _, stream, there = lines("text")
    before = list(logging.getLogger().handlers)
    with there, warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old\nways", UserWarning, stacklevel=1)
    assert "py.warnings" in stream.getvalue()
    assert r"UserWarning at test_logs.py:" in stream.getvalue()
    assert r"old\nways" in stream.getvalue()
    assert logging.getLogger().handlers == before


def test_the_level_is_for_our_own_lines_and_others_are_heard_from_warnings_on() -> None:
    ours, stream, there = lines("text", "debug")
    with there:
        ours.debug("ours")
        logging.getLogger("httpx").info("theirs")
        logging.getLogger("httpx").warning("a warning")
    assert [line.split("  ")[-1] for line in stream.getvalue().splitlines()] == ["ours", "a warning"]


def test_a_log_that_cannot_be_written_hurts_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    logger, stream, there = lines("text")
    with there:
        stream.close()
        logger.error("lost")
    assert capfd.readouterr().err == ""
