"""KubeRay's RayService: the configuration of the manifest, sent to the REST API of a real Ray, as its operator does."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from ragkv.client import Client
from ragkv.errors import ConfigError
from ragkv.locality import HEADER
from tests.api.conftest import BRIDGE, HARBOUR
from tests.redis_server import free_port
from tests.scale.replicated import QUESTION, Load, Replicated, descendants, running, wait_until
from tests.start_records import TINY, with_records
from tests.test_deployment import serve_configuration

pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.scale, pytest.mark.timeout(500)]
TOKEN = secrets.token_hex(32)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Ray of one machine with its REST API; a client of that."""
    folder = tmp_path_factory.mktemp("rs")
    with_records(folder / "data")
    small = {"RAGKV_MODEL": str(TINY), "RAGKV_DEVICE": "cpu", "RAGKV_CHUNK_TOKENS": "128", "RAGKV_HOST_BYTES": "0"}
    given = {**os.environ, **small, "PYTHONPATH": str(ROOT), "RAGKV_DATA": str(folder / "data")}
    given |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
    given |= {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "ragkv.api.replicas.proxy:middlewares"}
    # The paths of sockets must be short.
    with TemporaryDirectory(dir="/tmp", prefix="ray", ignore_cleanup_errors=True) as short:
        port, *ports = (free_port() for _ in range(4))
        options = [
            f"--port={ports[0]}",
            f"--dashboard-agent-listen-port={ports[1]}",
            f"--ray-client-server-port={ports[2]}",
        ]
        options += [
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={port}",
            "--min-worker-port=0",
            "--max-worker-port=0",
        ]
        options += ["--num-cpus=3", "--num-gpus=0", "--object-store-memory=104857600", "--disable-usage-stats"]
        options += ["--node-ip-address=127.0.0.1", f"--temp-dir={short}", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options]
        with (folder / "told").open("wb") as file:
            process = subprocess.Popen(command, env=given, cwd=folder, stdout=file, stderr=file)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30) as client:
                wait_until(lambda: answers(client) or process.poll() is not None, 120)
                assert process.poll() is None, (folder / "told").read_text()
                yield client
        finally:
            pids = descendants(process.pid)
            process.kill()
            process.wait()
            for pid in running(pids):
                os.kill(pid, signal.SIGKILL)


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/api/serve/applications/").status_code == 200
    except httpx.HTTPError:
        return False


def deploy(client: httpx.Client, port: int, **arguments: Any) -> None:
    """Send the configuration of the manifest, with a port of this machine and one thread a replica."""
    configuration = serve_configuration()
    configuration["http_options"] |= {"host": "127.0.0.1", "port": port}
    (application,) = configuration["applications"]
    application["args"] |= {"threads": 1, "replicas": 2, **arguments}
    sent = client.put("/api/serve/applications/", json=configuration)
    assert sent.status_code == 200, sent.text
    until = time.monotonic() + 240
    while (state := status(client))["status"] != "RUNNING":
        assert state["status"] in ("DEPLOYING", "NOT_STARTED"), state
        assert time.monotonic() < until, state
        time.sleep(0.5)


def status(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/api/serve/applications/").json()["applications"].get("ragkv", {})
    return found or {"status": "NOT_STARTED"}


def test_the_configuration_of_the_manifest_serves_and_is_changed_without_losing_a_request(
    ray_cluster: httpx.Client, tmp_path: Path
) -> None:
    assert httpx.get(ray_cluster.base_url.join("/api/serve/applications/")).status_code == 401
    port = free_port()
    deploy(ray_cluster, port)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        assert client.get("/-/healthz").text == "success"
        # Its process and output belong to Ray, not to a service of ours.
        service = Replicated(None, client, tmp_path)  # type: ignore[arg-type]
        sent = client.post("/v1/documents?wait=true", json={"documents": [HARBOUR, BRIDGE]})
        assert sent.json()["status"] == "completed"
        before = set(service.replicas)
        assert len(before) == 2
        with Client(str(client.base_url)) as library:
            for _ in range(2):
                library.ask(QUESTION["question"], conversation_id="harbour", method="scout", max_tokens=8)
        assert sorted(service.counts("ragkv_answers_total").values())[-1] == 2
        with Load(service, clients=2) as load:
            deploy(ray_cluster, port, max_tokens=3)
            wait_until(lambda: len(service.replicas) == 2 and before.isdisjoint(service.replicas), 60)
        assert set(load.kinds) == {"answered"}
        long = client.post("/v1/answers", json={"question": "Who built the harbour?"}, headers={HEADER: "d-1"}).json()
        assert long["report"]["decoding"]["steps"] < 3


def test_settings_that_allow_no_replicas_are_refused() -> None:
    from ragkv.api.replicas.deployment import application

    with pytest.raises(ConfigError, match="3-2 has more replicas before the hyphen"):
        application({"replicas": "3-2"})
