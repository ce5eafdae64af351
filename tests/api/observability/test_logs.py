"""Log lines: one format, the request they belong to, and no text of users."""

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

from ragkv.api.middleware.keys import make_key
from ragkv.api.observability.logs import LogFormat, configured_logging, escape_text
from ragkv.api.runtime.request_context import RequestContext, working_for
from ragkv.errors import StoreError
from tests.api.conftest import HARBOUR
from tests.program import served

MARK = "zwetschge"
BROKEN = """
import sys
from ragkv.cli import run
from ragkv.engine.engine import Engine

prefill = Engine.prefill_passes

def broken(self, request):
    if "explode" in request.question:
        raise ZeroDivisionError(request.question)
    return (yield from prefill(self, request))

Engine.prefill_passes = broken
sys.exit(run(["serve", "--port", "0"]))
"""


@dataclass(frozen=True)
class Output:
    """Output of a service that has stopped.

    Attributes:
        text: The log.
        lines: The lines of the log.
        ids: Request ids by name of the request.
        spans: Spans that the collector received.
        key: API key of the client.
    """

    text: str
    lines: list[dict[str, Any]]
    ids: dict[str, str]
    spans: list[Any]
    key: str

    def of(self, what: str) -> list[dict[str, Any]]:
        """Return the lines of one request."""
        return [line for line in self.lines if line.get("request_id") == self.ids[what]]


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Run a trace collector; yield its address and the bodies it receives."""
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
def output(tmp_path_factory: pytest.TempPathFactory) -> Output:
    """Run the service with keys and traces, send requests, and stop it."""
    folder, (key, pair), ids = tmp_path_factory.mktemp("logs"), make_key("acme"), {}
    chosen = {"RAGKV_LOG": "json", "RAGKV_API_KEYS": pair, "RAGKV_TRACES": "1", "RAGKV_MAX_TOKENS": "4"}
    with (
        collector() as (address, got),
        served(folder, ["-c", BROKEN], OTEL_EXPORTER_OTLP_ENDPOINT=address, **chosen) as (process, client),
    ):
        auth = {"Authorization": f"Bearer {key}"}

        def ask(what: str, method: str, path: str, body: Any = None, **headers: str) -> None:
            # Each request has its own connection, because the server closes one after a failure.
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
    return Output(text, [json.loads(line) for line in text.splitlines()], ids, spans, key)


def test_every_line_starts_with_time_level_logger_and_event(output: Output) -> None:
    assert all(list(line)[:4] == ["time", "level", "logger", "event"] for line in output.lines)


def test_a_request_is_one_log_line_with_the_id_of_its_response(output: Output) -> None:
    assert output.ids["asked"] == "mine.1"
    (line,) = output.of("asked")
    assert (line["event"], line["method"], line["route"], line["status"]) == ("request", "POST", "/v1/answers", 200)
    assert (line["level"], line["tenant"], line["answered_by"]) == ("info", "acme", "scout")
    assert 0 < line["ttft_ms"] < line["ms"]
    assert all(line[name] >= 0 for name in ("sequence", "recompute", "load", "cache_hit"))
    (streamed,) = output.of("streamed")
    assert streamed["answered_by"] == "scout"


def test_log_lines_hold_route_templates_and_error_codes(output: Output) -> None:
    missed, nowhere, strange = (output.of(what)[-1] for what in ("missed", "nowhere", "strange"))
    assert (missed["route"], missed["status"], missed["fault"]) == (
        "/v1/documents/{document_id}",
        404,
        "not_found",
    )
    assert (nowhere["route"], nowhere["status"]) == ("unmatched", 404)
    assert (strange["status"], strange["fault"]) == (401, "invalid_api_key")
    assert "tenant" not in strange


def test_a_fault_is_logged_by_engine_and_server_with_the_same_request_id(output: Output) -> None:
    engine, line, server = sorted(output.of("exploded"), key=lambda line: line["time"])
    assert (engine["event"], engine["level"]) == ("a question failed: ZeroDivisionError", "error")
    assert (line["status"], line["fault"]) == (500, "internal")
    assert (server["logger"], server["exception"]) == ("uvicorn.error", "ZeroDivisionError")
    assert server["at"][-1].endswith(" broken")
    assert {each["tenant"] for each in (engine, line, server)} == {"acme"}


def test_the_log_holds_no_user_text_and_no_key(output: Output) -> None:
    assert len(output.lines) >= 9
    assert MARK not in output.text
    assert output.key not in output.text


def test_health_checks_are_not_logged_or_traced(output: Output) -> None:
    assert not output.of("health")
    assert "GET /healthz" not in {span.name for span in output.spans}


def test_traces_reach_the_collector_before_the_service_ends(output: Output) -> None:
    names = [span.name for span in output.spans]
    assert names.count("POST /v1/answers") == 3
    assert names.count("retrieve") == names.count("decode") == 2


def lines(form: LogFormat, level: str = "info") -> tuple[logging.Logger, io.StringIO, Any]:
    """Return one of our loggers, a stream, and the context in which the lines go to the stream."""
    stream = io.StringIO()
    return logging.getLogger("ragkv.test"), stream, configured_logging(form, level, stream)


@given(st.text())
def test_no_value_can_split_a_log_line(value: str) -> None:
    for form in ("text", "json"):
        logger, stream, there = lines(form)
        with there, working_for(RequestContext("id-1", value)):
            logger.warning("said %s", value, extra={"value": value})
        (line,) = stream.getvalue().splitlines()
        assert line.isprintable()
        if form == "json":
            fields = json.loads(line)
            assert fields["value"] == value or "://" in value
            assert fields["request_id"] == "id-1"


def test_the_text_format_escapes_control_characters() -> None:
    logger, stream, there = lines("text")
    with there:
        logger.warning("a\nb", extra={"value": 'c\r\n\x1b[31m"\u202e', "plain": "/v1/{id:path}"})
    assert stream.getvalue().endswith(r' a\nb value="c\r\n\x1b[31m\"\u202e" plain=/v1/{id:path}' + "\n")
    assert escape_text("Käse\x7f") == r"Käse\x7f"


def test_passwords_in_addresses_are_removed() -> None:
    logger, stream, there = lines("json")
    with there:
        logger.warning("no %s", "redis://user:ge/heim@h:1".replace("/h", "h"), extra={"to": "http://:ge@heim@h/x@y"})
    fields = json.loads(stream.getvalue())
    assert (fields["event"], fields["to"]) == ("no redis://***@h:1", "http://***@h/x@y")


@pytest.mark.parametrize(("level", "words"), [("info", False), ("debug", True)])
def test_an_exception_is_logged_by_type_and_place_and_only_own_messages(level: str, words: bool) -> None:
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
    assert ours["at"][-1].startswith("observability/test_logs.py:")
    assert (MARK in stream.getvalue()) is words


def test_python_warnings_are_logged_and_logging_is_restored() -> None:
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


def test_the_level_applies_to_own_loggers_and_others_log_warnings() -> None:
    ours, stream, there = lines("text", "debug")
    with there:
        ours.debug("ours")
        logging.getLogger("httpx").info("theirs")
        logging.getLogger("httpx").warning("a warning")
    assert [line.split("  ")[-1] for line in stream.getvalue().splitlines()] == ["ours", "a warning"]


def test_a_log_stream_that_fails_is_ignored(capfd: pytest.CaptureFixture[str]) -> None:
    logger, stream, there = lines("text")
    with there:
        stream.close()
        logger.error("lost")
    assert capfd.readouterr().err == ""
