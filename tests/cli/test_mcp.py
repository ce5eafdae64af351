"""`ragkv mcp` with the SDK's client, over an engine in the process and over a service with keys."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError

from ragkv.api.middleware.keys import make_key
from tests.api.conftest import Service, serving, settings
from tests.mcp_calls import BRIDGE, HARBOUR, QUESTION, TOOL_NAMES, call, over_http, read, refused, use_everything
from tests.program import ROOT, served
from tests.start_records import with_records

LIGHT = {"RAGKV_THREADS": "1", "RAGKV_DEVICE": "cpu", "RAGKV_MAX_TOKENS": "8", "PYTHONPATH": ROOT}

HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}


@asynccontextmanager
async def started(
    folder: Path, *arguments: str, mode: str = "auto", errors: str = "errors", **environment: str
) -> AsyncIterator[Client]:
    """Start `ragkv mcp` in a folder and connect to it. What it writes on stderr is in the file `errors` there."""
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "ragkv.cli", "mcp", *arguments],
        env={**os.environ, **LIGHT, **environment},
        cwd=folder,
    )
    with (folder / errors).open("a") as log:
        async with Client(stdio_client(server, errlog=log), mode=mode) as client:
            yield client


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, str]]]:
    """A service with keys, and the key of each tenant."""
    made = {name: make_key(name) for name in ("acme", "zeta")}
    pairs = ", ".join(pair for _, pair in made.values())
    with serving(settings(tmp_path_factory.mktemp("kept"), api_keys=pairs)) as service:
        yield service, {name: key for name, (key, _) in made.items()}


def test_an_engine_in_the_process_does_everything_and_keeps_it(tmp_path: Path) -> None:
    with_records(tmp_path / "data")

    async def first() -> None:
        async with started(tmp_path) as client:
            assert client.server_info is not None
            assert client.server_info.name == "ragkv"
            await use_everything(client)

    async def second() -> None:
        async with started(tmp_path, "--data", "data", mode="legacy") as client:
            assert [each["id"] for each in (await call(client, "list_documents"))["documents"]] == ["sea/harbour"]
            assert (await call(client, "ingest", documents=[HARBOUR]))["unchanged"] == 1
            some = await call(client, "ingest", documents=[BRIDGE, {"id": "blank", "text": " "}])
            assert (some["completed"], some["failed"], some["failures"][0]["id"]) == (1, 1, "blank")
            assert "document 'blank' is empty" in await refused(
                client, "ingest", documents=[{"id": "blank", "text": ""}]
            )
            assert await refused(client, "ask", question=QUESTION, collection="x") == "collection 'x' has no documents"
            with pytest.raises(MCPError, match="collection 'default' has no document 'nowhere'"):
                await read(client, "ragkv://documents/default/nowhere")

    asyncio.run(first())
    asyncio.run(second())
    assert "Traceback" not in (tmp_path / "errors").read_text()


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_service_does_everything_for_the_tenant_of_the_key(
    kept: tuple[Service, dict[str, str]], tmp_path: Path, mode: str
) -> None:
    service, keys = kept
    tenant, other = ("acme", "zeta") if mode == "auto" else ("zeta", "acme")

    async def use() -> None:
        named = {"RAGKV_URL": service.url, "RAGKV_KEY": keys[tenant]}
        async with started(tmp_path, mode=mode, **named) as client:
            for each in (await call(client, "list_documents"))["documents"]:
                await call(client, "delete_document", id=each["id"])
            await use_everything(client)
            listed = await call(client, "list_documents", collection=f"{other}:default")
            assert listed["documents"] == []
        headers = {"X-API-Key": keys[tenant]}
        there = service.client.get("/v1/documents", headers=headers).json()["documents"]
        assert [each["id"] for each in there] == ["sea/harbour"]
        assert not (tmp_path / "data").exists(), "no engine was opened here"

    asyncio.run(use())


def test_a_tenant_does_not_see_what_another_one_has(kept: tuple[Service, dict[str, str]], tmp_path: Path) -> None:
    service, keys = kept
    plans = {"documents": [HARBOUR], "collection": "plans"}
    sent = service.post(
        "/v1/documents?wait=true",
        {"documents": [{**HARBOUR, "collection": "plans"}]},
        headers={"X-API-Key": keys["acme"]},
    )
    assert sent.status_code == 200

    async def use() -> None:
        async with started(tmp_path, "--url", service.url, RAGKV_KEY=keys["zeta"]) as zeta:
            assert (await call(zeta, "list_documents", collection="plans"))["documents"] == []
            missing = "collection 'plans' has no document 'sea/harbour'"
            assert await refused(zeta, "delete_document", id="sea/harbour", collection="plans") == missing
            with pytest.raises(MCPError, match=missing):
                await read(zeta, "ragkv://documents/plans/sea%2Fharbour")
            wrong = await refused(zeta, "ask", question=QUESTION, collection="plans")
            assert wrong == "collection 'plans' has no documents"
            assert (await call(zeta, "ingest", **plans))["completed"] == 1, "its own collection of that name"

    asyncio.run(use())


def test_a_wrong_key_and_a_service_that_is_not_there_are_told(
    kept: tuple[Service, dict[str, str]], tmp_path: Path
) -> None:
    service, keys = kept

    async def use() -> None:
        async with started(tmp_path, RAGKV_URL=service.url, RAGKV_KEY=keys["acme"][:-1]) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == TOOL_NAMES
            assert await refused(client, "list_documents") == "this API key is not known"
            with pytest.raises(MCPError, match="this API key is not known"):
                await client.list_resources()
        async with started(tmp_path, RAGKV_URL="http://127.0.0.1:9") as client:
            assert "is `ragkv serve` running there?" in await refused(client, "search", query="harbour")

    asyncio.run(use())


def test_a_model_that_cannot_be_opened_is_told_to_the_client_and_on_stderr(tmp_path: Path) -> None:
    async def use() -> None:
        async with started(tmp_path, "--model", str(tmp_path / "nothing")) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == TOOL_NAMES
            assert "nothing" in await refused(client, "ask", question=QUESTION)

    asyncio.run(use())
    told = (tmp_path / "errors").read_text()
    assert told.startswith("ragkv: ")
    assert "nothing" in told
    assert "Traceback" not in told


def test_the_service_that_a_user_starts_offers_the_same(tmp_path: Path) -> None:
    """With the dashboard, which has a lifespan of its own, and to the end: an open client does not hold it up."""
    with served(tmp_path, RAGKV_MAX_TOKENS="8") as (process, http):

        async def use() -> None:
            async with over_http(str(http.base_url)) as client:
                await use_everything(client)
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, 20) == 0

        asyncio.run(use())


def run(folder: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `ragkv mcp` with this text on its standard input, to its end."""
    command, given = [sys.executable, "-m", "ragkv.cli", "mcp"], {**os.environ, **LIGHT, **environment}
    return subprocess.run(
        command, cwd=folder, env=given, input=text, capture_output=True, text=True, timeout=60, check=False
    )


def test_it_ends_with_its_client_and_stdout_has_only_the_protocol(tmp_path: Path) -> None:
    done = run(tmp_path, json.dumps(HELLO) + "\nnonsense\n")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    (first,) = [each for each in answers if each.get("id") == 1]
    assert first["result"]["serverInfo"]["name"] == "ragkv"
    assert all(each["jsonrpc"] == "2.0" for each in answers)


def test_a_client_that_goes_without_reading_ends_it_quietly(tmp_path: Path) -> None:
    command, given = (
        [sys.executable, "-m", "ragkv.cli", "mcp"],
        {**os.environ, **LIGHT, "RAGKV_URL": "http://127.0.0.1:9"},
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=given, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(json.dumps(HELLO) + "\n")
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 0


def test_what_passes_calls_on_to_a_service_imports_no_torch() -> None:
    ask = (
        "import sys, ragkv.api.runtime.mcp_stdio; print(sorted({'torch', 'transformers', 'mcp'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("['mcp']\n", "")


def test_wrong_settings_end_it_at_once(tmp_path: Path) -> None:
    done = run(tmp_path, "", RAGKV_TOP_K="many")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ragkv: ")
