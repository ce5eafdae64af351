"""Headers of every response, including errors and streams."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ragkv.api.middleware.security_headers import HEADERS
from tests.api.conftest import Service
from tests.api.streams import streamed

ASK = {"question": "Who built the harbour of Tarn?"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/answers", ASK, 200),
        ("POST", "/v1/answers", {"question": ""}, 422),
        ("POST", "/v1/answers", {"question": "a" * 3 * 2**20}, 413),
        ("PUT", "/v1/answers", None, 405),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/models/none", None, 404),
        ("GET", "/nothing", None, 404),
        ("GET", "/healthz", None, 200),
        ("GET", "/readyz", None, 200),
        ("GET", "/openapi.json", None, 200),
    ],
)
def test_every_response_has_the_security_headers(
    service: Service, method: str, path: str, body: Any, status: int
) -> None:
    response = service.client.request(method, path, json=body)
    assert response.status_code == status
    check_strict(response)


def check_strict(response: httpx.Response) -> None:
    for name, value in HEADERS.items():
        if name != "Cache-Control":
            assert response.headers[name] == value
    assert "no-store" in response.headers["cache-control"]
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert response.headers["x-request-id"]
    assert "server" not in response.headers


def test_a_stream_has_the_headers(service: Service) -> None:
    with streamed(service, ASK["question"]) as (response, events):
        assert list(events)[-1][0] == "done"
    check_strict(response)


def test_an_unexpected_error_has_the_headers(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("a secret of the service")

    monkeypatch.setattr(service.engine_thread, "health", broken)
    response = httpx.get(f"{service.url}/healthz")  # the server closes the connection afterwards
    assert response.status_code == 500
    check_strict(response)
    assert "secret" not in response.text
    assert response.json()["request_id"] == response.headers["x-request-id"]


def test_a_plain_request_id_of_the_client_is_kept(service: Service) -> None:
    for given, kept in (("my-id.1_2", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("<x>", False)):
        response = service.client.get("/nothing", headers={"X-Request-ID": given})
        assert (response.headers["x-request-id"] == given) is kept
        assert response.json()["request_id"] == response.headers["x-request-id"]
    ids = {service.client.get("/healthz").headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5
