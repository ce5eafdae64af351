"""HEAD wherever GET is: the headers of the same answer."""

from __future__ import annotations

import time

import pytest

from tests.api.conftest import HARBOUR, Service
from tests.api.runtime.test_answers_together import until
from tests.api.test_faults import held

VARYING = {"date", "x-request-id", "ratelimit", "content-length"}


def head_of(service: Service, path: str) -> tuple[int, dict[str, str]]:
    answer = service.client.head(path)
    assert answer.content == b""
    return answer.status_code, dict(answer.headers)


@pytest.mark.parametrize(
    "path",
    [
        *("/healthz", "/readyz", "/openapi.json", "/docs", "/v1/models", "/v1/models/tiny", "/v1/models/none"),
        *("/v1/documents", "/v1/documents/harbour", "/v1/documents/harbour/text", "/v1/documents/none"),
        *("/v1/collections", "/v1/jobs", "/v1/answers", "/v1/answers?limit=0", "/v1/answers?x=1", "/nothing"),
    ],
)
def test_head_has_status_and_headers_of_get_and_no_body(service: Service, path: str) -> None:
    status, headers = head_of(service, path)
    same = service.client.get(path)
    assert status == same.status_code
    shown = {name: value for name, value in headers.items() if name not in VARYING}
    assert shown == {name: value for name, value in same.headers.items() if name not in VARYING}
    assert int(headers["content-length"]) > 0


def test_every_route_with_get_has_head(service: Service) -> None:
    paths = service.client.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        if "get" in methods:
            refused = service.client.request("PATCH", path.replace("{", "").replace("}", ""))
            assert "HEAD" in refused.headers["allow"], path


def test_head_of_a_stream_ends_at_once(service: Service) -> None:
    with held(service):
        job = service.post("/v1/documents", {**HARBOUR, "collection": "heads"}).json()["job_id"]
        started = time.monotonic()
        status, headers = head_of(service, f"/v1/jobs/{job}/events")
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        assert time.monotonic() - started < 5
    assert service.job(job)["finished"]
    until(lambda: service.client.get("/healthz").status_code == 200)


def test_the_log_and_the_metrics_tell_head_and_its_route(service: Service) -> None:
    head_of(service, "/v1/collections")
    metrics = service.client.get("/metrics").text
    lines = [line for line in metrics.splitlines() if 'method="HEAD"' in line and 'route="/v1/collections"' in line]
    assert lines


def test_head_is_no_post(service: Service) -> None:
    assert head_of(service, "/v1/search")[0] == 405
