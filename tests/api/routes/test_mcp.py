"""`/mcp` with the SDK's client: every tool and resource, keys and tenants, limits, faults, and who hangs up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mcp.shared.exceptions import MCPError

from ragkv.api.middleware.keys import make_key
from ragkv.api.runtime import mcp_resources
from tests.api.conftest import LIMIT, Service, serving, settings
from tests.mcp_calls import BRIDGE, HARBOUR, QUESTION, call, over_http, read, refused, text_of, use_everything

LIMITS = {"few": {"requests": 3}, "words": {"tokens": 20}, "bytes": {"bytes": 40}, "full": {"stored": 1}}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, str]]]:
    """A service with keys, and the key of each tenant."""
    made = {name: make_key(name, LIMITS.get(name)) for name in ("acme", "zeta", "newer", "older", *LIMITS)}
    pairs = ", ".join(pair for _, pair in made.values())
    with serving(settings(tmp_path_factory.mktemp("kept"), api_keys=pairs)) as service:
        yield service, {name: key for name, (key, _) in made.items()}


@pytest.mark.parametrize(("tenant", "mode"), [("newer", "auto"), ("older", "legacy")])
def test_every_tool_and_resource_works_with_a_key(kept: tuple[Service, dict[str, str]], tenant: str, mode: str) -> None:
    service, keys = kept

    async def use() -> None:
        async with over_http(service.url, keys[tenant], mode) as client:
            await use_everything(client)
            newest = client.protocol_version >= "2026"
            assert newest is (mode == "auto")

    asyncio.run(use())


def test_a_tenant_sees_and_changes_only_its_own_documents(kept: tuple[Service, dict[str, str]]) -> None:
    service, keys = kept

    async def use() -> None:
        async with over_http(service.url, keys["acme"]) as acme, over_http(service.url, keys["zeta"]) as zeta:
            await call(acme, "ingest", documents=[HARBOUR], collection="plans")
            await call(zeta, "ingest", documents=[BRIDGE])
            assert [each["name"] for each in (await call(acme, "list_collections"))["collections"]] == ["plans"]
            assert [each["name"] for each in (await call(zeta, "list_collections"))["collections"]] == ["default"]
            assert (await call(zeta, "list_documents", collection="plans"))["documents"] == []
            nothing = "collection 'plans' has no documents"
            assert await refused(zeta, "search", query="harbour", collection="plans") == nothing
            assert await refused(zeta, "ask", question=QUESTION, collection="plans") == nothing
            missing = "collection 'plans' has no document 'sea/harbour'"
            assert await refused(zeta, "delete_document", id="sea/harbour", collection="plans") == missing
            with pytest.raises(MCPError, match=missing):
                await read(zeta, "ragkv://documents/plans/sea%2Fharbour")
            for guess in ("acme:plans", "zeta:../acme:plans"):
                assert (await call(zeta, "list_documents", collection=guess))["documents"] == []
            assert [each.name for each in (await zeta.list_resources()).resources] == ["bridge"]
            assert await read(acme, "ragkv://documents/plans/sea%2Fharbour") == HARBOUR["text"]

    asyncio.run(use())


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_without_a_known_key_nothing_is_served(kept: tuple[Service, dict[str, str]], mode: str) -> None:
    service, keys = kept

    async def connect(key: str) -> None:
        async with over_http(service.url, key, mode) as client:
            await client.list_tools()

    for key in ("", keys["acme"][:-1]):
        with pytest.raises((MCPError, ExceptionGroup)):
            asyncio.run(connect(key))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        refusal = service.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, headers=headers)
        assert refusal.status_code == 401
        assert refusal.json()["code"] == ("invalid_api_key" if key else "no_api_key")


def test_a_tenant_that_used_up_its_limits_is_refused(kept: tuple[Service, dict[str, str]]) -> None:
    service, keys = kept

    async def use() -> None:
        async with over_http(service.url, keys["words"]) as client:
            await call(client, "ingest", documents=[HARBOUR])
            await call(client, "ask", question=QUESTION)
            assert "the tokens of this minute are used up" in await refused(client, "ask", question=QUESTION)
            await call(client, "search", query="harbour")
        async with over_http(service.url, keys["bytes"]) as client:
            await call(client, "ingest", documents=[HARBOUR])
            spent = await refused(client, "ingest", documents=[BRIDGE])
            assert "the bytes of documents of this minute are used up" in spent
        async with over_http(service.url, keys["full"]) as client:
            await call(client, "ingest", documents=[HARBOUR])
            assert "remove some first" in await refused(client, "ingest", documents=[BRIDGE])

    asyncio.run(use())
    headers = {"X-API-Key": keys["few"]}
    seen = [service.post("/mcp", {}, headers=headers) for _ in range(4)]
    assert [each.status_code for each in seen][-1] == 429
    assert 429 not in [each.status_code for each in seen[:-1]]
    assert seen[-1].json()["code"] == "rate_limited"


def test_faults_have_the_words_of_the_http_api(kept: tuple[Service, dict[str, str]]) -> None:
    service, keys = kept

    async def use() -> None:
        async with over_http(service.url, keys["acme"]) as client:
            await call(client, "ingest", documents=[HARBOUR])
            ask = {"question": QUESTION, "method": "nothing"}
            problem = service.post("/v1/answers", ask, headers={"X-API-Key": keys["acme"]}).json()["detail"]
            assert await refused(client, "ask", **ask) == problem
            assert await refused(client, "search") == "query: is required"
            wrong = await refused(client, "ask", question=QUESTION, top_k=65, colour="red")
            assert wrong == "top_k: must be less than or equal to 64; colour: is no field of this request"
            assert "document 'blank' is empty" in await refused(
                client, "ingest", documents=[{"id": "blank", "text": " "}]
            )
            some = await call(client, "ingest", documents=[BRIDGE, {"id": "blank", "text": " "}])
            assert (some["completed"], some["failed"], some["failures"][0]["id"]) == (1, 1, "blank")
            assert (some["failures"][0]["code"], len(some["failures"])) == ("invalid_document", 1)
            too_long = await refused(client, "ingest", documents=[{"id": "long", "text": "word " * (LIMIT // 4)}])
            assert str(LIMIT) in too_long
            with pytest.raises(MCPError, match="there is no tool 'destroy'"):
                await client.call_tool("destroy", {})
            with pytest.raises(MCPError, match="there is no resource 'file:///etc/passwd'"):
                await read(client, "file:///etc/passwd")
            with pytest.raises(MCPError, match="has no document 'nowhere'"):
                await read(client, "ragkv://documents/default/nowhere")
            with pytest.raises(MCPError, match="collection: must have"):
                await read(client, "ragkv://documents//nowhere")
            with pytest.raises(MCPError, match="cursor"):
                await client.list_resources(cursor="x")

    asyncio.run(use())


def test_an_unexpected_error_reveals_nothing_and_is_logged(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("the secret path /srv/keys")

    monkeypatch.setattr(service.engine_thread.catalog_service, "page", broken)

    async def use() -> None:
        async with over_http(service.url) as client:
            told = await refused(client, "list_documents")
            assert told == "internal error; the log of the service has the details"
            with pytest.raises(MCPError) as error:
                await client.list_resources()
            assert "secret" not in str(error.value)

    with caplog.at_level(logging.ERROR, "ragkv.api"):
        asyncio.run(use())
    assert "the secret path" in caplog.text


def test_resources_come_in_pages_over_all_collections(
    kept: tuple[Service, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, keys = kept
    monkeypatch.setattr(mcp_resources, "PAGE", 1)

    async def use() -> None:
        async with over_http(service.url, keys["older"]) as client:
            for collection in ("a/b", "default", "z"):
                await call(client, "ingest", documents=[HARBOUR, BRIDGE], collection=collection)
            uris, cursor, pages = list[str](), None, 0
            while pages == 0 or cursor is not None:
                page = await client.list_resources(cursor=cursor)
                uris += [each.uri for each in page.resources]
                cursor, pages = page.next_cursor, pages + 1
            assert pages == 6
            assert uris == [
                f"ragkv://documents/{name}/{id}"
                for name in ("a%2Fb", "default", "z")
                for id in ("bridge", "sea%2Fharbour")
            ]
            assert [await read(client, uri) for uri in uris] == [BRIDGE["text"], HARBOUR["text"]] * 3

    asyncio.run(use())


def test_pages_of_other_origins_and_unknown_hosts_are_refused(service: Service) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    foreign = service.post("/mcp", body, headers={"Origin": "https://evil.example"})
    assert (foreign.status_code, foreign.json()["code"]) == (403, "other_origin")
    renamed = service.post("/mcp", body, headers={"Host": "evil.example"})
    assert (renamed.status_code, renamed.json()["code"]) == (403, "unknown_host")


def test_only_posts_of_a_bounded_size_are_taken(service: Service) -> None:
    assert service.client.get("/mcp").status_code == 405
    assert service.client.delete("/mcp").headers["allow"] == "POST"
    large = service.client.post("/mcp", content=b" " * (LIMIT + 2**20 + 1))
    assert (large.status_code, large.json()["code"]) == (413, "too_large")

    def endless() -> Iterator[bytes]:
        for _ in range(24):
            yield b" " * 2**16

    chunked = service.client.post("/mcp", content=endless(), headers={"content-type": "application/json"})
    assert (chunked.status_code, chunked.json()["code"]) == (413, "too_large")


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_call_is_logged_counted_and_recorded_like_any_question(
    service: Service, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    id = f"by-mcp-{mode}"

    async def use() -> None:
        async with over_http(service.url, mode=mode, **{"X-Request-ID": id}) as client:
            await call(client, "ask", question=QUESTION)

    with caplog.at_level(logging.INFO, "ragkv.api"):
        asyncio.run(use())
    lines = [each for each in caplog.records if hasattr(each, "answered_by")]
    assert [(vars(each)["route"], vars(each)["status"]) for each in lines] == [("/mcp", 200)]
    assert service.client.get(f"/v1/answers/{id}").json()["question"] == QUESTION
    assert 'ragkv_http_requests_total{method="POST",route="/mcp",status="200"}' in service.client.get("/metrics").text


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_question_whose_client_gives_up_is_dropped(service: Service, mode: str) -> None:
    def cancelled() -> int:
        return int(service.engine_thread.health()["cancelled"])

    before = cancelled()

    async def give_up() -> None:
        async with over_http(service.url, mode=mode) as client:
            asking = asyncio.create_task(client.call_tool("ask", {"question": QUESTION, "max_tokens": 4096}))
            while not service.engine_thread.health()["running"]:
                await asyncio.sleep(0.01)
                assert not asking.done()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(give_up())
    deadline = time.monotonic() + 10
    while cancelled() == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert cancelled() == before + 1
    assert service.engine_thread.health()["running"] == 0


LONG = {"id": "long", "text": " ".join(f"Boat {n} of Tarn carries {n + 3} nets." for n in range(240))}


def test_an_ingest_goes_on_when_its_client_gives_up(service: Service) -> None:
    async def give_up() -> None:
        begun = asyncio.Event()

        async def note(progress: float, total: float | None, message: str | None) -> None:
            begun.set()

        async with over_http(service.url) as client:
            arguments = {"documents": [LONG], "collection": "boats"}
            ingest = asyncio.create_task(client.call_tool("ingest", arguments, progress_callback=note))
            await begun.wait()
            ingest.cancel()
            await asyncio.gather(ingest, return_exceptions=True)

    asyncio.run(give_up())
    (job,) = [each for each in service.client.get("/v1/jobs").json()["jobs"] if each["collection"] == "boats"]
    assert service.job(job["id"])["status"] == "completed"


def test_a_service_that_shuts_down_tells_who_waits_for_an_ingest(tmp_path: Path) -> None:
    with serving(settings(tmp_path, group_tokens=128)) as service:

        async def use() -> None:
            async def stop(progress: float, total: float | None, message: str | None) -> None:
                service.engine_thread.pause()

            async with over_http(service.url) as client:
                done = await client.call_tool("ingest", {"documents": [LONG]}, progress_callback=stop)
                assert done.is_error
                assert text_of(done).startswith("the service is shutting down; job ")
                assert await refused(client, "ask", question=QUESTION) == "the service is shutting down"

        asyncio.run(use())
