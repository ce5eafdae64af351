"""API keys: authentication, tenants, and the responses to refused requests."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.api.middleware.auth import PUBLIC_PATHS, AuthMiddleware
from ragkv.api.middleware.keys import Keys, make_key, read_keys
from ragkv.errors import ConfigError, InputError
from tests.api.conftest import HARBOUR, Service, serving, settings

ASK = {"question": "Who built the harbour of Tarn?"}


@dataclass(frozen=True)
class Guarded:
    """A service with keys.

    Attributes:
        service: The service.
        keys: Keys by name; `acme2` is the second key of tenant acme.
    """

    service: Service
    keys: dict[str, str]

    def client(self, tenant: str) -> httpx.Client:
        """A client that sends the key with this name."""
        return httpx.Client(
            base_url=self.service.url, timeout=60, headers={"Authorization": f"Bearer {self.keys[tenant]}"}
        )


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A service with the tenants acme (two keys) and zeta."""
    made = {name: make_key(name.removesuffix("2")) for name in ("acme", "acme2", "zeta")}
    pairs = ", ".join(pair for _, pair in made.values())
    with serving(settings(tmp_path_factory.mktemp("guarded"), api_keys=pairs)) as service:
        yield Guarded(service, {name: key for name, (key, _) in made.items()})


THEIRS = (
    *("/v1/chat", "/v1/models", "/v1/embeddings", "/v1/completions", "/v1/responses"),
    *("/v1/messages", "/api/"),
)
"""Routes with the errors of other APIs."""


def routes(guarded: Guarded) -> list[tuple[str, str]]:
    """List (method, path) of every route, with the path parameters filled in."""
    found = []
    for route in walk(guarded.service.app.routes):
        path = re.sub(r"\{[^}]+\}", "x", route.path)
        found += [(method, path) for method in sorted(route.methods or {"GET"})]
    return found


def auth_of(guarded: Guarded) -> AuthMiddleware:
    """Return the authentication middleware of the running service."""
    layer = guarded.service.app.middleware_stack
    while not isinstance(layer, AuthMiddleware):
        layer = layer.app  # type: ignore[union-attr]
    return layer


def tenant_of(keys: Keys, key: str) -> str | None:
    caller = keys.caller_of(key)
    return None if caller is None else caller.tenant.name


def walk(given: Any) -> Iterator[Any]:
    for route in given:
        inner = getattr(route, "original_router", None) or getattr(route, "routes", None)
        if hasattr(route, "path") and hasattr(route, "methods"):
            yield route
        elif inner is not None:
            yield from walk(getattr(inner, "routes", inner))


def test_two_different_keys_are_refused_and_the_same_one_twice_is_not(guarded: Guarded) -> None:
    acme, zeta = guarded.keys["acme"], guarded.keys["zeta"]
    with httpx.Client(base_url=guarded.service.url) as client:
        for bearer, other in ((acme, zeta), (acme, "wrong"), ("wrong", acme)):
            headers = {"Authorization": f"Bearer {bearer}", "X-API-Key": other}
            refused = client.get("/v1/documents", headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (401, "two_keys")
            assert client.get("/healthz", headers=headers).status_code == 200
        headers = {"Authorization": f"Bearer {acme}", "X-API-Key": acme}
        assert client.get("/v1/documents", headers=headers).status_code == 200
        assert client.get("/v1/documents", headers={**headers, "Authorization": "Basic eA=="}).status_code == 200


def test_every_route_except_healthz_needs_a_key(guarded: Guarded) -> None:
    tried = [*routes(guarded), ("GET", "/metrics"), ("GET", "/dashboard"), ("GET", "/nothing"), ("OPTIONS", "/")]
    paths = {path for _, path in tried}
    assert {"/v1/answers", "/v1/documents", "/v1/models", "/readyz", "/openapi.json", "/healthz"} <= paths
    bad = ({}, {"Authorization": "Bearer wrong"}, {"X-API-Key": "wrong"}, {"Authorization": "Basic d3Jvbmc="})
    with httpx.Client(base_url=guarded.service.url, timeout=10) as client:
        for method, path in tried:
            for headers in bad:
                response = client.request(method, path, headers=headers)
                if path in PUBLIC_PATHS:
                    assert response.status_code in (200, 405), (method, path)
                    continue
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"].startswith("Bearer")
                if method == "HEAD":
                    continue
                theirs = path.startswith(THEIRS)
                assert set(response.json()) >= ({"error"} if theirs else {"status", "detail", "code"})


@pytest.mark.parametrize("path", ["/healthz/x", "//healthz", "/healthz/../v1/jobs/x", "/HEALTHZ", "/healthz%2fx"])
def test_paths_similar_to_healthz_need_a_key(guarded: Guarded, path: str) -> None:
    with httpx.Client(base_url=guarded.service.url, follow_redirects=False) as client:
        response = client.request("GET", httpx.URL(guarded.service.url + path))
        assert response.status_code in (401, 404)
        assert "model" not in response.text


def test_every_key_opens_its_own_tenant_only(guarded: Guarded) -> None:
    with guarded.client("acme") as acme, guarded.client("acme2") as again, guarded.client("zeta") as zeta:
        assert acme.post("/v1/documents?wait=true", json=HARBOUR).json()["status"] == "completed"
        for client in (acme, again):
            answered = client.post("/v1/answers", json=ASK)
            assert (answered.status_code, answered.json()["answer"]) == (200, "Ada Brook")
        assert zeta.post("/v1/answers", json=ASK).status_code == 404
        assert zeta.post("/v1/answers", json={**ASK, "collection": "acme:default"}).status_code == 404
        assert zeta.post("/v1/answers", json={**ASK, "stream": True}).status_code == 404
        detail = zeta.post("/v1/answers", json=ASK).json()["detail"]
        assert detail.startswith("collection 'default' has no documents"), "the message uses the tenant's own name"


def test_both_key_headers_are_accepted(guarded: Guarded) -> None:
    key = guarded.keys["acme"]
    with httpx.Client(base_url=guarded.service.url) as client:
        for headers in (
            {"X-API-Key": key},
            {"Authorization": f"bearer {key}"},
            {"Authorization": f"Bearer  {key}"},
            {"Authorization": "Basic eDp5", "X-API-Key": key},
        ):
            assert client.get("/readyz", headers=headers).status_code == 200, headers
        assert client.get("/readyz", headers={"Authorization": "Bearer no", "X-API-Key": key}).status_code == 401


def test_openais_client_raises_its_own_authentication_error(guarded: Guarded) -> None:
    url = f"{guarded.service.url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.models.list()
    assert refused.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=url, api_key=guarded.keys["zeta"], max_retries=0) as client:
        assert next(iter(client.models.list())).id == "tiny"


def test_refused_requests_are_counted_and_logged_without_the_key(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    auth_middleware = auth_of(guarded)
    before, secret = auth_middleware.refused, "correct-horse-battery-staple"
    auth_middleware._logged = (before, -1e9)
    with caplog.at_level(logging.WARNING, "ragkv.api"), httpx.Client(base_url=guarded.service.url) as client:
        bodies = [client.get("/readyz", headers={"X-API-Key": secret}).text for _ in range(5)]
    assert auth_middleware.refused == before + 5
    lines = [record.getMessage() for record in caplog.records if record.name == "ragkv.api"]
    assert len(lines) == 1, "five tries in a moment are one line"
    assert "127.0.0.1" in lines[0]
    assert secret not in "".join([*lines, *bodies])


def test_healthz_without_a_key_shows_the_status_only(guarded: Guarded) -> None:
    with httpx.Client(base_url=guarded.service.url) as client:
        assert client.get("/healthz").json() == {"status": "ok"}


def test_the_schema_says_that_a_key_is_needed(guarded: Guarded, service: Service) -> None:
    with guarded.client("acme") as client:
        schema = client.get("/openapi.json").json()
    assert set(schema["components"]["securitySchemes"]) == {"bearer", "key"}
    assert schema["security"] == [{"bearer": []}, {"key": []}]
    assert schema["paths"]["/healthz"]["get"]["security"] == []
    assert "401" in schema["paths"]["/v1/answers"]["post"]["responses"]
    for secret in guarded.keys.values():
        assert secret not in json.dumps(schema)
    assert service.client.get("/openapi.json").json()["security"][-1] == {}


def test_a_new_key_is_random_and_its_pair_holds_only_the_hash() -> None:
    made = [make_key("acme") for _ in range(20)]
    assert len({key for key, _ in made}) == 20
    for key, pair in made:
        assert len(key) > 40
        assert key not in pair
        assert tenant_of(read_keys(pair), key) == "acme"
        assert tenant_of(read_keys(pair), pair.partition("=")[2]) is None


@pytest.mark.parametrize("tenant", ["", "a:b", "a b", "-a", "a=b", "a,b", "ä", "a" * 64, "a\n"])
def test_an_invalid_tenant_name_is_refused(tenant: str) -> None:
    with pytest.raises(InputError):
        make_key(tenant)
    with pytest.raises(ConfigError):
        read_keys(f"{tenant}={'0' * 64},b={'1' * 64}")


def test_keys_may_be_in_a_file(tmp_path: Path) -> None:
    keys = [make_key(tenant) for tenant in ("acme", "zeta")]
    path = tmp_path / "keys"
    path.write_text("# may use the service\n" + "\n".join(f"{pair}  # since May" for _, pair in keys) + "\n\n")
    assert [tenant_of(read_keys(str(path)), key) for key, _ in keys] == ["acme", "zeta"]
    assert not read_keys("")


@pytest.mark.parametrize("setting", ["acme=ragkv_secret", "ragkv_secret", "acme", "=", "acme=" + "g" * 64, ",", "a=b,"])
def test_an_invalid_key_setting_is_refused_and_not_repeated(setting: str) -> None:
    with pytest.raises(ConfigError, match="RAGKV_API_KEYS") as refused:
        read_keys(setting)
    assert "secret" not in str(refused.value)
    assert "g" * 64 not in str(refused.value)


def test_an_empty_key_file_or_a_duplicate_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none").write_text("# nobody yet\n")
    with pytest.raises(ConfigError, match="nobody"):
        read_keys(str(tmp_path / "none"))
    pair = make_key("acme")[1]
    with pytest.raises(ConfigError, match="twice"):
        read_keys(f"{pair},{pair.replace('acme', 'zeta')}")


@given(st.text(), st.integers(1, 5))
def test_only_the_keys_are_keys(text: str, count: int) -> None:
    made = [make_key(f"t{n}") for n in range(count)]
    keys = read_keys(",".join(pair for _, pair in made))
    assert tenant_of(keys, text) is None
    assert [tenant_of(keys, key) for key, _ in made] == [f"t{n}" for n in range(count)]
    assert keys.tenants == {f"t{n}" for n in range(count)}
    assert tenant_of(Keys(), text) is None


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://localhost"])
def test_without_keys_cross_origin_writes_are_refused(service: Service, origin: str) -> None:
    before = service.client.get("/v1/documents").json()
    form = {"files": ("sly.txt", b"A page of elsewhere wrote this.")}
    for send in (
        lambda: service.client.post("/v1/documents", files=form, headers={"origin": origin}),
        lambda: service.client.post("/v1/answers", json=ASK, headers={"origin": origin}),
        lambda: service.client.delete("/v1/documents/harbour", headers={"origin": origin}),
    ):
        refused = send()
        assert (refused.status_code, refused.json()["code"]) == (403, "other_origin")
    assert service.client.get("/v1/documents").json() == before
    own = {"origin": service.url}
    assert service.client.post("/v1/answers", json=ASK, headers=own).status_code == 200


def test_a_key_is_accepted_from_any_origin(guarded: Guarded) -> None:
    with guarded.client("acme") as client:
        asked = client.post("/v1/answers", json=ASK, headers={"origin": "https://app.example"})
    assert asked.status_code != 403
