"""What the middleware of Ray's proxy does with requests and with the proxy's own errors. Ray itself: tests/scale/."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.api.middleware.security_headers import SecurityHeadersMiddleware
from ragkv.api.replicas.proxy import HELD_BYTES, ONE_PLACE, middlewares
from ragkv.locality import HEADER, LONGEST, affinity


async def _headers(request: Request) -> Response:
    return JSONResponse([[name.decode(), value.decode()] for name, value in request.scope["headers"]])


def _behind(app: ASGIApp) -> TestClient:
    """A client of what Ray's proxy would serve with our middleware."""
    for each in middlewares():
        assert isinstance(each, Middleware)
        app = each.cls(app, *each.args, **each.kwargs)
    return TestClient(app)


@pytest.fixture
def replica() -> TestClient:
    """A replica that answers with the headers that it sees."""
    return _behind(SecurityHeadersMiddleware(Starlette(routes=[Route("/{path:path}", _headers, methods=["GET"])])))


def key_of(client: TestClient, path: str = "/v1/answers", **headers: str) -> str | None:
    seen = client.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()}).json()
    found = [value for name, value in seen if name == "x-session-id"]
    assert len(found) < 2
    return found[0] if found else None


def test_the_router_gets_what_the_client_says_the_request_is_about(replica: TestClient) -> None:
    key = affinity("", "default", "talk")
    assert key_of(replica, **{HEADER: key}) == key
    assert key_of(replica) is None


def test_without_that_the_credential_decides_and_does_not_show(replica: TestClient) -> None:
    key = key_of(replica, authorization="Bearer ragkv_secret")
    assert key == hashlib.sha256(b"Bearer ragkv_secret").hexdigest()[:32]
    assert key_of(replica, x_api_key="ragkv_other") not in (key, None)


def test_a_key_that_is_too_long_or_not_plain_does_not_count(replica: TestClient) -> None:
    assert key_of(replica, **{HEADER: "x" * LONGEST}) == "x" * LONGEST
    assert key_of(replica, **{HEADER: "x" * (LONGEST + 1)}) is None


def test_the_dashboard_and_the_metrics_have_one_replica(replica: TestClient) -> None:
    for path in ("/metrics", "/dashboard", "/dashboard/_nicegui_ws/socket.io/", "/rag/metrics", "/a/rag/dashboard/"):
        assert key_of(replica, path, **{HEADER: "d-another"}) == ONE_PLACE
    for path in ("/v1/documents/dashboard", "/rag/v1/documents/metrics", "/healthz"):
        assert key_of(replica, path, **{HEADER: "d-another"}) == "d-another"


def test_a_client_cannot_control_the_proxy(replica: TestClient) -> None:
    controls = ["x-session-id", "X_SESSION_ID", "serve_multiplexed_model_id", "x-request-timeout-seconds"]
    seen = replica.get("/v1/jobs", headers=dict.fromkeys([*controls, "x-request-disconnect-disabled"], "1")).json()
    assert {name for name, _ in seen}.isdisjoint(name.lower() for name in controls)
    assert "x-request-disconnect-disabled" not in {name for name, _ in seen}


async def _silent(scope: Scope, receive: Receive, send: Send) -> None:
    return


async def _raising(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("the replica is gone")


@pytest.mark.parametrize(
    "proxy",
    [
        _silent,
        _raising,
        PlainTextResponse("Path '/' not found. Ping http://.../-/routes for available routes.", 404),
        PlainTextResponse("deployment unavailable", 503),
    ],
)
@pytest.mark.parametrize("path", ["/v1/answers", "/v1/chat/completions"])
def test_an_error_of_the_proxy_is_one_that_clients_can_retry(proxy: ASGIApp, path: str) -> None:
    response = _behind(proxy).post(path, json={}, headers={"X-Request-ID": "mine"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-request-id"] == "mine"
    body = response.json()
    assert (body["error"] if "chat" in path else body)["code"] == "replica_lost"


def breaks_off(length: int | None, ends: bool = False) -> ASGIApp:
    """A replica that is killed after half of a response of `length` bytes, or of a stream (None).

    ends: Ray's proxy ends the response itself; else it raises an error.
    """

    async def half(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"x-content-type-options", b"nosniff")]
        headers += [] if length is None else [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if not ends:
            raise RuntimeError("the replica is gone")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return half


@pytest.mark.parametrize("length", [None, HELD_BYTES + 1])
def test_a_response_that_breaks_off_is_not_finished_by_the_proxy(length: int | None) -> None:
    with pytest.raises(RuntimeError):
        _behind(breaks_off(length)).get("/v1/answers")


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("length", [5, HELD_BYTES])
def test_a_response_of_known_length_that_breaks_off_can_be_asked_for_again(length: int, ends: bool) -> None:
    response = _behind(breaks_off(length, ends)).get("/v1/answers")
    assert (response.status_code, response.json()["code"]) == (503, "replica_lost")
    assert response.headers["retry-after"] == "1"


def test_a_stream_goes_on_as_it_comes() -> None:
    seen = list[str]()

    async def noted(message: Message) -> None:
        seen.append(message["type"])

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-content-type-options", b"nosniff")]})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        assert seen == ["http.response.start", "http.response.body"]
        await send({"type": "http.response.body", "body": b"two", "more_body": False})

    (middleware,) = middlewares()
    scope = {"type": "http", "method": "GET", "path": "/v1/answers", "headers": []}
    asyncio.run(middleware.cls(stream)(scope, _nothing, noted))  # type: ignore[call-arg, arg-type]
    assert len(seen) == 3


def test_a_head_has_the_length_and_no_body() -> None:
    app = SecurityHeadersMiddleware(Starlette(routes=[Route("/{path:path}", _headers, methods=["GET"])]))
    response = _behind(app).head("/v1/answers")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) > 0


def test_a_response_that_has_not_changed_has_a_length_and_no_body() -> None:
    app = SecurityHeadersMiddleware(Response(status_code=304, headers={"Content-Length": "9", "ETag": "a"}))
    assert _behind(app).get("/dashboard").status_code == 304


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def test_errors_of_a_replica_stay_as_they_are(replica: TestClient) -> None:
    missing = _behind(SecurityHeadersMiddleware(PlainTextResponse("no such thing", 404)))
    assert missing.get("/v1/documents/x").text == "no such thing"


def test_a_response_has_one_request_id(replica: TestClient) -> None:
    def twice(app: ASGIApp) -> ASGIApp:
        """Ray's own middleware, which adds the id that it knows."""

        async def added(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_more(message: dict[str, object]) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-request-id", b"of-the-proxy")]  # type: ignore[misc]
                await send(message)

            await app(scope, receive, send_more)  # type: ignore[arg-type]

        return added

    wrapped: Callable[[ASGIApp], ASGIApp] = twice
    response = _behind(wrapped(SecurityHeadersMiddleware(PlainTextResponse("ok")))).get(
        "/", headers={"X-Request-ID": "a"}
    )
    assert response.headers.get_list("x-request-id") == ["a"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Content-Length", "2"), ("Transfer-Encoding", "chunked")], 400),
        ([("X-API-Key", "a"), ("X-API-Key", "a")], 400),
        ([("Authorization", "Bearer a"), ("Authorization", "Bearer b")], 400),
        ([("X-Long", "x" * 20_000)], 431),
        ([(f"X-{number}", "y") for number in range(3000)], 431),
    ],
)
def test_a_head_that_can_be_read_in_two_ways_reaches_no_replica(headers: list[tuple[str, str]], status: int) -> None:
    response = _behind(_raising).get("/v1/jobs", headers=headers)
    assert (response.status_code, response.headers["connection"]) == (status, "close")
    assert response.headers["x-content-type-options"] == "nosniff"


def test_rays_own_health_check_is_left_alone() -> None:
    assert _behind(PlainTextResponse("success")).get("/-/healthz").text == "success"
