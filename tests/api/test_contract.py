"""The service follows its own OpenAPI schema: schemathesis sends valid and invalid requests to a running service.

No response is a 5xx, except the 504 of a deadline that the request set. Status, content type and body of every response
are documented. Invalid requests are refused, `Allow` is complete, and a request without a key is refused if the service
has keys.

The test does not check that every valid request is accepted, because the schema does not know the documents of a
collection or the names of the methods.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragkv.api.middleware.keys import make_key
from tests.api.conftest import BRIDGE, HARBOUR, Service, serving, settings
from tests.ingest.formats.files import pdf

SMALL = {"max_tokens": 2, "deadline": 60.0}
CHECKS = """
[checks.positive_data_acceptance]
enabled = false
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "504"]
[checks.negative_data_rejection]
expected-statuses = ["4xx", "5xx"]

[[operations]]
include-path-regex = "/pages/"
parameters = { document_id = "lund.pdf", collection = "default" }
"""
EVERY_PHASE = "examples,coverage,fuzzing,stateful"
MANY = 150
"""Examples of each operation that make four thousand requests in all; about two minutes."""
LARGE = "^(/v1/(documents|answers|(chat/)?completions|embeddings|rerank|messages.*|responses)|/api/(chat|generate))$"
"""Routes with large limits. Testing each limit takes a minute."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(settings(tmp_path_factory.mktemp("opened"), **SMALL)) as service:
        yield service


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    """A service with keys, and one of its keys."""
    key, pair = make_key("tarn")
    with serving(settings(tmp_path_factory.mktemp("locked"), api_keys=pair, **SMALL)) as service:
        yield service, key


def run(folder: Path, service: Service, phases: str, examples: int, *more: str, key: str = "") -> int:
    """Fill the service, send requests and return their number. Fail if a response does not match the schema."""
    (folder / "schemathesis.toml").write_text(CHECKS)
    header = {"Authorization": f"Bearer {key}"} if key else {}
    files = [("files", ("lund.pdf", pdf("The quay of Lund.", "The gate of Lund.")))]
    for content in ({"json": {"documents": [HARBOUR, BRIDGE]}}, {"files": files}):
        filled = service.client.post("/v1/documents?wait=true", headers=header, **content)
        assert filled.json()["status"] == "completed"
    program = "import gc; gc.set_threshold(10_000); from schemathesis.cli import schemathesis; schemathesis()"
    command: list[Any] = [sys.executable, "-c", program]
    command += ["--config-file", folder / "schemathesis.toml", "--no-color", "run", f"{service.url}/openapi.json"]
    command += ["--phases", phases, "--max-examples", examples, "--generation-deterministic", "--continue-on-failure"]
    command += ["--request-timeout", 300, *more, *(part for each in header.items() for part in ("-H", ": ".join(each)))]
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = re.search(r"Tested: (\d+)", done.stdout)
    sent = re.search(r"(\d+) generated, \1 passed", done.stdout)
    assert tested is not None, done.stdout
    assert sent is not None, done.stdout
    assert int(tested[1]) >= 15
    return int(sent[1])


def test_requests_at_random_and_at_the_limits_get_documented_responses(tmp_path: Path, opened: Service) -> None:
    assert run(tmp_path, opened, "examples,coverage,fuzzing", 3, "--exclude-path-regex", LARGE) > 200


def test_random_requests_with_keys_get_documented_responses(tmp_path: Path, locked: tuple[Service, str]) -> None:
    service, key = locked
    assert run(tmp_path, service, "examples,fuzzing", 6, key=key) > 60


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_four_thousand_requests_without_keys_match_the_contract(tmp_path: Path, opened: Service) -> None:
    assert run(tmp_path, opened, EVERY_PHASE, MANY) > 4000


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_four_thousand_requests_with_keys_match_the_contract(tmp_path: Path, locked: tuple[Service, str]) -> None:
    service, key = locked
    assert run(tmp_path, service, EVERY_PHASE, MANY, key=key) > 4000
