"""The client against a running service: what it asks for comes back as nouns, what is refused as words."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import threading
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ragkv.cli import run
from ragkv.client import AsyncClient, Cited, Client, Done, Reported, Retrieved, Said
from ragkv.client import calls as calls_of
from ragkv.errors import Refused, Unreachable
from ragkv.metrics.prometheus import read

QUESTION = "Who built the harbour of Tarn?"


@pytest.fixture
def client(service):
    with Client(service.url) as found:
        yield found


@pytest.fixture
def collection():
    return f"client-{uuid.uuid4().hex[:8]}"


def test_a_document_is_put_shown_listed_and_removed(client, collection):
    put = client.put("a/b c?", "The mill of Orm was built by Ida Falk.", "Orm", {"year": 1901}, collection)
    assert (put.id, put.title, put.metadata, put.collection) == ("a/b c?", "Orm", {"year": 1901}, collection)
    again = client.put("a/b c?", "The mill of Orm was built by Ida Falk.", "Orm", {"year": 1901}, collection)
    assert again.updated == put.updated, "nothing was done"
    assert client.document("a/b c?", collection, text=True).text == "The mill of Orm was built by Ida Falk."
    assert [each.id for each in client.documents(collection)] == ["a/b c?"]
    assert [each.name for each in client.collections() if each.name == collection] == [collection]
    client.remove("a/b c?", collection)
    assert list(client.documents(collection)) == []
    with pytest.raises(Refused, match="has no document") as refused:
        client.remove("a/b c?", collection)
    assert (refused.value.status, refused.value.code) == (404, "not_found")


def test_pages_are_turned_until_there_is_none(client, collection):
    sent = [{"id": f"{n:03}", "text": f"Lamp {n} is blue.", "metadata": {"odd": n % 2 == 1}} for n in range(7)]
    job = client.wait(client.send(sent, collection))
    assert (job.status, job.counts.completed, job.finished is not None) == ("completed", 7, True)
    first = client.page(collection, limit=3)
    assert (len(first.documents), first.after) == (3, "002")
    assert [each.id for each in client.documents(collection)] == [each["id"] for each in sent]
    assert [each.id for each in client.documents(collection, filter={"odd": True})] == ["001", "003", "005"]
    client.remove_collection(collection)
    assert list(client.documents(collection)) == []


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


def test_an_answer_comes_in_pieces(client):
    events = list(client.stream(QUESTION, top_k=2))
    kinds = list(dict.fromkeys(map(type, events)))
    assert kinds == [Retrieved, Said, Cited, Reported, Done]
    done = events[-1].answer
    assert "".join(each.text for each in events if isinstance(each, Said)).strip() == done.answer
    assert tuple(each.citation for each in events if isinstance(each, Cited)) == done.citations
    assert events[0].citations == done.citations


def test_a_stream_may_be_left(client, service):
    stream = client.stream(QUESTION)
    next(stream)
    stream.close()
    assert client.ask(QUESTION).citations


def test_conversations_are_shown_and_forgotten(client):
    name = f"talk-{uuid.uuid4().hex}"
    client.ask(QUESTION, conversation_id=name, top_k=1)
    client.ask("And when?", conversation_id=name, top_k=1)
    assert [turn.question for turn in client.conversation(name).turns] == [QUESTION, "And when?"]
    client.forget(name)
    with pytest.raises(Refused) as refused:
        client.conversation(name)
    assert refused.value.status == 404


def test_what_is_wrong_is_told_in_the_services_words(client):
    with pytest.raises(Refused, match="method 'guess' does not exist") as refused:
        client.ask(QUESTION, method="guess")
    assert refused.value.status == 422
    with pytest.raises(Refused, match="method 'guess' does not exist"):
        list(client.stream(QUESTION, method="guess"))


def test_where_there_is_no_service_that_is_said():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with Client(url) as client:
            assert not client.ready()
            for call in (lambda: client.ask("who?"), lambda: list(client.stream("who?")), client.collections):
                with pytest.raises(Unreachable, match="is `ragkv serve` running there"):
                    call()


class Elsewhere(BaseHTTPRequestHandler):
    """Another service, which is busy at first."""

    said: list[tuple[int, dict[str, str], bytes]]

    def do_GET(self) -> None:
        status, headers, body = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def elsewhere():
    """(address, what is answered, one after the other)."""
    handler = type("Handler", (Elsewhere,), {"said": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.said
        server.shutdown()
        thread.join()


BUSY = (429, {"Retry-After": "0"}, json.dumps({"detail": "32 requests are waiting already", "code": "busy"}).encode())


def test_a_busy_service_is_asked_again_but_not_for_ever(elsewhere):
    url, said = elsewhere
    said += [BUSY, BUSY, (200, {}, b'{"collections": []}')]
    with Client(url) as client:
        assert client.collections() == ()
    said[:] = [BUSY]
    with Client(url, retries=3) as client, pytest.raises(Refused, match="waiting already") as refused:
        client.collections()
    assert (refused.value.code, refused.value.retry_after) == ("busy", 0.0)


@pytest.mark.parametrize(
    "answer", [(200, {}, b"<html>"), (200, {}, b'{"collections": [1]}'), (502, {}, b"no gateway"), (200, {}, b"[]")]
)
def test_what_is_no_ragkv_service_is_said_so(elsewhere, answer):
    url, said = elsewhere
    said.append(answer)
    with Client(url) as client, pytest.raises(Refused, match=r"ragkv service says|502"):
        client.collections()


def test_a_wait_is_as_long_as_the_service_asks_for_up_to_a_bound():
    busy = Refused(429, "busy", "", 7.0)
    assert calls_of.again(busy, 1) == 7.0
    assert calls_of.again(Refused(429, "busy", "", 900.0), 1) == calls_of.LONGEST_WAIT
    assert calls_of.again(busy, 0) is None
    assert calls_of.again(Refused(503, "stopping", "", 7.0), 1) is None


def test_the_client_to_await_does_the_same(service, collection):
    async def asked():
        async with AsyncClient(service.url) as client:
            await client.put("mill", "The mill of Orm was built by Ida Falk.", collection=collection)
            job = await client.wait(await client.send([{"id": "gate", "text": "The gate is red."}], collection))
            listed = [each.id async for each in client.documents(collection)]
            events = [each async for each in client.stream(QUESTION, top_k=1)]
            several = await asyncio.gather(*(client.ask(QUESTION, top_k=1) for _ in range(3)))
            with pytest.raises(Refused, match="no document"):
                await client.document("none", collection)
            ready = await client.ready()
            await client.remove_collection(collection)
            return job, listed, events, several, ready

    job, listed, events, several, ready = asyncio.run(asked())
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


def test_metrics_are_text_for_whoever_reads_that_format(service, elsewhere):
    async def awaited():
        async with AsyncClient(service.url) as client:
            return await client.metrics()

    with Client(service.url) as client:
        assert read(client.metrics()).sums == read(asyncio.run(awaited())).sums == service.worker.metrics.sums
    url, said = elsewhere
    said.append((200, {"Content-Type": "text/html"}, b"<html>"))
    with Client(url) as client, pytest.raises(Refused, match=r"text/html.*is the address right"):
        client.metrics()


# The command line over it.


def test_commands_let_the_service_work(service, collection, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "kiln.txt").write_text("The kiln of Arbo was lit by Runa Vik in 1950.")
    (folder / "bad.txt").write_bytes(b"\xff\xfe\0")
    there = ["--url", service.url, "-c", collection]
    assert run(["ingest", "notes", *there]) == 1
    said = capsys.readouterr()
    assert "completed  notes/kiln.txt" in said.out
    assert "bad.txt" in said.err
    assert run(["ls", *there]) == 0
    assert capsys.readouterr().out.startswith("notes/kiln.txt\t")
    assert run(["ask", "Who lit the kiln of Arbo?", "--json", *there]) == 0
    assert json.loads(capsys.readouterr().out)["citations"][0]["document_id"] == "notes/kiln.txt"
    assert run(["rm", "notes/kiln.txt", *there]) == 0
    assert run(["rm", "notes/kiln.txt", *there]) == 1
    assert "has no document" in capsys.readouterr().err
    assert not (tmp_path / "data").exists(), "nothing was done here"


def test_nothing_to_send_is_said(service, tmp_path, capsys):
    assert run(["ingest", str(tmp_path), "--url", service.url]) == 1
    assert "nothing to ingest" in capsys.readouterr().err
    assert run(["ingest", str(tmp_path / "none.txt"), "--url", service.url]) == 1
    assert "No such file" in capsys.readouterr().err


def test_answers_are_remembered_and_what_they_were_read_from(client, collection):
    client.put("mill", "The mill of Orm was built by Ida Falk.", "Orm", collection=collection)
    question = "Who built the mill of Orm?"
    given = [client.ask(question, collection=collection) for _ in range(3)]
    first = client.answers(limit=2)
    second = client.answers(limit=1, before=first.before)
    assert [each.collection for each in (*first.answers, *second.answers)] == [collection] * 3
    latest = client.recall(first.answers[0].id)
    assert (latest.question, latest.answer, latest.report) == (question, given[-1].answer, given[-1].report)
    assert (latest.when, latest.report.ratios) == (first.answers[0].when, first.answers[0].ratios)
    read = client.map(latest.id)
    assert (len(read.chunks), read.chunks[0].citation, len(read.chunks[0].states)) == (1, 1, read.layers)
    assert "".join(read.chunks[0].texts) == "Document: Orm\nThe mill of Orm was built by Ida Falk.\n"
    client.remove("mill", collection)
    with pytest.raises(Refused) as refused:
        client.map(latest.id)
    assert (refused.value.status, refused.value.code) == (404, "not_found")
