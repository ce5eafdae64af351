"""Host names: without API keys the service answers to its own names only, whatever a DNS server says."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from ragkv.api.app import address_of, create_app, why_exposed
from ragkv.api.middleware.auth import AuthMiddleware
from ragkv.api.middleware.authenticator import Authenticator
from ragkv.api.middleware.hosts import HostMiddleware, Hosts, parse_host, read_hosts
from ragkv.api.middleware.keys import Keys
from ragkv.api.observability.audit import AuditLog
from ragkv.config import load_settings
from ragkv.errors import ConfigError
from tests.api.conftest import HARBOUR, Service, settings
from tests.api.test_bad_input import check_problem

EVIL = {"Host": "evil.example", "Origin": "http://evil.example"}


def status_of(*names: str, keys: bool = False, server: str = "127.0.0.1", **given: str) -> int:
    headers = [(b"host", name.encode()) for name in names if name]
    scope: Any = {"type": "http", "server": (server, 8000), "headers": headers}
    fault = read_hosts(load_settings(**given), keys).fault_of(scope)
    return 200 if fault is None else fault.status


def knows(header: str, *names: str) -> bool:
    """Whether a service with these names and without keys answers under a header."""
    scope: Any = {"type": "http", "server": ("127.0.0.1", 8000), "headers": [(b"host", header.encode("latin-1"))]}
    return Hosts(frozenset(names)).fault_of(scope) is None


def accepts(name: str, keys: bool = False, server: str = "127.0.0.1", **given: str) -> bool:
    return status_of(name, keys=keys, server=server, **given) == 200


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
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "evil.example:8000",
        "127.1",
        "2130706433",
        "a..localhost",
    ],
)
def test_other_names_are_refused_without_keys_and_accepted_with_them(host: str) -> None:
    assert not accepts(host)
    assert accepts(host, keys=True)


MALFORMED = (
    *(
        "[::1].evil.com",
        "[::1]evil.com",
        "[::1",
        "::1]",
        "::1",
        "[::1%eth0]",
        "[127.0.0.1]",
        "[localhost]",
        "[v1.a]",
        "[]",
    ),
    *("evil.com#.localhost", "evil.com/.localhost", "evil.com?.localhost", "evil.com\\.localhost", "evil .localhost"),
    *(
        "evil.com@localhost",
        "a:b@localhost",
        "localhost:80@evil.com",
        "localhost:80:80",
        "localhost:99999",
        "localhost:x",
    ),
    *("localhost,evil.com/", "evil.com\t.localhost", "évil.localhost", "%zz.localhost", ":80", ".", "<x>.localhost"),
)


@pytest.mark.parametrize("host", MALFORMED)
def test_what_is_no_host_is_refused_with_and_without_keys(host: str) -> None:
    assert {status_of(host, keys=keys) for keys in (False, True)} == {400}
    assert status_of(host, hosts="*") == 400


@pytest.mark.parametrize(
    "host",
    ["evil.com%23.localhost", "evil.com$.localhost", "-.localhost", "localhost,evil.com", f"{'a' * 64}.localhost"],
)
def test_only_names_that_browsers_resolve_to_this_machine_are_its_names(host: str) -> None:
    assert status_of(host) == 403


def test_two_names_are_no_name() -> None:
    assert {status_of("localhost", "localhost", keys=keys) for keys in (False, True)} == {400}


LABELS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)


@examples(deadline=None)
@given(text=st.text(alphabet=st.characters(max_codepoint=255), max_size=30))
def test_no_text_before_or_behind_a_known_name_makes_it_known(text: str) -> None:
    assert parse_host(text) is None or "/" not in text
    for host in (text + "localhost", "localhost" + text, f"[::1]{text}", text + "[::1]", f"127.0.0.1{text}"):
        if knows(host):
            name = host.lower().rpartition(":")[0] if re.search(r":[0-9]{0,5}$", host) else host.lower()
            plain = re.fullmatch(r"([a-z0-9_-]+\.)*localhost\.?|\[::1\]|127(\.[0-9]{1,3}){3}\.?", name)
            assert plain, host


@examples(deadline=None)
@given(labels=st.lists(LABELS, min_size=1, max_size=4), port=st.none() | st.integers(0, 65_535))
def test_well_formed_names_are_compared_whole(labels: list[str], port: int | None) -> None:
    name = ".".join(labels)
    header = name if port is None else f"{name}:{port}"
    assert parse_host(header) == name
    assert knows(header, name)
    assert not knows(f"x{header}", name)


@examples(deadline=None)
@given(address=st.ip_addresses(v=6))
def test_an_address_is_known_however_it_is_written(address: IPv6Address) -> None:
    for written in (address.compressed, address.exploded, address.exploded.upper()):
        assert parse_host(f"[{written}]:8000") == str(address)
        assert knows(f"[{written}]", str(address))


def test_malformed_hosts_are_told_over_the_wire(service: Service) -> None:
    for host in ("[::1].evil.com", "evil.com#.localhost", "evil.com/.localhost", "evil .localhost"):
        refused = check_problem(service.client.get("/healthz", headers={"Host": host}), 400)
        assert refused["code"] == "bad_host"


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
    assert accepts("[fd00::1]:8000", hosts="FD00:0::0:1")


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
    for words, warns in (
        ({"host": "0.0.0.0"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "0.0.0.0", "api_keys": "x"}, False),
        ({"host": "0.0.0.0", "public_url": "http://localhost:8000"}, False),
        ({"host": "127.0.0.1", "public_url": "https://ragkv.example"}, True),
    ):
        chosen = load_settings(**words)
        assert bool(why_exposed(chosen, address_of(chosen, 8000))) == warns, words
