"""The client against a running service: results are typed, and refusals carry the message of the service."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import threading
import uuid
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ragkv.cli import run
from ragkv.client import (
    AsyncClient,
    Cited,
    Client,
    Done,
    Refused,
    Reported,
    Retrieved,
    Said,
    Unreachable,
    calls,
    responses,
)
from ragkv.locality import HEADER, affinity
from ragkv.metrics.prometheus import parse_metrics

QUESTION = "Who built the harbour of Tarn?"


@pytest.fixture
def client(service):
    with Client(service.url) as found:
        yield found


@pytest.fixture
def collection():
    return f"client-{uuid.uuid4().hex[:8]}"


def test_a_document_is_put_fetched_listed_and_removed(client, collection):
    put = client.put("a/b c?", "The mill of Orm was built by Ida Falk.", "Orm", {"year": 1901}, collection)
    assert (put.id, put.title, put.metadata, put.collection) == ("a/b c?", "Orm", {"year": 1901}, collection)
    again = client.put("a/b c?", "The mill of Orm was built by Ida Falk.", "Orm", {"year": 1901}, collection)
    assert again.updated == put.updated, "unchanged content is not ingested again"
    assert client.document("a/b c?", collection, text=True).text == "The mill of Orm was built by Ida Falk."
    assert [each.id for each in client.documents(collection)] == ["a/b c?"]
    assert [each.name for each in client.collections() if each.name == collection] == [collection]
    client.remove("a/b c?", collection)
    assert list(client.documents(collection)) == []
    with pytest.raises(Refused, match="has no document") as refused:
        client.remove("a/b c?", collection)
    assert (refused.value.status, refused.value.code) == (404, "not_found")


def test_documents_iterates_over_all_pages(client, collection):
    sent = [{"id": f"{n:03}", "text": f"Lamp {n} is blue.", "metadata": {"odd": n % 2 == 1}} for n in range(7)]
    job = client.wait(client.send(sent, collection))
    assert (job.status, job.counts.completed, job.finished is not None) == ("completed", 7, True)
    first = client.page(collection, limit=3)
    assert (len(first.documents), first.after) == (3, "002")
    assert [each.id for each in client.documents(collection)] == [each["id"] for each in sent]
    assert [each.id for each in client.documents(collection, filter={"odd": True})] == ["001", "003", "005"]
    client.remove_collection(collection)
    assert list(client.documents(collection)) == []


def test_a_document_is_read_in_parts_and_listed_in_any_order(client, collection):
    text = "# Mill\n\nThe mill of Orm was built by Ida Falk."
    client.put("b.md", text, "Orm", collection=collection)
    client.put("a/chunks", "A bell.", "Bell", collection=collection)
    assert client.text("b.md", collection, 2, 6).text == "Mill"
    (chunk,) = client.chunks("b.md", collection)
    assert (chunk.chunk, chunk.heading, text[chunk.start : chunk.end]) == (0, "Mill", chunk.text)
    assert client.document("a/chunks", collection).title == "Bell", "an id may end like the path of a part"
    assert [each.chunk_id for each in client.chunks("a/chunks", collection)] == ["a/chunks#0"]
    latest = client.documents(collection, sort="created", order="desc")
    assert [(each.id, each.version) for each in latest] == [("a/chunks", 1), ("b.md", 1)]
    assert [each.id for each in client.documents(collection, q="orm")] == ["b.md"]
    client.remove("a/chunks", collection)
    client.remove_collection(collection)


def test_files_are_uploaded_and_followed(client, collection, tmp_path):
    (tmp_path / "note.md").write_text("# Quay\n\nThe quay of Lund was paved by Sten Berg.\n")
    (tmp_path / "page.html").write_text("<title>Gate</title><p>The gate of Lund was cast by Ola Krus.</p>")
    (tmp_path / "odd.bin").write_bytes(b"\0\1")
    paths = sorted(tmp_path.iterdir())
    seen = list(client.follow(client.upload(paths, metadata={"town": "Lund"}, collection=collection)))
    assert (seen[-1].status, seen[-1].counts.completed, seen[-1].counts.failed) == ("completed", 2, 1)
    assert seen[-1].documents[0].id == "odd.bin"
    assert {each.metadata["town"] for each in client.documents(collection)} == {"Lund"}
    assert client.job(seen[-1].id, all=True).documents[0].status == "completed"
    assert client.jobs()[0].id == client.cancel(seen[-1].id).id == seen[-1].id


def test_a_question_is_answered(client):
    answer = client.ask(QUESTION, top_k=2, method="full")
    assert answer.citations[0].document_id == "harbour"
    assert answer.report.method == "full"
    assert client.ready()


def test_an_answer_is_streamed(client):
    events = list(client.stream(QUESTION, top_k=2))
    kinds = list(dict.fromkeys(map(type, events)))
    assert kinds == [Retrieved, Said, Cited, Reported, Done]
    done = events[-1].answer
    assert "".join(each.text for each in events if isinstance(each, Said)).strip() == done.answer
    assert tuple(each.citation for each in events if isinstance(each, Cited)) == done.citations
    assert events[0].citations == tuple(replace(each, marks=()) for each in done.citations), "no answer to mark yet"


def test_passages_are_searched(client):
    found = client.search(QUESTION, top_k=1)
    assert [(each.document_id, each.text[each.start : each.end]) for each in found.passages] == [
        ("harbour", found.passages[0].text)
    ]
    assert found.report.timings_ms.total > 0
    assert [each.document_id for each in client.search(QUESTION, documents=["bridge"]).passages] == ["bridge"]


def test_a_chat_is_answered_and_streamed(client):
    (model, *others), messages = client.models(), [{"role": "user", "content": QUESTION}]
    assert f"{model}:full" in others
    answer = client.chat(f"{model}:full", messages, top_k=1, max_tokens=4, stop=["xyz"], seed=1)
    assert (answer.model, answer.report.method) == (f"{model}:full", "full")
    assert [each.document_id for each in answer.citations] == ["harbour"]
    assert answer.usage.completion == answer.report.tokens.generated <= 4
    assert 0 <= answer.usage.cached <= answer.usage.prompt
    *pieces, whole = client.stream_chat(f"{model}:full", messages, top_k=1, max_tokens=4)
    assert "".join(each.text for each in pieces) == whole.text
    assert (whole.text.strip(), whole.usage.completion) == (answer.text.strip(), answer.usage.completion)
    assert whole.citations == answer.citations


def test_openai_s_errors_are_refusals(client, scripted):
    with pytest.raises(Refused, match="there is no such model") as refused:
        client.chat("none", [{"role": "user", "content": QUESTION}])
    assert (refused.value.status, refused.value.code) == (404, "not_found")
    url, prepared = scripted
    broken = b'data: {"error": {"message": "the disk is full", "code": "no_space"}}\n\n'
    prepared.append((200, {"Content-Type": "text/event-stream"}, broken))
    with Client(url) as other, pytest.raises(Refused, match="the disk is full"):
        list(other.stream_chat("any", [{"role": "user", "content": QUESTION}]))
    prepared[:] = [(200, {}, b'{"id": "1", "model": "m", "choices": []}')]
    with Client(url) as other, pytest.raises(Refused, match="that of a ragkv service"):
        other.chat("any", [{"role": "user", "content": QUESTION}])


def test_a_stream_can_be_closed_early(client, service):
    stream = client.stream(QUESTION)
    next(stream)
    stream.close()
    assert client.ask(QUESTION).citations


def test_a_conversation_is_fetched_and_deleted(client):
    name = f"conversation-{uuid.uuid4().hex}"
    client.ask(QUESTION, conversation_id=name, top_k=1)
    client.ask("And when?", conversation_id=name, top_k=1)
    assert [turn.question for turn in client.conversation(name).turns] == [QUESTION, "And when?"]
    client.forget(name)
    with pytest.raises(Refused) as refused:
        client.conversation(name)
    assert refused.value.status == 404


def test_refusals_carry_the_message_of_the_service(client):
    with pytest.raises(Refused, match="method 'guess' does not exist") as refused:
        client.ask(QUESTION, method="guess")
    assert refused.value.status == 422
    with pytest.raises(Refused, match="method 'guess' does not exist"):
        list(client.stream(QUESTION, method="guess"))


def test_a_missing_service_is_unreachable():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with Client(url) as client:
            assert not client.ready()
            for call in (lambda: client.ask("who?"), lambda: list(client.stream("who?")), client.collections):
                with pytest.raises(Unreachable, match="is `ragkv serve` running there"):
                    call()


class ScriptedHandler(BaseHTTPRequestHandler):
    """A service that answers with prepared responses; the last one repeats."""

    responses: list[tuple[int, dict[str, str], bytes]]

    def do_GET(self) -> None:
        status, headers, body = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def scripted():
    """(url, prepared responses) of another service."""
    handler = type("Handler", (ScriptedHandler,), {"responses": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.responses
        server.shutdown()
        thread.join()


BUSY = (429, {"Retry-After": "0"}, json.dumps({"detail": "32 requests are waiting already", "code": "busy"}).encode())


def test_a_busy_service_is_retried_a_few_times(scripted):
    url, prepared = scripted
    prepared += [BUSY, BUSY, (200, {}, b'{"collections": []}')]
    with Client(url) as client:
        assert client.collections() == ()
    prepared[:] = [BUSY]
    with Client(url, retries=3) as client, pytest.raises(Refused, match="waiting already") as refused:
        client.collections()
    assert (refused.value.code, refused.value.retry_after) == ("busy", 0.0)


@pytest.mark.parametrize(
    "answer", [(200, {}, b"<html>"), (200, {}, b'{"collections": [1]}'), (502, {}, b"no gateway"), (200, {}, b"[]")]
)
def test_the_response_of_another_service_is_refused(scripted, answer):
    url, prepared = scripted
    prepared.append(answer)
    with Client(url) as client, pytest.raises(Refused, match=r"that of a ragkv service|502"):
        client.collections()


def test_the_retry_delay_is_that_of_the_service_up_to_a_limit():
    busy = Refused(429, "busy", "", 7.0)
    assert responses.retry_delay(busy, 1) == 7.0
    assert responses.retry_delay(Refused(429, "busy", "", 900.0), 1) == responses.MAX_WAIT
    assert responses.retry_delay(busy, 0) is None
    assert responses.retry_delay(Refused(503, "stopping", "", 7.0), 1) is None
    assert responses.retry_delay(Refused(503, "replica_lost", "", 1.0), 1) == 1.0


def test_a_request_says_what_it_is_about():
    def key(call, credential=""):
        return call.arguments(credential)["headers"][HEADER]

    asked = calls.ask("Who?", False, {"collection": "harbour", "conversation_id": None})
    assert key(asked) == key(calls.search("Who?", "harbour", None, None, None)) == affinity("", "harbour")
    assert key(asked) == key(calls.chat("tiny", [], False, {"collection": "harbour"}))
    assert key(asked) == key(calls.put("a", "text", "", None, "harbour")) == key(calls.upload([], [], None, "harbour"))
    assert key(calls.ask("Who?", False, {})) == key(calls.chat("tiny", [], False, {})) == affinity("", "default")
    turn = calls.ask("Who?", True, {"collection": "harbour", "conversation_id": "talk"})
    assert key(turn) == key(calls.forget("talk", "harbour")) == affinity("", "harbour", "talk")
    assert key(turn, "ragkv_key") not in (key(turn), key(asked, "ragkv_key"))
    assert "headers" not in calls.metrics().arguments("")


def test_the_asynchronous_client_does_the_same(service, collection):
    async def use():
        async with AsyncClient(service.url) as client:
            await client.put("mill", "The mill of Orm was built by Ida Falk.", collection=collection)
            job = await client.wait(await client.send([{"id": "gate", "text": "The gate is red."}], collection))
            listed = [each.id async for each in client.documents(collection)]
            events = [each async for each in client.stream(QUESTION, top_k=1)]
            several = await asyncio.gather(*(client.ask(QUESTION, top_k=1) for _ in range(3)))
            with pytest.raises(Refused, match="no document"):
                await client.document("none", collection)
            ready, name = await client.ready(), (await client.models())[0]
            messages = [{"role": "user", "content": QUESTION}]
            chat = await client.chat(name, messages, top_k=1)
            *pieces, whole = [each async for each in client.stream_chat(name, messages, top_k=1)]
            assert "".join(each.text for each in pieces).strip() == whole.text.strip() == chat.text.strip()
            await client.remove_collection(collection)
            return job, listed, events, several, ready

    job, listed, events, several, ready = asyncio.run(use())
    assert (job.status, listed, ready) == ("completed", ["gate", "mill"], True)
    assert isinstance(events[-1], Done)
    assert {answer.answer for answer in several} == {events[-1].answer.answer}


def test_both_clients_have_the_same_methods():
    def methods(kind):
        public = {name: found for name, found in vars(kind).items() if not name.startswith("_")}
        return {name: [*inspect.signature(found).parameters.items()] for name, found in public.items()}

    one, other = methods(Client), methods(AsyncClient)
    assert one.keys() == other.keys()
    assert [str(each) for each in one.values()] == [str(each) for each in other.values()]


def test_metrics_are_prometheus_text(service, scripted):
    async def fetch():
        async with AsyncClient(service.url) as client:
            return await client.metrics()

    with Client(service.url) as client:
        fetched, awaited = parse_metrics(client.metrics()), parse_metrics(asyncio.run(fetch()))
        assert fetched.sums == awaited.sums == service.engine_thread.metrics.sums
    url, prepared = scripted
    prepared.append((200, {"Content-Type": "text/html"}, b"<html>"))
    with Client(url) as client, pytest.raises(Refused, match=r"text/html.*is the address right"):
        client.metrics()


# The command line with --url


def test_commands_use_the_service(service, collection, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "kiln.txt").write_text("The kiln of Arbo was lit by Runa Vik in 1950.")
    (folder / "bad.txt").write_bytes(b"\xff\xfe\0")
    there = ["--url", service.url, "-c", collection]
    assert run(["ingest", "notes", *there]) == 1
    printed = capsys.readouterr()
    assert "completed  notes/kiln.txt" in printed.out
    assert "bad.txt" in printed.err
    assert run(["ls", *there]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("notes/kiln.txt\t")
    assert run(["ask", "Who lit the kiln of Arbo?", "--json", *there]) == 0
    assert json.loads(capsys.readouterr().out)["citations"][0]["document_id"] == "notes/kiln.txt"
    assert run(["rm", "notes/kiln.txt", *there]) == 0
    assert run(["rm", "notes/kiln.txt", *there]) == 1
    assert "has no document" in capsys.readouterr().err
    assert not (tmp_path / "data").exists(), "no local data folder is created"


def test_an_ingest_without_files_fails(service, tmp_path, capsys):
    assert run(["ingest", str(tmp_path), "--url", service.url]) == 1
    assert "nothing to ingest" in capsys.readouterr().err
    assert run(["ingest", str(tmp_path / "none.txt"), "--url", service.url]) == 1
    assert "No such file" in capsys.readouterr().err


def test_files_of_two_folders_are_told_apart_by_a_service_and_linked_folders_named(
    service, tmp_path, capsys, monkeypatch
):
    for year in ("2025", "2026"):
        (tmp_path / year / "contracts").mkdir(parents=True)
        (tmp_path / year / "contracts" / "report.md").write_text(f"The crane of {year}.")
    (tmp_path / "2026" / "contracts" / "link").symlink_to(tmp_path)
    where = ("--url", service.url, "--collection", "years")
    codes = []
    for folder, given in (("2025", "contracts"), ("2026", "contracts"), ("", "2025/contracts/report.md")):
        monkeypatch.chdir(tmp_path / folder)
        codes.append(run(["ingest", given, *where]))
    printed = capsys.readouterr()
    assert codes == [0, 1, 0]
    assert "link: a linked folder is not read" in printed.err
    assert [line.split() for line in printed.out.splitlines()] == [
        ["completed", "contracts/report.md"],
        ["completed", "2026/contracts/report.md"],
        ["unchanged", "contracts/report.md"],
    ]
    assert run(["ls", "--json", *where]) == 0
    sources = [json.loads(line)["source"] for line in capsys.readouterr().out.splitlines()]
    assert sources == [str(tmp_path.resolve() / year / "contracts" / "report.md") for year in ("2026", "2025")]


def test_recorded_answers_and_their_maps_are_fetched(client, collection):
    client.put("mill", "The mill of Orm was built by Ida Falk.", "Orm", collection=collection)
    question = "Who built the mill of Orm?"
    given = [client.ask(question, collection=collection) for _ in range(3)]
    first = client.answers(limit=2)
    second = client.answers(limit=1, before=first.before)
    assert [each.collection for each in (*first.answers, *second.answers)] == [collection] * 3
    latest = client.recall(first.answers[0].id)
    assert (latest.question, latest.answer, latest.report) == (question, given[-1].answer, given[-1].report)
    assert (latest.when, latest.report.ratios) == (first.answers[0].when, first.answers[0].ratios)
    answer_map = client.map(latest.id)
    assert (len(answer_map.chunks), answer_map.chunks[0].citation) == (1, 1)
    assert len(answer_map.chunks[0].states) == answer_map.layers
    assert "".join(answer_map.chunks[0].texts) == "Document: Orm\nThe mill of Orm was built by Ida Falk.\n"
    client.remove("mill", collection)
    with pytest.raises(Refused) as refused:
        client.map(latest.id)
    assert (refused.value.status, refused.value.code) == (404, "not_found")
