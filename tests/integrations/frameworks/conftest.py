"""A service with documents for the components of other frameworks: `ragkv serve` in a process of its own, with keys."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ragkv.api.middleware.keys import make_key
from ragkv.client import Client

# Before any framework is imported: none of them sends anything to its makers.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
os.environ["LANGSMITH_TRACING"] = "false"

KEY, PAIR = make_key("tests", {})
ROOT = Path(__file__).resolve().parents[3]
QUESTION = "Who built the harbour of Tarn?"
DOCUMENTS = (
    {
        "id": "harbour",
        "title": "Tarn",
        "text": "The harbour of Tarn was built in 1889 by Ada Brook.",
        "metadata": {"year": 1889, "kind": "harbour"},
    },
    {
        "id": "bridge",
        "title": "Mell",
        "text": "The bridge of Mell was painted green by Otto Lindqvist in 1931.",
        "metadata": {"year": 1931, "kind": "bridge"},
    },
    {
        "id": "mill",
        "title": "Orm",
        "text": "The mill of Orm was built by Ida Falk in 1931.",
        "metadata": {"year": 1931, "kind": "mill"},
    },
    {
        "id": "kiln",
        "title": "Arbo",
        "text": "The kiln of Arbo was lit by Runa Vik in 1950.",
        "metadata": {"year": 1950, "kind": "kiln"},
    },
)
BOOK = "# Skerrow\n\nThe light of Skerrow was kept by Ivo Marsh.\n"
"""A file with a heading, in the collection `books`."""


@dataclass(frozen=True)
class ServedDocuments:
    """A running service.

    Attributes:
        url: Its address.
        key: Its key.
        model: Name of the model that it has loaded.
    """

    url: str
    key: str
    model: str


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Run `ragkv serve` on a free port; yields its address. These tests start it without what `tests.program` imports,
    because none of them needs an engine of its own."""
    chosen = {"API_KEYS": PAIR, "CHUNK_TOKENS": "128", "MAX_TOKENS": "8", "THREADS": "1", "DASHBOARD": "false"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **{f"RAGKV_{name}": value for name, value in chosen.items()}}
    command = [sys.executable, "-m", "ragkv.cli", "serve", "--port", "0", "--device", "cpu"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        while not (told := re.search(r"serving at (\S+)", (folder / "log").read_text())):
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield told[1]
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDocuments]:
    """A service with keys: `DOCUMENTS` in collection `default`, `BOOK` in collection `books`."""
    folder = tmp_path_factory.mktemp("served")
    with served(folder) as url, Client(url, KEY) as client:
        assert client.wait(client.send(DOCUMENTS)).status == "completed"
        (folder / "lights.md").write_text(BOOK)
        assert client.wait(client.upload([folder / "lights.md"], collection="books")).status == "completed"
        yield ServedDocuments(client.url, KEY, client.models()[0])


@pytest.fixture(autouse=True)
def key_of_the_environment(service: ServedDocuments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Components find the key of the service in the environment."""
    monkeypatch.setenv("RAGKV_KEY", service.key)


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run in asyncio."""
    return "asyncio"
