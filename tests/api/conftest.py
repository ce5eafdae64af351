"""Fixtures of the API tests: a real service with the bundled model on a free port of 127.0.0.1."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from ragkv.api.app import create_app
from ragkv.api.observability.traces import Tracing
from ragkv.api.runtime.connections import protocol_options
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.config import Settings, load_settings
from tests.start_records import with_records

LIMIT = 64 * 1024
"""Bytes of the largest document. It is small, so that exceeding it is cheap."""

HARBOUR = {"id": "harbour", "text": "The harbour of Tarn was built in 1889 by Ada Brook.", "title": "Tarn"}
BRIDGE = {"id": "bridge", "text": "The bridge of Mell was painted green by Otto Lindqvist in 1931.", "title": "Mell"}


@dataclass(frozen=True)
class Service:
    """A running service.

    Attributes:
        url: Address of the service.
        port: Port of the service.
        engine_thread: Its engine thread.
        client: HTTP client of the service.
        app: The application.
    """

    url: str
    port: int
    engine_thread: EngineThread
    client: httpx.Client
    app: FastAPI

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send a POST with a JSON body."""
        return self.client.post(path, json=body, **options)

    def job(self, job_id: str) -> Any:
        """Wait for a job and return it with all its documents."""
        deadline = time.monotonic() + 200  # on a busy machine a long document takes a minute
        while time.monotonic() < deadline:
            job = self.client.get(f"/v1/jobs/{job_id}?documents=all").json()
            if job["finished"] is not None:
                return job
            time.sleep(0.05)
        raise TimeoutError(job_id)


def settings(data: Path, **more: Any) -> Settings:
    """Build the settings of a service under test. It has no host tier, so every question reads the store,
    and it starts with the records of an earlier start."""
    small = {
        "threads": 1,
        "chunk_tokens": 128,
        "max_document_bytes": LIMIT,
        "max_tokens": 8,
        "host_bytes": 0,
        "dashboard": False,
    }
    return load_settings(**{"data": with_records(data), "device": "cpu", **small, **more})


@contextmanager
def serving(chosen: Settings, tracing: Tracing | None = None) -> Iterator[Service]:
    """Run an empty service on a free port."""
    app = create_app(chosen, tracing)
    config = uvicorn.Config(
        app,
        port=0,
        loop="asyncio",  # as `ragkv serve`; by itself uvicorn takes uvloop where some package brought it
        log_level="warning",
        lifespan="on",
        server_header=False,
        **protocol_options(app.state.connections),
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="uvicorn")
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Service(url, port, app.state.engine_thread, client, app)
    finally:  # a test that failed must not leave a thread for which the interpreter waits
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with two documents in collection `default`."""
    with serving(settings(tmp_path_factory.mktemp("service"))) as running:
        filled = running.post("/v1/documents?wait=true", {"documents": [HARBOUR, BRIDGE]})
        assert filled.json()["status"] == "completed"
        yield running
