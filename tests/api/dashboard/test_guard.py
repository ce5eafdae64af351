"""Login: a key is exchanged for a ticket, which gives the same access to pages of this service only."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from ragkv.api.dashboard import guard
from ragkv.api.dashboard.guard import COOKIE, LOGIN, TICKET_SECONDS, LoginTickets
from ragkv.api.middleware.auth import AuthMiddleware
from ragkv.api.middleware.authenticator import Authenticator
from ragkv.api.middleware.keys import Keys, make_key, read_keys
from ragkv.api.observability.audit import AuditLog
from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.tenants import Tenant
from tests.api.dashboard.conftest import Desk

ACME = Caller(Tenant("acme"), "ada")
PAGE = {"Accept": "text/html"}


def tickets(*tenants: str) -> LoginTickets:
    return Authenticator(read_keys(",".join(make_key(tenant)[1] for tenant in tenants))).tickets


def tenant_of(made: LoginTickets, ticket: str) -> str | None:
    caller = made.caller_of(ticket)
    return None if caller is None else caller.tenant.name


def test_a_ticket_is_valid_for_its_tenant_until_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tickets("acme", "zeta")
    ticket = made.issue(ACME)
    assert tenant_of(made, ticket) == "acme"
    now = guard.time.time()
    monkeypatch.setattr(guard.time, "time", lambda: now + TICKET_SECONDS + 1)
    assert tenant_of(made, ticket) is None


def test_a_changed_ticket_is_invalid() -> None:
    made = tickets("acme", "zeta")
    ticket = made.issue(ACME)
    for changed in (
        ticket.replace("acme", "zeta"),
        ticket[:-1],
        ticket.upper(),
        "",
        "..",
        "acme",
        "\udc80.1.2",
        "ä.9.9",
    ):
        assert tenant_of(made, changed) is None, changed


def test_a_ticket_of_other_keys_is_invalid() -> None:
    one, other = tickets("acme"), tickets("acme")
    assert tenant_of(other, one.issue(ACME)) is None
    assert tenant_of(Authenticator(Keys()).tickets, one.issue(ACME)) is None


def test_a_browser_gets_the_login_page_and_a_program_a_401(desk: Desk) -> None:
    with httpx.Client(base_url=desk.url) as client:
        for path in ("/dashboard", "/dashboard/", "/dashboard/x"):
            asked, refused = client.get(path, headers=PAGE), client.get(path)
            assert (asked.status_code, refused.status_code) == (401, 401)
            assert '<form method="post"' in asked.text
            assert "script" not in asked.headers["content-security-policy"]
            assert refused.json()["code"] == "no_api_key"
        assert client.get("/v1/documents", headers=PAGE).headers["content-type"] == "application/problem+json"


def test_the_address_of_the_service_leads_to_the_dashboard(desk: Desk) -> None:
    found = desk.client.get("/", follow_redirects=False)
    assert (found.status_code, found.headers["location"]) == (307, "/dashboard/")
    with httpx.Client(base_url=desk.url) as client:
        assert '<form method="post"' in client.get("/", headers=PAGE).text
        assert client.get("/").json()["code"] == "no_api_key"


def test_the_ticket_works_like_the_key_from_own_pages_only(desk: Desk) -> None:
    with httpx.Client(base_url=desk.url) as client:
        wrong = client.post(LOGIN, data={"key": "ragkv_wrong"}, headers=PAGE)
        assert (wrong.status_code, COOKIE in wrong.cookies) == (401, False)
        assert "not known" in wrong.text
        came = client.post(LOGIN, data={"key": desk.key}, headers=PAGE)
        assert (came.status_code, came.headers["location"]) == (303, "/dashboard")
        cookie = came.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert desk.key.lower() not in cookie
        assert client.get("/v1/documents").status_code == 200, "it opens what the key opens"
        assert client.get("/v1/documents/harbour").json()["id"] == "harbour"
        form = {"question": "Who built the harbour of Tarn?"}
        foreign = client.post("/v1/answers", json=form, headers={"Origin": "http://evil.example"})
        assert (foreign.status_code, foreign.json()["code"]) == (403, "other_origin")
        client.post("/dashboard/logout")
        assert client.get("/v1/documents").status_code == 401


def test_below_a_path_of_a_proxy_the_page_its_assets_and_the_login_are_below_it(desk: Desk) -> None:
    below = {"X-Forwarded-Prefix": "/a/rag"}
    with httpx.Client(base_url=desk.url, headers=below, follow_redirects=False) as client:
        assert 'action="/a/rag/dashboard/login"' in client.get("/dashboard", headers=PAGE).text
        assert 'action="/a/rag/dashboard/login"' in client.post(LOGIN, data={"key": "x"}, headers=PAGE).text
        came = client.post(LOGIN, data={"key": desk.key}, headers=PAGE)
        assert came.headers["location"] == "/a/rag/dashboard"
        assert "path=/a/rag;" in came.headers["set-cookie"].lower()
        left = client.post("/dashboard/logout", headers={"X-API-Key": desk.key})
        assert left.headers["location"] == "/a/rag/dashboard"
        assert "path=/a/rag;" in left.headers["set-cookie"].lower() + ";"
    page = desk.client.get("/dashboard", headers=below, follow_redirects=False)
    assert page.status_code == 200, "without a redirect"
    assert "/a/rag/dashboard/logout" in page.text
    assert "/a/rag/dashboard/_nicegui" in page.text
    assert not [mark for mark in ('src="/dashboard', 'href="/dashboard') if mark in page.text]


def test_the_page_policy_forbids_other_origins(desk: Desk) -> None:
    policy = desk.client.get("/dashboard/").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert "frame-ancestors 'none'" in policy


def test_a_websocket_needs_the_ticket_and_the_same_origin() -> None:
    _, pair = make_key("acme")
    keys = read_keys(pair)
    app = echoing(keys)
    ticket = {"cookie": f"{COOKIE}={Authenticator(keys).tickets.issue(ACME)}"}
    with TestClient(app, "http://here") as client:
        with client.websocket_connect(
            "/dashboard/ws", headers={**ticket, "host": "here", "origin": "http://here"}
        ) as socket:
            assert socket.receive_text() == "acme"
        for headers in ({}, {**ticket, "origin": "http://evil.example"}, {"cookie": f"{COOKIE}=x"}):
            with pytest.raises(WebSocketDisconnect), client.websocket_connect("/dashboard/ws", headers=headers):
                pass
    with TestClient(echoing(Keys()), "http://here") as client:
        with client.websocket_connect("/dashboard/ws", headers={"host": "here", "origin": "http://here"}) as socket:
            assert socket.receive_text() == ""
        with (
            pytest.raises(WebSocketDisconnect),
            client.websocket_connect("/dashboard/ws", headers={"origin": "http://evil"}),
        ):
            pass


def echoing(keys: Keys) -> FastAPI:
    """Build an application behind authentication with a WebSocket that sends the name of the tenant."""
    app = FastAPI()
    app.add_middleware(AuthMiddleware, authenticator=Authenticator(keys), audit=AuditLog())

    @app.websocket("/dashboard/ws")
    async def whose(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(getattr(socket.state, "caller", Caller()).tenant.name)

    return app
