"""Limits of tenants over HTTP: 429 with Retry-After and the quotas, for one tenant and not for the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from ragkv.api.middleware.keys import make_key, read_keys, read_operators
from ragkv.api.runtime.rate_limits import RateLimiter, TenantLimits
from ragkv.client import Client, Refused
from ragkv.errors import ConfigError
from tests.api.conftest import BRIDGE, HARBOUR, Service, serving, settings
from tests.api.test_bad_input import check_problem

ASK = {"question": "Who built the harbour of Tarn?", "top_k": 1}
LIMITS = {"few": {"requests": 4}, "words": {"tokens": 100}, "bytes": {"bytes": 600}, "full": {"stored": 1}}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, dict[str, str]]]]:
    """A service whose tenants have different limits, and the headers of each."""
    made = {name: make_key(name, LIMITS.get(name)) for name in (*LIMITS, "free", "ops")}
    pairs = ", ".join(pair for _, pair in made.values())
    chosen = settings(Path(tmp_path_factory.mktemp("limited")), api_keys=pairs, operators="ops")
    with serving(chosen) as service:
        yield service, {name: {"X-API-Key": key} for name, (key, _) in made.items()}


def test_requests_beyond_the_quota_are_refused_until_they_come_back(
    limited: tuple[Service, dict[str, dict[str, str]]],
) -> None:
    service, headers = limited
    seen = [service.client.get("/v1/documents", headers=headers["few"]) for _ in range(5)]
    assert [each.status_code for each in seen] == [200] * 4 + [429]
    assert [re.findall(r"r=(\d+)", each.headers["ratelimit"]) for each in seen[:4]] == [["3"], ["2"], ["1"], ["0"]]
    assert seen[0].headers["ratelimit-policy"] == '"requests";q=4;w=60'
    problem = check_problem(seen[4], 429)
    assert problem["code"] == "rate_limited"
    assert 1 <= int(seen[4].headers["retry-after"]) <= 15
    assert service.client.get("/v1/models", headers=headers["few"]).json()["error"]["type"] == "rate_limit_error"
    assert service.client.get("/readyz", headers=headers["few"]).status_code == 200, "health is no part of the API"
    free = service.client.get("/v1/documents", headers=headers["free"])
    assert (free.status_code, "ratelimit" in free.headers) == (200, False)


def test_tokens_of_prompt_and_answer_are_counted(limited: tuple[Service, dict[str, dict[str, str]]]) -> None:
    service, headers = limited
    key = headers["words"]
    assert service.post("/v1/documents?wait=true", HARBOUR, headers=key).status_code == 200
    asked: list[httpx.Response] = []
    while (response := service.post("/v1/answers", ASK, headers=key)).status_code == 200:
        asked.append(response)
        assert len(asked) < 20
    assert check_problem(response, 429)["code"] == "rate_limited"
    used = sum(
        sum(each.json()["report"]["tokens"][name] for name in ("context", "question", "generated")) for each in asked
    )
    assert used >= 100
    metrics = service.client.get("/metrics", headers=key).text
    assert f'ragkv_tenant_usage_total{{resource="tokens",tenant="words"}} {used:.1f}' in metrics
    assert service.post("/v1/search", {"query": "harbour"}, headers=key).status_code == 200, "a search uses no tokens"


def test_document_bytes_are_counted(limited: tuple[Service, dict[str, dict[str, str]]]) -> None:
    service, headers = limited
    body = {"id": "a", "text": "The lamp of Tarn. " * 40}
    first = service.post("/v1/documents?wait=true", body, headers=headers["bytes"])
    second = service.post("/v1/documents", body, headers=headers["bytes"])
    assert (first.status_code, second.status_code) == (200, 429)
    assert service.client.get("/v1/documents", headers=headers["bytes"]).status_code == 200


def test_a_tenant_whose_documents_need_all_its_room_adds_no_more(
    limited: tuple[Service, dict[str, dict[str, str]]],
) -> None:
    service, headers = limited
    key = headers["full"]
    assert service.post("/v1/documents?wait=true", HARBOUR, headers=key).status_code == 200
    refused = [
        service.post("/v1/documents", {**BRIDGE, "collection": "other"}, headers=key),
        service.client.put("/v1/documents/x", json={"text": "x"}, headers=key),
        service.client.post("/v1/documents", files={"files": ("a.txt", b"A lamp.")}, headers=key),
    ]
    assert {check_problem(each, 413)["code"] for each in refused} == {"quota_exceeded"}
    assert service.client.delete("/v1/documents/harbour", headers=key).status_code == 204
    assert service.post("/v1/documents?wait=true", BRIDGE, headers=key).status_code == 200


def test_a_tenant_sees_its_own_metrics_and_an_operator_those_of_all(
    limited: tuple[Service, dict[str, dict[str, str]]],
) -> None:
    service, headers = limited
    for name in ("free", "few"):
        service.client.get("/v1/documents", headers=headers[name])
    shown = {
        name: set(re.findall(r'tenant="(\w+)"', service.client.get("/metrics", headers=headers[name]).text))
        for name in ("free", "ops")
    }
    assert shown["free"] == {"free"}
    assert shown["ops"] >= {"free", "few"}


def test_the_client_says_when_to_come_back(limited: tuple[Service, dict[str, dict[str, str]]]) -> None:
    service, headers = limited
    with Client(service.url, headers["bytes"]["X-API-Key"], retries=0) as client:
        with suppress(Refused):  # an earlier test may have spent the quota
            client.send([{"id": "long", "text": "The lamp of Tarn. " * 80}])
        with pytest.raises(Refused) as refused:
            client.send([{"id": "more", "text": "A lamp."}])
    assert (refused.value.status, refused.value.code) == (429, "rate_limited")
    assert refused.value.retry_after is not None


def test_without_keys_the_limits_hold_for_all_together(tmp_path: Path) -> None:
    with serving(settings(tmp_path, tenant_requests=2)) as service:
        assert [service.client.get("/v1/documents").status_code for _ in range(3)] == [200, 200, 429]
        assert "ragkv_tenant_usage_total{" not in service.client.get("/metrics").text


# The setting


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (";speed=1", "NAME=NUMBER"),
        (";requests=-1", "NAME=NUMBER"),
        (";requests", "NAME=NUMBER"),
        (";requests=", "NAME=NUMBER"),
        (";", "NAME=NUMBER"),
    ],
)
def test_a_wrong_limit_is_refused_at_start(more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_keys(make_key("acme")[1] + more)


def test_several_keys_of_a_tenant_agree_about_its_limits() -> None:
    first, second = (make_key("acme")[1] for _ in range(2))
    assert read_keys(f"{first};requests=5, {second};tokens=7").limits == {"acme": {"requests": 5, "tokens": 7}}
    with pytest.raises(ConfigError, match="different limits"):
        read_keys(f"{first};requests=5, {second};requests=6")


def test_an_operator_needs_a_key() -> None:
    assert read_operators(" acme ,", frozenset({"acme"})) == {"acme"}
    with pytest.raises(ConfigError, match="nobody has no key"):
        read_operators("nobody", frozenset({"acme"}))


def test_what_a_tenant_uses_at_another_replica_counts_once() -> None:
    here, there = (RateLimiter(TenantLimits(requests=10, tokens=100), {}, lambda: 0.0) for _ in range(2))
    there.admit("acme", ())
    here.count_elsewhere("there", there.totals())  # what was used before this replica came counts nowhere
    assert here.headers("acme")["RateLimit"].startswith('"requests";r=10;')
    for _ in range(4):
        there.admit("acme", ())
    there.charge("acme", "tokens", 30)
    for _ in range(2):
        here.count_elsewhere("there", there.totals())
    assert here.headers("acme")["RateLimit"] == '"requests";r=6;t=24, "tokens";r=70;t=18'
    assert here.headers("other")["RateLimit"] == '"requests";r=10;t=0, "tokens";r=100;t=0'
    assert "acme" not in here.totals(), "what happened elsewhere is not told as this replica's own"


def test_limits_of_one_tenant_are_limits() -> None:
    assert not RateLimiter(TenantLimits(stored=10), {}).limited
    assert RateLimiter(TenantLimits(bytes=1), {}).limited
    assert RateLimiter(TenantLimits(), {"acme": {"tokens": 1}}).limited
