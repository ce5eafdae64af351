"""docs/api.md documents every route and error, and its examples work in order."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from ragkv import client
from ragkv.api import errors
from ragkv.client import Client
from tests.api.conftest import Service, serving, settings

DEFAULT = "SmolLM2-135M-Instruct-ragkv-adapter"


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "api.md").read_text()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A separate service, because the examples add and remove documents."""
    with serving(settings(tmp_path_factory.mktemp("fresh"))) as running:
        yield running


def test_every_route_is_documented(fresh: Service, page: str) -> None:
    paths = fresh.client.get("/openapi.json").json()["paths"]
    assert len(paths) > 10
    missing = [path for path in paths if f" {path}`" not in page]
    assert not missing
    for path, methods in paths.items():
        for method in methods:
            verb = method.upper()
            documented = f"`{verb} {path}`" in page or (verb in ("DELETE", "PUT") and f"`{verb}`" in page)
            assert documented, f"{verb} {path}"


def faults(module: Path) -> set[tuple[int, str]]:
    """Return status and code of every literal Fault(status, detail, code) of a module."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Fault" and len(node.args) > 2:
            status, _, code = node.args[:3]
            words = [each.value for each in ast.walk(code) if isinstance(each, ast.Constant)]
            if isinstance(status, ast.Constant):
                found |= {(status.value, word) for word in words if isinstance(word, str)}
    return found


def test_every_error_is_in_the_table(root: Path, page: str) -> None:
    expected = {(status, code) for _, status, code in errors._STATUS}
    middleware = (f"middleware/{name}" for name in ("auth", "body_limit", "encodings", "hosts", "rate_limit"))
    for name in ("errors", *middleware, "runtime/request_heads", "runtime/connections"):
        expected |= faults(root / "api" / f"{name}.py")
    assert {(401, "no_api_key"), (409, "cancelled"), (503, "out_of_memory"), (500, "internal")} <= expected
    table = {(int(status), code) for status, code in re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.M)}
    assert table == expected | {(405, "method_not_allowed")}


def test_the_examples_run_in_order(fresh: Service, page: str, tmp_path: Path) -> None:
    lines = [line.strip() for line in page.splitlines() if re.match(r"    (curl|printf) ", line)]
    assert len(lines) > 20
    job = ""
    for line in lines:
        command = line.replace("127.0.0.1:8000", f"127.0.0.1:{fresh.port}").replace("JOB_ID", job)
        command = command.replace("curl -s", "curl --fail-with-body -s", 1)
        for default in (DEFAULT, quote(DEFAULT, safe="+")):  # the page names the default model, tests run another one
            command = command.replace(default, fresh.engine_thread.model)
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stdout)
        if done.stdout.startswith('{"job_id"'):
            job = json.loads(done.stdout)["job_id"]
        if "/events" in line:  # later examples need the document to be ingested
            assert "event: done" in done.stdout


def test_every_field_of_an_answer_is_documented(fresh: Service, page: str) -> None:
    fresh.post("/v1/documents?wait=true", {"id": "tarn", "text": "The harbour of Tarn was built in 1889 by Ada Brook."})
    answer: Any = fresh.post("/v1/answers", {"question": "Who built the harbour of Tarn?"}).json()
    for name in (*answer, *answer["report"]):
        assert f"`{name}`" in page or f'"{name}"' in page, name


def test_the_python_example_runs_and_every_method_is_named(
    fresh: Service, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(example.replace("127.0.0.1:8000", f"127.0.0.1:{fresh.port}"), "api.md", "exec"), {})
    assert "Ada Brook tarn" in capsys.readouterr().out
    methods = [name for name in vars(Client) if not name.startswith("_") and name != "close"]
    assert not [name for name in methods if f"`{name}`" not in page]
    assert "ragkv.add(" not in str(client.__doc__)


def test_a_chunked_body_over_the_limit_has_the_same_error_code(fresh: Service) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(48):
            yield b" " * 2**16

    answer = httpx.post(f"{fresh.url}/v1/answers", content=endless(), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
