"""Roles of API keys, and the audit log of what their callers did."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp.types import TextContent

from ragkv.api.middleware.keys import make_key, name_of_key, read_keys
from ragkv.api.observability.audit import AUDIT_LOGGER, AuditLog
from ragkv.api.observability.logs import configured_logging
from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.tenants import Tenant
from ragkv.errors import ConfigError
from tests.api.conftest import BRIDGE, HARBOUR, Service, serving, settings
from tests.mcp_calls import over_http

ASK = {"question": "Who built the harbour of Tarn?"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Who built the harbour of Tarn?"}]}


@dataclass(frozen=True)
class House:
    """A service with a writer and a reader of tenant acme.

    Attributes:
        service: The service.
        audit: Its audit file.
        keys: Keys by role.
    """

    service: Service
    audit: Path
    keys: dict[str, str]

    def client(self, role: str) -> httpx.Client:
        """A client with the key of a role."""
        return httpx.Client(base_url=self.service.url, timeout=60, headers={"X-API-Key": self.keys[role]})

    def events(self) -> list[dict[str, Any]]:
        """All lines of the audit file."""
        return [json.loads(line) for line in self.audit.read_text().splitlines()]

    def since(self, count: int, expected: int) -> list[dict[str, Any]]:
        """Wait until there are so many events behind the first `count`, and return them."""
        ends = time.monotonic() + 20
        while len(self.events()) < count + expected and time.monotonic() < ends:
            time.sleep(0.02)
        return self.events()[count:]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    made = {"writer": make_key("acme"), "reader": make_key("acme", role="reader")}
    pairs = ",".join(pair for _, pair in made.values())
    audit = folder / "audit.jsonl"
    with serving(settings(folder / "data", api_keys=pairs, audit_log=str(audit))) as service:
        opened = House(service, audit, {role: key for role, (key, _) in made.items()})
        with opened.client("writer") as client:
            assert client.post("/v1/documents?wait=true", json=HARBOUR).json()["status"] == "completed"
        yield opened


def test_a_reader_searches_asks_and_reads(house: House) -> None:
    with house.client("reader") as reader:
        assert reader.post("/v1/answers", json=ASK).json()["answer"] == "Ada Brook"
        assert reader.post("/v1/search", json={"query": "harbour"}).status_code == 200
        assert reader.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert reader.post("/v1/completions", json={"model": CHAT["model"], "prompt": "Who?"}).status_code == 200
        response = reader.post("/v1/responses", json={"model": CHAT["model"], "input": ASK["question"]}).json()
        assert reader.get(f"/v1/responses/{response['id']}").status_code == 200
        assert reader.delete(f"/v1/responses/{response['id']}").status_code == 200
        message = {"model": CHAT["model"], "max_tokens": 2, "messages": CHAT["messages"]}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            assert reader.post(path, json=message).status_code == 200
        assert reader.post("/api/chat", json={**CHAT, "stream": False}).status_code == 200
        assert reader.post("/api/generate", json={"model": CHAT["model"], "prompt": "Who?"}).status_code == 200
        assert reader.post("/v1/embeddings", json={"model": "no such model", "input": "x"}).status_code == 404
        handed = reader.post("/v1/handovers", json={**ASK, "method": "reuse"}).json()
        rows = {**handed["kv_transfer_params"]["ragkv"], "cache_salt": handed["cache_salt"]}
        assert reader.post("/v1/handovers/rows", json=rows).status_code == 200
        ranked = reader.post("/v1/rerank", json={"query": "x", "documents": ["y"]})
        assert (ranked.status_code, ranked.json()["code"]) == (409, "no_reranker")
        assert reader.get("/v1/documents/harbour?text=true").json()["text"] == HARBOUR["text"]
        kept = reader.post("/v1/answers", json={**ASK, "conversation_id": "mine"})
        assert kept.status_code == 200
        assert reader.delete("/v1/conversations/mine").status_code == 204


def test_a_reader_changes_nothing(house: House) -> None:
    file = {"files": ("sly.txt", b"A reader wrote this.")}
    with house.client("reader") as reader:
        before = reader.get("/v1/documents").json()
        for answer in (
            reader.post("/v1/documents", json=BRIDGE),
            reader.post("/v1/documents", files=file),
            reader.put("/v1/documents/bridge", json={"text": "x"}),
            reader.delete("/v1/documents/harbour"),
            reader.delete("/v1/collections/default"),
            reader.post("/v1/jobs/x/cancel"),
            reader.post("/v1/documents/../documents", json=BRIDGE),
            reader.post("/v1/something-new"),
        ):
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert reader.get("/v1/documents").json() == before


def test_a_reader_changes_nothing_by_mcp(house: House) -> None:
    count = len(house.events())

    async def use() -> None:
        async with over_http(house.service.url, house.keys["reader"]) as client:
            assert not (await client.call_tool("search", {"query": "harbour"})).is_error
            for name, arguments in (("ingest", {"documents": [BRIDGE]}), ("delete_document", {"id": "harbour"})):
                refused = await client.call_tool(name, arguments)
                assert refused.is_error
                assert isinstance(refused.content[0], TextContent)
                assert "role writer" in refused.content[0].text

    asyncio.run(use())
    tried = [(event["action"], event["result"], event["documents"]) for event in house.since(count, 2)]
    assert tried == [("ingest", "forbidden", ["bridge"]), ("delete", "forbidden", ["harbour"])]
    with house.client("writer") as writer:
        assert [each["id"] for each in writer.get("/v1/documents").json()["documents"]] == ["harbour"]


def test_a_readers_ticket_of_the_dashboard_is_a_readers(house: House) -> None:
    for role, status in (("reader", 403), ("writer", 404)):
        with httpx.Client(base_url=house.service.url) as browser:
            browser.post("/dashboard/login", data={"key": house.keys[role]})
            own = {"Origin": house.service.url}
            assert browser.delete("/v1/documents/nothing", headers=own).status_code == status


def test_a_key_that_becomes_a_readers_ends_its_tickets() -> None:
    _, pair = make_key("acme")
    assert read_keys(pair).secret != read_keys(f"{pair};role=reader").secret


def test_a_key_without_a_role_stays_a_writer_and_an_unknown_role_is_refused() -> None:
    key, pair = make_key("acme")
    for setting, role in (
        (pair, "writer"),
        (f"{pair};role=writer", "writer"),
        (f"{pair};role=reader;requests=5", "reader"),
    ):
        caller = read_keys(setting).caller_of(key)
        assert caller is not None
        assert caller.role == role
    for wrong in ("role=admin", "role=", "rol=reader", "role"):
        with pytest.raises(ConfigError, match="role=reader"):
            read_keys(f"{pair};{wrong}")


def test_every_change_is_an_event_with_its_sender(house: House) -> None:
    digest = read_keys(make_key("x")[1]).entries[0].digest
    assert digest not in name_of_key(digest)
    with house.client("writer") as writer:
        count = len(house.events())
        sent = [BRIDGE, {"id": "void", "text": "   "}]
        job = writer.post("/v1/documents?wait=true&collection=log", json={"documents": sent}).json()
        writer.put("/v1/documents/bridge?collection=log&wait=true", json={"text": "The bridge of Mell is red."})
        writer.delete("/v1/documents/bridge?collection=log")
        writer.delete("/v1/collections/log")
        assert writer.delete("/v1/documents/nothing").status_code == 404
    events = house.since(count, 6)
    done = [(event["action"], event["result"], event["documents"]) for event in events]
    assert sorted(done[:3]) == [
        ("ingest", "accepted", ["bridge", "void"]),
        ("ingest", "added", ["bridge"]),
        ("ingest", "failed: invalid_document", ["void"]),
    ]
    assert done[3:] == [
        ("ingest", "accepted", ["bridge"]),
        ("replace", "replaced", ["bridge"]),
        ("delete", "deleted", ["bridge"]),
    ], "nothing is left of the collection, and what is not there is not deleted"
    assert {event["job_id"] for event in events[:3]} == {job["id"]}
    assert {(event["tenant"], event["collection"]) for event in events} == {("acme", "log")}
    (subject,) = {event["subject"] for event in events}
    assert subject.startswith("key-")
    assert all(event["time"].endswith("Z") for event in events)
    assert house.keys["writer"] not in house.audit.read_text()
    assert stat.S_IMODE(house.audit.stat().st_mode) == 0o600


def test_what_a_reader_tried_is_an_event(house: House) -> None:
    count = len(house.events())
    with house.client("reader") as reader:
        reader.delete("/v1/documents/harbour")
        reader.post("/v1/documents", json=BRIDGE)
    tried = [(event["action"], event["result"]) for event in house.since(count, 2)]
    assert tried == [("delete", "forbidden"), ("ingest", "forbidden")]


def test_the_log_has_audit_lines_at_every_level(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as stream:
        with configured_logging("json", "error", stream):
            AuditLog().record(Caller(Tenant("acme"), "ada"), "delete", "deleted", ["a\nb"], "acme:plans")
        stream.seek(0)
        (line,) = stream.read().splitlines()
    event = json.loads(line)
    assert (event["logger"], event["tenant"], event["subject"]) == (AUDIT_LOGGER, "acme", "ada")
    assert (event["documents"], event["collection"], event["result"]) == (["a\nb"], "plans", "deleted")


def test_a_file_that_cannot_be_written_is_refused_at_start_and_reported_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="RAGKV_AUDIT_LOG"):
        AuditLog(str(tmp_path / "nowhere" / "audit.jsonl"))
    folder = tmp_path / "here"
    folder.mkdir()
    log = AuditLog(str(folder / "audit.jsonl"))
    (folder / "audit.jsonl").unlink()
    folder.rmdir()
    with caplog.at_level(logging.INFO, AUDIT_LOGGER):
        log.record(Caller(), "delete", "deleted")
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR"]


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(str(path))
    log.record(Caller(), "delete", "deleted", ["one"])
    path.rename(tmp_path / "old.jsonl")
    log.record(Caller(), "delete", "deleted", ["two"])
    assert [json.loads(line)["documents"] for line in path.read_text().splitlines()] == [["two"]]
