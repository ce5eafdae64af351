"""What an MCP client does with ragkv, by the SDK's own client: the same calls over every transport."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, TextContent, TextResourceContents

TOOL_NAMES = ["search", "ask", "ingest", "list_documents", "list_collections", "delete_document"]
QUESTION = "Who built the harbour of Tarn?"
HARBOUR = {
    "id": "sea/harbour",
    "title": "Tarn",
    "text": "The harbour of Tarn was built in 1889 by Ada Brook.",
    "metadata": {"year": 1889},
}
BRIDGE = {"id": "bridge", "title": "Mell", "text": "The bridge of Mell was painted green by Otto Lindqvist in 1931."}
URI = "ragkv://documents/default/sea%2Fharbour"


@asynccontextmanager
async def over_http(url: str, key: str = "", mode: str = "auto", **headers: str) -> AsyncIterator[Client]:
    """Connect to the service at an address.

    Args:
        url: Address of the service.
        key: API key; empty where the service has none.
        mode: `auto`: the newest protocol, which has no handshake; `legacy`: the one before.
        **headers: Further headers.
    """
    keys = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        httpx2.AsyncClient(headers=keys | headers, timeout=60) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


async def call(client: Client, tool: str, **arguments: Any) -> Any:
    """Call a tool that must succeed. Its text holds the same as its structured content."""
    done = await client.call_tool(tool, arguments)
    assert not done.is_error, text_of(done)
    assert json.loads(text_of(done)) == done.structured_content
    return done.structured_content


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    """Call a tool that must fail. Returns the reason."""
    done = await client.call_tool(tool, arguments)
    assert done.is_error
    return text_of(done)


def text_of(result: CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


async def read(client: Client, uri: str) -> str:
    (content,) = (await client.read_resource(uri)).contents
    assert isinstance(content, TextResourceContents)
    assert (content.uri, content.mime_type) == (uri, "text/plain")
    return content.text


async def use_everything(client: Client) -> None:
    """List and call every tool and every resource of a ragkv that has no documents."""
    await _tools_are_described(client)
    seen: list[tuple[float, float | None, str | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total, message))

    arguments = {"documents": [HARBOUR, BRIDGE]}
    done = await client.call_tool("ingest", arguments, progress_callback=note)
    assert not done.is_error, text_of(done)
    counts = {"total": 2, "completed": 2, "unchanged": 0, "failed": 0, "cancelled": 0}
    assert done.structured_content == {**counts, "failures": []}
    assert [progress for progress, _, _ in seen] == sorted({progress for progress, _, _ in seen}), "it only grows"
    assert len(seen) >= 2
    assert seen[-1] == (2, 2, "2 of 2 documents")
    assert (await call(client, "ingest", documents=[HARBOUR]))["unchanged"] == 1

    listed = await call(client, "list_documents", limit=1, sort="title", order="desc")
    assert [(each["id"], each["uri"]) for each in listed["documents"]] == [("sea/harbour", URI)]
    assert [each["id"] for each in (await call(client, "list_documents", q="mell"))["documents"]] == ["bridge"]
    following = await call(client, "list_documents", sort="title", order="desc", after=listed["after"])
    assert ([each["id"] for each in following["documents"]], following["after"]) == (["bridge"], None)
    (collection,) = (await call(client, "list_collections"))["collections"]
    assert (collection["name"], collection["documents"]) == ("default", 2)

    found = await call(client, "search", query="harbour of Tarn", top_k=1, filter={"year": 1889})
    assert [each["text"] for each in found["passages"]] == [HARBOUR["text"]]
    answer = await call(client, "ask", question=QUESTION, top_k=1, max_tokens=8)
    assert answer["answer"]
    assert [(each["document_id"], each["text"]) for each in answer["citations"]] == [("sea/harbour", HARBOUR["text"])]
    assert set(answer["report"]["ratios"]) == {"sequence", "recompute", "load", "cache_hit"}

    await _resources_are_documents(client)
    assert await call(client, "delete_document", id="bridge") == {"id": "bridge", "collection": "default"}
    gone = "collection 'default' has no document 'bridge'"
    assert await refused(client, "delete_document", id="bridge") == gone
    assert [each["id"] for each in (await call(client, "list_documents"))["documents"]] == ["sea/harbour"]


async def _tools_are_described(client: Client) -> None:
    tools = (await client.list_tools()).tools
    assert [tool.name for tool in tools] == TOOL_NAMES
    for tool in tools:
        assert tool.title, tool.name
        assert tool.description, tool.name
        assert tool.input_schema["type"] == "object", tool.name
        assert tool.output_schema is not None, tool.name
        assert tool.output_schema["type"] == "object", tool.name
        assert tool.annotations is not None, tool.name
        changes = tool.name in ("ask", "ingest", "delete_document")
        assert tool.annotations.read_only_hint is not changes, tool.name
        assert bool(tool.annotations.destructive_hint) == (tool.name in ("ingest", "delete_document")), tool.name


async def _resources_are_documents(client: Client) -> None:
    (template,) = (await client.list_resource_templates()).resource_templates
    assert template.uri_template == "ragkv://documents/{collection}/{id}"
    resources = (await client.list_resources()).resources
    assert [(each.name, each.uri) for each in resources] == [
        ("bridge", "ragkv://documents/default/bridge"),
        ("sea/harbour", URI),
    ]
    assert await read(client, URI) == HARBOUR["text"]
    assert await read(client, "ragkv://documents/default/sea/harbour") == HARBOUR["text"]
