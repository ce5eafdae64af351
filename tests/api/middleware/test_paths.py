"""The service below a path of a proxy, and addresses with a slash at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ragkv.api.middleware.keys import make_key
from ragkv.api.middleware.paths import read_prefix
from ragkv.config import ServingSettings, load_settings
from ragkv.errors import ConfigError
from tests.api.conftest import HARBOUR, Service, serving, settings

ASK = {"question": "Who built the harbour of Tarn?"}
BELOW = {"X-Forwarded-Prefix": "/tools/ragkv"}


@pytest.fixture(scope="module")
def below(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that a proxy serves below /rag."""
    with serving(settings(tmp_path_factory.mktemp("below"), root_path="/rag/")) as running:
        assert running.post("/rag/v1/documents?wait=true", HARBOUR).status_code == 200
        yield running


@pytest.mark.parametrize("path", ["/rag", ""])
def test_a_proxy_may_leave_the_path_in_requests_or_take_it_off(below: Service, path: str) -> None:
    assert below.post(f"{path}/v1/answers", ASK).json()["answer"] == "Ada Brook"
    assert below.client.get(f"{path}/healthz").json()["status"] == "ok"
    missing = below.client.get(f"{path}/v1/models/none")
    assert (missing.status_code, set(missing.json())) == (404, {"error"}), "errors have the form of their route"


def test_what_only_begins_like_the_path_is_not_below_it(below: Service) -> None:
    assert below.client.get("/rags/healthz").status_code == 404
    assert below.client.get("/rag/rag/healthz").status_code == 404


def test_addresses_in_responses_are_below_the_path(below: Service) -> None:
    queued = below.post("/rag/v1/documents", {**HARBOUR, "id": "other"})
    job = queued.headers["location"]
    assert job == f"/rag/v1/jobs/{queued.json()['job_id']}"
    assert below.client.get(job).status_code == 200
    assert below.client.get("/rag/openapi.json").json()["servers"] == [{"url": "/rag"}]
    assert below.client.get("/rag/openapi.json").json()["paths"]["/v1/answers"], "paths are relative to it"


def test_the_log_and_the_metrics_name_the_route_without_the_path(below: Service) -> None:
    below.client.get("/rag/v1/collections")
    metrics = below.client.get("/rag/metrics").text
    assert 'route="/v1/collections"' in metrics
    assert "/rag" not in metrics


def test_a_proxy_may_name_the_path_with_each_request(service: Service, below: Service) -> None:
    for running in (service, below):
        queued = running.post("/v1/documents", {**HARBOUR, "collection": "paths"}, headers=BELOW)
        assert queued.headers["location"].startswith("/tools/ragkv/v1/jobs/")
        schema = running.client.get("/openapi.json", headers=BELOW).json()
        assert schema["servers"] == [{"url": "/tools/ragkv"}]
    assert "servers" not in service.client.get("/openapi.json").json()


def test_a_path_that_a_client_names_takes_nothing_off(service: Service) -> None:
    assert service.client.get("/x/metrics", headers={"X-Forwarded-Prefix": "/x"}).status_code == 404


@pytest.mark.parametrize("named", ["//evil.example", "http://evil.example", "/a b", "/a/../b", '/"><script>', "/é"])
def test_what_is_no_path_is_not_repeated(service: Service, named: str) -> None:
    queued = service.client.post(
        "/v1/documents", json={**HARBOUR, "collection": "paths"}, headers={"X-Forwarded-Prefix": named.encode()}
    )
    assert "evil" not in queued.headers["location"] or queued.headers["location"].startswith("/evil.example/v1/")
    assert "//" not in queued.headers["location"]
    assert not set(' "<>é') & set(queued.headers["location"])


def test_the_path_is_that_of_the_settings_or_of_the_public_address() -> None:
    def prefix(**given: str) -> str:
        return read_prefix(load_settings(**given).part(ServingSettings))

    assert prefix() == prefix(root_path="/") == prefix(public_url="https://a.example/") == ""
    assert prefix(root_path="rag") == prefix(root_path="/rag/") == prefix(public_url="https://a.example/rag/") == "/rag"
    assert prefix(root_path="/a", public_url="https://a.example/b") == "/a"
    for wrong in ("/a b", "/a/../b", "https://a.example/rag", "/a?b"):
        with pytest.raises(ConfigError, match="RAGKV_ROOT_PATH"):
            prefix(root_path=wrong)


@pytest.mark.parametrize(
    "path",
    ["/healthz/", "/readyz/", "/metrics/", "/v1/models/", "/v1/models/tiny/", "/v1/documents/", "/openapi.json/"],
)
def test_a_slash_at_the_end_is_answered_directly(service: Service, path: str) -> None:
    with httpx.Client(base_url=service.url, follow_redirects=False) as client:
        found, same = client.get(path), client.get(path.rstrip("/"))
        assert (found.status_code, same.status_code) == (200, 200)
        assert found.headers["content-type"] == same.headers["content-type"]


def test_a_question_to_an_address_with_a_slash_keeps_its_body(service: Service) -> None:
    with httpx.Client(base_url=service.url, follow_redirects=False, timeout=60) as client:
        assert client.post("/v1/answers/", json=ASK).json()["answer"] == "Ada Brook"
        chat = {"model": "tiny", "messages": [{"role": "user", "content": ASK["question"]}]}
        assert client.post("/v1/chat/completions/", json=chat).json()["choices"]
        assert client.get("/v1/jobs/nothing/").json()["code"] == "not_found"
        assert client.get("/nothing/").status_code == 404


def test_an_id_may_end_with_a_slash(service: Service) -> None:
    names = ("shelf/", "shelf", "/")
    for name in names:
        service.client.put(f"/v1/documents/{name}?collection=slashes&wait=true", json={"text": f"The lamp of {name}."})
    shown = [service.client.get(f"/v1/documents/{name}?collection=slashes").json()["id"] for name in names]
    assert shown == list(names)


def test_roles_and_limits_hold_for_every_form_of_an_address(tmp_path: Path) -> None:
    key, pair = make_key("acme", {"tokens": 1}, "reader")
    with serving(settings(tmp_path, api_keys=pair, root_path="/rag")) as running:
        head = {"Authorization": f"Bearer {key}"}
        for path in ("/rag/v1/documents/", "/v1/documents/", "/rag/v1/documents"):
            assert running.post(path, HARBOUR, headers=head).json()["code"] == "forbidden", path
            assert running.post(path, HARBOUR).json()["code"] == "no_api_key", path
        assert running.post("/rag/v1/answers/", ASK, headers=head).status_code == 404, "a reader may ask"
        assert running.client.get("/rag/healthz/").status_code == 200
