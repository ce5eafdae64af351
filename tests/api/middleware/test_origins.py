"""Pages of other origins: none by default, those of RAGKV_ORIGINS with their user's key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ragkv.api.dashboard.guard import COOKIE
from ragkv.api.middleware.keys import make_key
from ragkv.api.middleware.origins import Origins, read_origins
from ragkv.config import ServingSettings, load_settings
from ragkv.errors import ConfigError
from tests.api.conftest import HARBOUR, Service, serving, settings

ASK = {"question": "Who built the harbour of Tarn?"}
PAGE, NOTES, OTHER = "https://chat.example.org", "app://obsidian.md", "https://evil.example"
KEY, PAIR = make_key("acme")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with a key, which pages of two origins may use."""
    data = tmp_path_factory.mktemp("origins")
    with serving(settings(data, api_keys=PAIR, origins=f"{PAGE}/, {NOTES}")) as running:
        yield running


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service without keys, which pages of one origin may use."""
    with serving(settings(tmp_path_factory.mktemp("public"), origins=PAGE)) as running:
        running.post("/v1/documents?wait=true", HARBOUR)
        yield running


def preflight(origin: str, method: str = "POST", headers: str = "authorization,content-type,x-stainless-lang") -> dict:
    return {"Origin": origin, "Access-Control-Request-Method": method, "Access-Control-Request-Headers": headers}


@pytest.mark.parametrize("origin", [PAGE, NOTES])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE"])
def test_a_preflight_needs_no_key(guarded: Service, origin: str, method: str) -> None:
    answer = guarded.client.options("/v1/chat/completions", headers=preflight(origin, method))
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert method in answer.headers["access-control-allow-methods"]
    allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
    assert {"authorization", "content-type", "x-stainless-lang"} <= allowed
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/messages", "anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key"),
        ("/api/chat", "authorization,content-type"),
        ("/v1/responses", "authorization,content-type,openai-organization,x-stainless-retry-count"),
    ],
)
def test_plugins_that_speak_other_apis_may_ask_from_their_page(guarded: Service, path: str, headers: str) -> None:
    answer = guarded.client.options(path, headers=preflight(NOTES, "POST", headers))
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, NOTES)
    allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
    assert set(headers.split(",")) <= allowed
    asked = guarded.post(path, {"model": ""}, headers={"Origin": NOTES, "x-api-key": KEY})
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (400, NOTES)


def test_a_page_on_the_network_may_reach_a_service_on_this_machine(guarded: Service) -> None:
    asked = {**preflight(PAGE), "Access-Control-Request-Private-Network": "true"}
    assert (
        guarded.client.options("/v1/answers", headers=asked).headers["access-control-allow-private-network"] == "true"
    )


def test_a_page_reads_answers_and_errors_with_the_key_of_its_user(guarded: Service) -> None:
    asked = {"Origin": PAGE, "Authorization": f"Bearer {KEY}"}
    listed = guarded.client.get("/v1/models", headers=asked)
    assert (listed.status_code, listed.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "Origin" in listed.headers["vary"]
    assert "X-Request-ID" in listed.headers["access-control-expose-headers"]
    missing = guarded.post("/v1/answers", ASK, headers=asked)
    assert (missing.status_code, missing.headers["access-control-allow-origin"]) == (404, PAGE)
    without = guarded.post("/v1/answers", ASK, headers={"Origin": PAGE})
    assert (without.status_code, without.headers["access-control-allow-origin"]) == (401, PAGE)


def test_a_page_gets_nothing_by_the_ticket_of_the_dashboard(guarded: Service) -> None:
    came = guarded.client.post("/dashboard/login", data={"key": KEY})
    cookie = {"Cookie": f"{COOKIE}={came.cookies[COOKIE]}"}
    guarded.client.cookies.clear()
    assert guarded.post("/v1/search", {"query": "x"}, headers=cookie).status_code == 404, "the ticket is valid"
    foreign = guarded.post("/v1/search", {"query": "x"}, headers={**cookie, "Origin": PAGE})
    assert (foreign.status_code, foreign.json()["code"]) == (403, "other_origin")


def test_other_pages_are_told_nothing(guarded: Service, public: Service) -> None:
    for running in (guarded, public):
        refused = running.client.options("/v1/answers", headers=preflight(OTHER))
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
    read = guarded.client.get("/v1/models", headers={"Origin": OTHER, "Authorization": f"Bearer {KEY}"})
    assert "access-control-allow-origin" not in read.headers
    asked = public.post("/v1/answers", ASK, headers={"Origin": OTHER})
    assert (asked.status_code, asked.json()["code"]) == (403, "other_origin")


def test_without_keys_a_page_of_an_allowed_origin_may_ask(public: Service) -> None:
    asked = public.post("/v1/answers", ASK, headers={"Origin": PAGE})
    assert (asked.json()["answer"], asked.headers["access-control-allow-origin"]) == ("Ada Brook", PAGE)
    login = public.client.post("/dashboard/login", data={"key": "x"}, headers={"Origin": PAGE})
    assert (login.status_code, login.json()["code"]) == (403, "other_origin"), "the dashboard has pages of its own"


def test_a_stream_is_readable_from_a_page_and_not_compressed(public: Service) -> None:
    head = {"Origin": PAGE, "Accept-Encoding": "gzip"}
    with public.client.stream("POST", "/v1/answers", json={**ASK, "stream": True}, headers=head) as answer:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "content-encoding" not in answer.headers
        assert "event: done" in answer.read().decode()


def test_by_default_there_are_no_other_origins(service: Service) -> None:
    refused = service.client.options("/v1/answers", headers=preflight(PAGE))
    assert refused.status_code == 405
    read = service.client.get("/v1/models", headers={"Origin": PAGE})
    assert not [name for name in read.headers if name.startswith("access-control-")]


def test_origins_are_read_as_browsers_write_them() -> None:
    def origins(text: str) -> Origins:
        return read_origins(load_settings(origins=text).part(ServingSettings))

    assert origins("").names == frozenset()
    assert origins("HTTPS://Chat.Example.org/ , http://localhost:3000").names == {PAGE, "http://localhost:3000"}
    assert origins("*").allows(OTHER)
    assert not origins(PAGE).allows(OTHER)
    for wrong in ("chat.example.org", "https://", "https://a.example/page", "https://*.example.org", "https://a@b"):
        with pytest.raises(ConfigError, match="RAGKV_ORIGINS"):
            origins(wrong)
