"""What the middleware does to answers as a whole: they are compressed where a client reads that."""

from __future__ import annotations

import httpx

from ragkv.api.middleware.stack import GZIP_BYTES
from tests.api.conftest import Service

GZIP = {"Accept-Encoding": "gzip"}


def test_an_answer_in_json_is_compressed_for_who_reads_it(service: Service) -> None:
    plain = service.client.get("/openapi.json", headers={"Accept-Encoding": "identity"})
    small = service.client.get("/openapi.json", headers=GZIP)
    assert small.headers["content-encoding"] == "gzip"
    assert "Accept-Encoding" in small.headers["vary"]
    assert int(small.headers["content-length"]) < len(plain.content) / 4
    assert small.json() == plain.json()
    assert "content-encoding" not in plain.headers


def test_a_small_answer_is_sent_as_it_is(service: Service) -> None:
    found = service.client.get("/v1/models/tiny", headers=GZIP)
    assert len(found.content) < GZIP_BYTES
    assert "content-encoding" not in found.headers


def test_an_event_stream_is_never_compressed(service: Service) -> None:
    for path, body in (
        ("/v1/answers", {"question": "Who built the harbour of Tarn?", "stream": True}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "stream": True}),
    ):
        with service.client.stream("POST", path, json=body, headers=GZIP) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert "content-encoding" not in stream.headers
            assert b"data:" in next(stream.iter_raw())


def test_an_error_keeps_its_form_when_it_is_compressed(service: Service) -> None:
    body = {f"unknown_{number}": number for number in range(12)}
    refused: httpx.Response = service.post("/v1/answers", {"question": "Who?", **body}, headers=GZIP)
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
