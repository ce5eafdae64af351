"""Host names: without API keys the service answers to its own names only, whatever a DNS server says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from api.app import address_of, create_app, why_exposed
from api.middleware.auth import AuthMiddleware
from api.middleware.authenticator import Authenticator
from api.middleware.hosts import HostMiddleware, read_hosts
from api.middleware.keys import Keys
from api.observability.audit import AuditLog
from ragkv.config import load_settings
from ragkv.errors import ConfigError
from tests.api.conftest import HARBOUR, Service, settings
from tests.api.test_bad_input import check_problem

EVIL = {"Host": "evil.example", "Origin": "http://evil.example"}


def accepts(name: str, keys: bool = False, server: str = "127.0.0.1", **given: str) -> bool:
    scope: Any = {"type": "http", "server": (server, 8000), "headers": [(b"host", name.encode())] if name else []}
    return read_hosts(load_settings(**given), keys).accepts(scope)


def test_a_page_whose_name_points_here_can_neither_read_nor_write(service: Service) -> None:
    stolen = {**HARBOUR, "id": "stolen"}
    for response in (
        service.client.get("/v1/documents", headers=EVIL),
        service.client.get("/healthz", headers=EVIL),
        service.post("/v1/documents?wait=true", stolen, headers=EVIL),
        service.post("/v1/answers", {"question": "Who built the harbour of Tarn?"}, headers=EVIL),
    ):
        assert check_problem(response, 403)["code"] == "unknown_host"
        assert "RAGKV_HOSTS" in response.json()["detail"]
    assert service.client.get("/v1/documents/stolen").status_code == 404
    refused = service.client.get("/v1/models", headers=EVIL)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "unknown_host")


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8000", "localhost.", "ragkv.localhost", "127.0.0.1", "127.8.9.1:80", "[::1]:8000"]
)
def test_every_name_of_this_machine_is_accepted(service: Service, host: str) -> None:
    assert service.client.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "evil.example:8000", "127.0.0.1@evil", "[x"]
)
def test_other_names_are_refused_without_keys_and_accepted_with_them(host: str) -> None:
    assert not accepts(host)
    assert accepts(host, keys=True)


def test_a_probe_that_names_the_address_it_connects_to_is_accepted() -> None:
    assert accepts("10.1.2.3:8000", server="10.1.2.3")
    assert accepts("", server="10.1.2.3")
    assert not accepts("10.1.2.4:8000", server="10.1.2.3")
    assert not accepts("pod", server="pod")


def test_configured_names_are_accepted_with_and_without_keys() -> None:
    for keys in (False, True):
        assert accepts("ragkv.example:443", keys, hosts="api, Ragkv.Example")
        assert accepts("localhost", keys, hosts="api")
        assert not accepts("evil.example", keys, hosts="api")
        assert accepts("evil.example", keys, hosts="api,*")
        assert accepts("here.example", keys, hosts="api", public_url="https://here.example/ragkv")
    assert accepts("box.lan:8000", host="box.lan")


@pytest.mark.parametrize("given", [{"hosts": "http://a.b"}, {"hosts": "a b"}, {"public_url": "a.b:8000"}])
def test_what_is_no_name_stops_the_start(tmp_path: Path, given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"RAGKV_(HOSTS|PUBLIC_URL)"):
        create_app(settings(tmp_path, **given))


def test_the_dashboards_updates_are_for_its_own_pages_only(service: Service) -> None:
    app = FastAPI()
    app.add_middleware(AuthMiddleware, authenticator=Authenticator(Keys()), audit=AuditLog())
    app.add_middleware(HostMiddleware, hosts=read_hosts(load_settings(), keys=False))

    @app.websocket("/dashboard/ws")
    async def greet(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")

    with TestClient(app, "http://localhost") as client:
        own = {"host": "localhost", "origin": "http://localhost"}
        with client.websocket_connect("/dashboard/ws", headers=own) as socket:
            assert socket.receive_text() == "hello"
        for foreign in (EVIL, {**own, "origin": "http://evil.example"}):
            headers = {name.lower(): value for name, value in foreign.items()}
            with pytest.raises(WebSocketDisconnect), client.websocket_connect("/dashboard/ws", headers=headers):
                pass
    polled = "/dashboard/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    refused = service.client.get(polled, headers={"Origin": "http://evil.example"})
    assert check_problem(refused, 403)["code"] == "other_origin"
    own_page = httpx.get(f"{service.url}{polled}", headers={"Origin": service.url})
    assert own_page.status_code == 404, "this service has no dashboard, but it would be asked"


def test_a_service_without_keys_warns_if_others_can_reach_it() -> None:
    for given, warns in (
        ({"host": "0.0.0.0"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "0.0.0.0", "api_keys": "x"}, False),
        ({"host": "0.0.0.0", "public_url": "http://localhost:8000"}, False),
        ({"host": "127.0.0.1", "public_url": "https://ragkv.example"}, True),
    ):
        chosen = load_settings(**given)
        assert bool(why_exposed(chosen, address_of(chosen, 8000))) == warns, given
