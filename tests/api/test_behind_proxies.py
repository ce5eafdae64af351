"""The service below a path of nginx and of Caddy, as docs/operations.md configures them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from ragkv.api.dashboard.guard import COOKIE
from ragkv.api.middleware.keys import make_key
from tests.api.conftest import HARBOUR, Service, serving, settings
from tests.api.runtime.test_answers_together import until
from tests.redis_server import free_port

WHO = "Who built the harbour of Tarn?"
KEY, PAIR = make_key("acme")
NGINX = """
pid {folder}/pid; error_log {folder}/log; daemon off; worker_processes 1;
events {{ }}
http {{
    access_log off; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    server {{
        listen 127.0.0.1:{port};
        location /rag/ {{
            proxy_pass http://127.0.0.1:{service}; proxy_set_header Host $http_host; proxy_buffering off;
        }}
        location /a/ragkv/ {{
            proxy_pass http://127.0.0.1:{service}/; proxy_set_header Host $http_host; proxy_buffering off;
            proxy_set_header X-Forwarded-Prefix /a/ragkv;
        }}
    }}
}}
"""
CADDY = """
{{
    admin off
    auto_https off
}}
http://127.0.0.1:{port} {{
    handle /rag/* {{
        reverse_proxy 127.0.0.1:{service}
    }}
    handle_path /a/ragkv/* {{
        reverse_proxy 127.0.0.1:{service} {{
            header_up X-Forwarded-Prefix /a/ragkv
        }}
    }}
}}
"""
PROXIES = {"nginx": (NGINX, ("-c",)), "caddy": (CADDY, ("run", "--adapter", "caddyfile", "--config"))}


@pytest.fixture(scope="module")
def below(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with a key, served below /rag unless the proxy says otherwise."""
    with serving(settings(tmp_path_factory.mktemp("proxied"), api_keys=PAIR, root_path="/rag")) as running:
        running.client.headers["X-API-Key"] = KEY
        running.post("/v1/documents?wait=true", HARBOUR)
        yield running


@contextmanager
def proxied(name: str, service: int, folder: Path) -> Iterator[str]:
    """Run a proxy before the service; yield its address."""
    text, arguments = PROXIES[name]
    port, file = free_port(), folder / "config"
    file.write_text(text.format(folder=folder, port=port, service=service))
    command = [shutil.which(name) or name, *arguments, str(file)]
    with subprocess.Popen(command, env={"HOME": str(folder)}, stderr=subprocess.DEVNULL) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            until(lambda: answers(address))
            yield address
        finally:
            process.terminate()


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/rag/healthz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.skipif(not shutil.which(name), reason=name)) for name in PROXIES]
)
def test_every_address_leads_through_the_proxy(below: Service, tmp_path: Path, name: str) -> None:
    with proxied(name, below.port, tmp_path) as address:
        for path in ("/rag", "/a/ragkv"):
            check_api(f"{address}{path}", path)
            check_login(f"{address}{path}", path)


def check_api(url: str, path: str) -> None:
    with httpx.Client(headers={"X-API-Key": KEY}, timeout=60) as client:
        queued = client.post(f"{url}/v1/documents/", json={**HARBOUR, "collection": "proxied"})
        assert queued.headers["location"].startswith(f"{path}/v1/jobs/")
        assert client.get(httpx.URL(url).join(queued.headers["location"])).status_code == 200
        schema = client.get(f"{url}/openapi.json")
        assert (schema.json()["servers"], schema.headers["content-encoding"]) == ([{"url": path}], "gzip")
        assert client.head(f"{url}/v1/models").status_code == 200
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as chat:
        stream = chat.chat.completions.create(
            model=chat.models.list().data[0].id, messages=[{"role": "user", "content": WHO}], stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Ada Brook"


def check_login(url: str, path: str) -> None:
    with httpx.Client(headers={"Accept": "text/html"}) as client:
        assert f'action="{path}/dashboard/login"' in client.get(f"{url}/docs").text
        came = client.post(f"{url}/dashboard/login", data={"key": KEY})
        assert (came.status_code, came.headers["location"]) == (303, f"{path}/dashboard")
        assert f"Path={path};" in came.headers["set-cookie"] + ";"
        assert client.get(f"{url}/docs").status_code == 200, "the ticket is sent below the path"
        assert client.post(f"{url}/dashboard/logout").headers["location"] == f"{path}/dashboard"
        assert COOKIE not in client.cookies
