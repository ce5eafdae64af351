"""What clients are told while the service cannot work: no path, no address and no password of it, at no route."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from ragkv.catalog.sqlite_file import SqliteFile
from ragkv.errors import CatalogCorrupt, ConfigError, StoreFull, StoreUnavailable
from tests.api.conftest import BRIDGE, HARBOUR, Service, serving, settings
from tests.program import served

QUESTION = "Who built the harbour of Tarn?"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}]}
SECRET = "postgresql://ada:pa55word@10.1.2.3/ragkv"
RPC = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-06-18"}
READ = (
    *("/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/collections", "/v1/documents", "/v1/documents?q=a"),
    *(
        "/v1/documents/harbour",
        "/v1/documents/harbour/text",
        "/v1/documents/harbour/chunks",
        "/v1/documents/harbour/pages/1",
        "/v1/jobs",
        "/v1/jobs/one",
    ),
    *(
        "/v1/answers",
        "/v1/answers/one",
        "/v1/conversations/one",
        "/v1/models",
        "/v1/responses/one",
        "/api/tags",
        "/dashboard/",
        "/",
    ),
)
SENT = (
    ("/v1/answers", {"question": QUESTION}),
    ("/v1/answers", {"question": QUESTION, "stream": True}),
    ("/v1/answers", {"question": QUESTION, "conversation_id": "one"}),
    ("/v1/search", {"query": QUESTION}),
    ("/v1/documents", BRIDGE),
    ("/v1/documents", {"documents": [HARBOUR, BRIDGE]}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/responses", {"model": CHAT["model"], "input": QUESTION}),
    ("/v1/responses", {"model": CHAT["model"], "input": QUESTION, "previous_response_id": "resp_one"}),
    ("/v1/completions", {"model": CHAT["model"], "prompt": QUESTION}),
    ("/api/chat", CHAT),
    ("/v1/messages", {**CHAT, "max_tokens": 2}),
    ("/v1/messages/count_tokens", CHAT),
    ("/api/generate", {"model": CHAT["model"], "prompt": QUESTION, "stream": False}),
    ("/v1/handovers", {"question": QUESTION, "method": "reuse"}),
    ("/v1/rerank", {"model": "m", "query": QUESTION, "documents": ["a"]}),
)
TOOLS = (
    ("ask", {"question": QUESTION}),
    ("search", {"query": QUESTION}),
    ("list_documents", {}),
    ("list_collections", {}),
    ("ingest", {"documents": [BRIDGE]}),
    ("delete_document", {"document_id": "harbour"}),
)


def told(client: httpx.Client) -> Iterator[tuple[str, httpx.Response]]:
    """The responses to all kinds of requests."""
    for path in READ:
        yield path, client.get(path, headers={"accept": "text/html"} if "dash" in path else {})
    for path, body in SENT:
        yield path, client.post(path, json=body)
    yield "PUT", client.put("/v1/documents/mill", json={"text": "The mill of Oda is red."})
    yield "DELETE", client.delete("/v1/documents/harbour")
    yield "upload", client.post("/v1/documents", files={"files": ("mill.txt", b"The mill of Oda is red.")})
    for name, arguments in TOOLS:
        called = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
        yield name, client.post("/mcp", json=called, headers=RPC)


def check_silent(client: httpx.Client, *secrets: str) -> int:
    """Check that no response holds a secret. Returns how many failed."""
    failed = 0
    for what, response in told(client):
        text = f"{dict(response.headers)} {response.text}"
        assert not [secret for secret in secrets if secret in text or json.dumps(secret)[1:-1] in text], (what, text)
        failed += response.status_code >= 400 or '"error"' in text or '"isError":true' in text
    return failed


FAULTS: dict[str, Callable[[Path], Exception]] = {
    "settings": lambda path: ConfigError(f"cannot use the catalogue {path}: {SECRET}"),
    "corrupt": lambda path: CatalogCorrupt(f"the catalogue {path} is damaged", f"restore {path}"),
    "unavailable": lambda path: StoreUnavailable(f"the catalogue {SECRET} does not answer: {path}"),
    "full": lambda path: StoreFull(f"no space left for the catalogue {path}"),
    "sql": lambda path: sqlite3.OperationalError(f"no such column in {path}"),
    "system": lambda path: PermissionError(13, "Permission denied", str(path)),
}


@pytest.fixture
def down(tmp_path: Path) -> Iterator[Service]:
    with serving(settings(tmp_path / "folder-of-the-service")) as service:
        assert service.post("/v1/documents?wait=true", HARBOUR).status_code == 200
        yield service


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the engine may end by it
def test_no_fault_of_the_catalogue_shows_where_it_is(down: Service, tmp_path: Path) -> None:
    path = tmp_path / "folder-of-the-service" / "catalog.sqlite"
    for name, fault in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:

            def failing(self: SqliteFile, *_: object, fault: Callable[[Path], Exception] = fault) -> None:
                raise self._translate(error) or error if isinstance(error := fault(path), sqlite3.Error) else error

            patch.setattr(SqliteFile, "_transaction", failing)
            down.engine_thread._health.examined = 0.0
            down.engine_thread.wake()
            assert check_silent(down.client, "folder-of-the-service", str(tmp_path), "pa55word", "10.1.2.3") > 20, name
    down.engine_thread.catalog_service._catalog.close()
    down.engine_thread._health.examined = 0.0
    down.engine_thread.wake()
    assert check_silent(down.client, "folder-of-the-service", str(tmp_path)) > 20


def test_a_service_whose_catalogue_is_gone_or_garbage_does_not_show_its_folder(tmp_path: Path) -> None:
    with served(tmp_path, RAGKV_DATA=str(tmp_path / "folder-of-the-service")) as (_, client):
        assert client.post("/v1/documents?wait=true", json=HARBOUR).status_code == 200
        path = tmp_path / "folder-of-the-service" / "catalog.sqlite"
        for damage in (lambda: path.write_bytes(b"garbage " * (path.stat().st_size // 8)), path.unlink):
            damage()
            for read in READ:
                response = client.get(read, headers={"accept": "text/html"} if "dash" in read else {})
                assert "folder-of-the-service" not in response.text, read
