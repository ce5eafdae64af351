"""`ragkv doctor` on serving. The services, ours and another program's, are real. No line shows a secret."""

from __future__ import annotations

import http.server
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.api.middleware.keys import make_key
from ragkv.cli import run
from ragkv.cli.doctor_service import address, keys, limits
from ragkv.cli.findings import Findings
from ragkv.config import load_settings
from ragkv.model.source import ModelSource
from tests.api.conftest import Service, serving, settings
from tests.redis_server import free_port, redis_server

KEY, PAIR = make_key("acme")
doctor = importlib.import_module("ragkv.cli.doctor")  # the package has a command of this name


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that wants a key, without documents."""
    with serving(settings(tmp_path_factory.mktemp("locked"), api_keys=PAIR)) as running:
        yield running


@pytest.fixture(scope="module")
def stranger() -> Iterator[int]:
    """The port of a web server that is no ragkv."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def told(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    assert printed.err == ""
    assert KEY not in printed.out
    assert PAIR.partition("=")[2] not in printed.out
    return printed.out


# Keys


def test_keys_are_counted_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    findings = Findings()
    keys(load_settings(api_keys=f"{PAIR},{make_key('acme')[1]},{make_key('beta')[1]}"), findings)
    assert "ok    keys       3 API keys of 2 tenants" in told(capsys)
    assert findings.wrong == 0


def test_a_service_for_others_without_keys_is_warned_about_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "box.example"):
        keys(load_settings(host=host), Findings())
        out = told(capsys)
        assert out.startswith("note  keys")
        assert "`ragkv key TENANT`" in out
        assert "RAGKV_API_KEYS" in out
    keys(load_settings(), Findings())
    assert told(capsys).startswith("ok    keys")


def test_keys_that_cannot_be_read_are_wrong_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    findings = Findings()
    keys(load_settings(api_keys=f"acme={KEY}"), findings)
    assert "wrong keys       RAGKV_API_KEYS: entry 1 is not tenant=hash" in told(capsys)
    assert findings.wrong == 1


# This machine


def test_only_settings_that_differ_from_their_defaults_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGKV_TOP_K", "4")
    monkeypatch.setenv("RAGKV_STORE", "redis://user:geheim@127.0.0.1:1")
    doctor._settings(load_settings(port=81), {"port": 81}, Findings())
    lines = told(capsys).splitlines()
    assert "geheim" not in str(lines)
    assert [line.split(" = ")[0].split()[-1] for line in lines[:-1]].count("top_k") == 1
    assert any("port = 81  [option]" in line for line in lines)
    assert "others have their defaults" in lines[-1]
    assert len(lines) < 10


@pytest.mark.parametrize(
    ("load", "quota", "words"),
    [(50.0, None, "note  load"), (0.0, None, "ok    load"), (0.0, 1.5, "may use 1.5 processors")],
)
def test_a_busy_machine_and_a_quota_are_noted(
    capsys: pytest.CaptureFixture[str], load: float, quota: float | None, words: str
) -> None:
    doctor._processors(load, Findings(), quota)
    assert words in told(capsys)


# The address


def test_a_free_address_is_said_to_be_free(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    address(load_settings(port=port), Findings())
    assert f"ok    address    127.0.0.1:{port} is free" in told(capsys)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_ragkv_that_serves_there_already_is_known(
    locked: Service, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address(load_settings(host=host, port=locked.port), Findings())
    assert "ok    address" in (out := told(capsys))
    assert "a ragkv serves at" in out


def test_another_program_at_the_address_is_told_with_what_to_do(
    stranger: int, capsys: pytest.CaptureFixture[str]
) -> None:
    address(load_settings(port=stranger), Findings())
    out = told(capsys)
    assert out.startswith("note  address")
    assert "choose another" in out
    assert "RAGKV_PORT" in out


# Limits


def test_limits_are_told_and_pools_larger_than_the_machine_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits(load_settings(data=tmp_path / "none" / "yet", queue=7, deadline=12.5, parse_seconds=3), Findings())
    out = told(capsys)
    assert all(words in out for words in ("7 requests may wait", "12.5 s an answer", "3 s and 1.0 GiB each"))
    assert "GiB free for" in out
    assert "lower them" not in out
    limits(load_settings(data=tmp_path, host_bytes=2**60), Findings())
    assert "lower them" in told(capsys)


# A service elsewhere


def test_a_service_elsewhere_is_asked_and_nothing_is_loaded_here(
    locked: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGKV_KEY", KEY)
    assert run(["doctor", "--url", locked.url]) == 0
    out = told(capsys)
    assert f"ok    service    {locked.url}: ok" in out
    assert "ok    catalogue" in out
    assert "0 of 32 places taken, 0 being answered" in out
    assert "LlamaForCausalLM" not in out


@pytest.mark.parametrize(("key", "words"), [("", "set RAGKV_KEY"), ("ragkv_other", "is not known there")])
def test_a_service_that_wants_another_key_is_told(
    locked: Service, key: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGKV_KEY", key)
    assert run(["doctor", "--url", locked.url]) == 1
    assert words in told(capsys)


def test_a_service_that_is_not_there_or_another_one_is_told(stranger: int, capsys: pytest.CaptureFixture[str]) -> None:
    for url, words in (
        (f"http://user:geheim@127.0.0.1:{free_port()}", "is `ragkv serve` running there?"),
        ("nonsense", "no answer from nonsense"),
        (f"http://127.0.0.1:{stranger}", "is no ragkv"),
    ):
        assert run(["doctor", "--url", url]) == 1
        out = told(capsys)
        assert words in out
        assert "geheim" not in out


def test_a_service_without_its_store_is_ready_and_degraded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_server() as server:
        url = server.url
    with serving(settings(tmp_path, store=url)) as running:
        assert run(["doctor", "--url", running.url]) == 0
    out = told(capsys)
    assert "note  service" in out
    assert not [line for line in out.splitlines() if line.split()[:1] == ["setting"]], "the service has its own"
    assert "note  store" in out
    assert "ok    ready" in out


# Redis


@pytest.mark.parametrize(
    ("options", "ttl", "words"),
    [
        ((), "0", "has no maxmemory"),
        (("--maxmemory", "64mb"), "0", "takes nothing new when it is full (noeviction)"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru"), "0", "evicts only what expires"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru"), "60", "of 64 MiB used, volatile-lru"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"), "0", "of 64 MiB used, allkeys-lru"),
    ],
)
def test_how_a_redis_is_bounded_is_told(
    options: tuple[str, ...],
    ttl: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAGKV_STORE_TTL", ttl)
    (tmp_path / "d").mkdir()
    with redis_server(*options) as server:
        # No model: only the store is of interest.
        run(["doctor", "--data", str(tmp_path / "d"), "--store", server.url, "--model", "/no/such/model"])
    out = told(capsys)
    assert words in out
    assert "wrong store" not in out


def test_wrapper_tokens_are_named_with_their_collections(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = ModelSource("model", wrappers=(("laws", "first"), ("", "second")))
    doctor._source(source, load_settings(data=tmp_path), Findings())
    said = capsys.readouterr().out
    assert "first around chunks of laws" in said
    assert "second around chunks of all collections" in said
