"""Uploads: files become documents, an invalid file fails alone, and temporary files are removed."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragkv.api.middleware.body_limit import UPLOAD_DOCUMENTS
from ragkv.api.routes import uploads
from ragkv.api.runtime import connections
from tests.api.conftest import LIMIT, Service
from tests.api.test_bad_input import check_problem

Files = list[tuple[str, bytes]]
FORM = {"content-type": "multipart/form-data; boundary=x"}


def upload(service: Service, files: Files, wait: bool = True, **fields: str) -> httpx.Response:
    parts = [("files", file) for file in files]
    return service.client.post("/v1/documents", params={"wait": wait}, files=parts, data=fields)


def spooled(folder: Path) -> set[str]:
    """Return the files of a folder that this process has open and that have no name any more."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.add(os.readlink(link))
        except FileNotFoundError:
            continue  # the one that lists the folder
    return {name for name in found if name.startswith(str(folder)) and name.endswith("(deleted)")}


def soon(check: Any) -> bool:
    until = time.monotonic() + 40
    while not (holds := bool(check())) and time.monotonic() < until:
        time.sleep(0.02)
    return holds  # as it was seen: what was true may be over by now


def test_several_files_are_one_job_and_an_invalid_file_fails_alone(service: Service) -> None:
    lines = b'{"id": "one", "text": "The first ferry is red."}\n{"id": "two", "text": " "}\n'
    files = [
        ("notes.md", b"# The tower\n\nThe tower of Mell is tall."),
        ("bad.txt", b"\xff\xfe\x00"),
        ("notes.md", b"Again."),
        ("lines.jsonl", lines),
        ("huge.txt", b"x" * (LIMIT + 1)),
        ("picture.png", b"\x89PNG"),
        ("last.txt", b"The last of them is read, too."),
    ]
    job = upload(service, files, collection="files", metadata='{"kind": "report", "year": 2024}').json()
    assert (job["status"], job["collection"]) == ("completed", "files")
    assert job["counts"] == {"total": 8, "done": 8, "completed": 3, "unchanged": 0, "failed": 5, "cancelled": 0}
    assert [document["error"]["code"] for document in job["documents"]] == [
        "invalid_document", "invalid_document", "invalid_document", "too_large", "invalid_document",
    ]  # fmt: skip
    assert str(LIMIT) in job["documents"][3]["error"]["message"]
    page = service.client.get("/v1/documents", params={"collection": "files", "filter": '{"kind": "report"}'}).json()
    shown = {document["id"]: document for document in page["documents"]}
    assert set(shown) == {"notes.md", "one", "last.txt"}
    assert (shown["notes.md"]["title"], shown["notes.md"]["metadata"]["year"]) == ("The tower", 2024)
    again = upload(service, files, collection="files", metadata='{"kind": "report", "year": 2024}').json()
    assert (again["counts"]["unchanged"], again["counts"]["completed"]) == (3, 0)


@pytest.mark.parametrize("name", ["../../etc/cron.d/x.txt", "/etc/passwd.txt", "ü 日.txt", "a;b.txt"])
def test_a_file_name_is_only_an_id(service: Service, name: str) -> None:
    job = upload(service, [(name, b"The tower is tall.")], collection="labels").json()
    assert [document["id"] for document in service.job(job["id"])["documents"]] == [name]
    assert job["status"] == "completed"


@pytest.mark.parametrize("name", ["a\0b.txt", "a\rb.txt", "\x1b[31m.txt", "x" * 600 + ".txt", " .txt", ".txt"])
def test_an_invalid_file_name_does_no_harm(service: Service, name: str) -> None:
    field = b'--x\r\nContent-Disposition: form-data; name="collection"\r\n\r\nlabels\r\n'
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="' + name.encode() + b'"\r\n\r\nText.\r\n'
    good = b'--x\r\nContent-Disposition: form-data; name="files"; filename="good.txt"\r\n\r\nA good text.\r\n--x--\r\n'
    answer = service.client.post("/v1/documents?wait=true", content=field + body + good, headers=FORM)
    assert answer.status_code in (200, 207, 422), answer.text
    if answer.status_code != 422:
        assert service.job(answer.json()["id"])["documents"][1]["status"] in ("completed", "unchanged")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        b"--x\r\n",
        b"--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; name="files"\r\n\r\nno file\r\n--x--\r\n',
        b'--x\r\nContent-Disposition: form-data; filename="a"\r\n\r\nno name\r\n--x--\r\n',
    ],
)
def test_an_invalid_form_is_refused(service: Service, body: bytes) -> None:
    check_problem(service.client.post("/v1/documents", content=body, headers=FORM), 422)
    without = {"content-type": "multipart/form-data"}
    check_problem(service.client.post("/v1/documents", content=body, headers=without), 422)


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": "[]"},
        {"metadata": "{"},
        {"metadata": '{"a": NaN}'},
        {"metadata": '{"a": "\\ud800"}'},
        {"metadata": '{"a": "%s"}' % ("x" * 20_000)},
        {"collection": " "},
        {"collection": "a\nb"},
        {"metadata": "x" * (2**20 + 1)},
        {"sources": '["/a/a.txt", "/b/a.txt"]'},
        {"sources": '["/a\\n/a.txt"]'},
        {"sources": "/a/a.txt"},
    ],
    ids=[
        "list",
        "half",
        "NaN",
        "surrogate",
        "large",
        "blank",
        "two lines",
        "longer than a field",
        "two sources",
        "line",
        "no JSON",
    ],
)
def test_form_fields_are_validated_like_a_json_body(service: Service, fields: dict[str, str]) -> None:
    check_problem(upload(service, [("a.txt", b"The tower.")], **fields), 422)


def test_files_of_the_same_name_from_two_sources_are_two_documents(service: Service) -> None:
    def counts(*files: tuple[str, bytes], sources: list[str] | None = None) -> tuple[int, int]:
        given = {} if sources is None else {"sources": json.dumps(sources)}
        job = upload(service, list(files), collection="years", **given).json()
        return job["counts"]["completed"], job["counts"]["unchanged"]

    def listed() -> dict[str, str | None]:
        found = service.client.get("/v1/documents", params={"collection": "years"}).json()["documents"]
        return {each["id"]: each["source"] for each in found}

    old, new = ("c/r.txt", b"The crane of 2025."), ("c/r.txt", b"The crane of 2026.")
    both = {"c/r.txt": "/2025/c/r.txt", "2026/c/r.txt": "/2026/c/r.txt"}
    assert counts(old, sources=["/2025/c/r.txt"]) == (1, 0)
    assert counts(new, sources=["/2026/c/r.txt"]) == (1, 0)
    assert listed() == both
    assert counts(old, ("r.txt", b"The crane."), sources=["/2025/c/r.txt", "/2026/c/r.txt"]) == (1, 1)
    assert listed() == both, "a source keeps its id, whatever name the file has"
    assert counts(new) == (1, 0)
    assert listed() == both, "a file without a source has the id that it names"


def test_too_many_documents_are_refused_as_a_whole(service: Service) -> None:
    lines = b"".join(b'{"id": "%d", "text": "x"}\n' % n for n in range(1001))
    detail = check_problem(upload(service, [("many.jsonl", lines)], collection="many"), 422)["detail"]
    assert "1000" in detail
    assert service.client.get("/v1/documents?collection=many").json()["documents"] == []


def test_spooled_files_are_always_removed(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder of its own: files of others, such as those that pytest writes output to, come and go.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # The client sends nothing while it looks for the file. A busy machine must not end the request meanwhile.
    monkeypatch.setattr(connections, "BODY_SECONDS", 120.0)
    large = b"Line of a tale.\n" * 70_000  # past a MiB a file goes to disk
    assert len(large) > 2**20
    seen: list[bool] = []

    def slowly() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
        yield large
        seen.append(soon(lambda: spooled(tmp_path)))

    def cut_short() -> Iterator[bytes]:
        yield from slowly()
        raise ConnectionError("the client dies")

    def without_end() -> Iterator[bytes]:
        yield from slowly()
        for _ in range(64):
            yield b"x" * 2**20

    check_problem(upload(service, [("large.txt", large)], collection="spooled"), 413)
    for body in (cut_short, without_end):
        assert soon(lambda: not spooled(tmp_path))  # the file of the request before must not be taken for this one's
        try:
            answer = service.client.post("/v1/documents", content=body(), headers=FORM)
        except (ConnectionError, httpx.TransportError):
            continue  # the service may close before the client has read its answer
        check_problem(answer, 413)
    assert seen == [True, True]
    assert soon(lambda: not spooled(tmp_path))


def test_an_upload_over_the_limit_is_refused_before_its_body(service: Service) -> None:
    size = UPLOAD_DOCUMENTS * LIMIT + 2**20 + 1
    head = f"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}"
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as line:
        line.sendall(f"{head}\r\nContent-Type: {FORM['content-type']}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: line.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert str(size).encode() in answer


def test_files_are_parsed_outside_the_event_loop(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on, threads = threading.Event(), threading.Event(), list[str]()
    read = uploads.read

    def slow(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        reading.set()
        go_on.wait(30)
        return read(*arguments)

    monkeypatch.setattr(uploads, "read", slow)
    done: list[httpx.Response] = []
    # More uploads than may be parsed at a time. The waiting ones delay no other request either.

    def send(number: int) -> None:
        done.append(upload(service, [(f"{number}.txt", b"A tower.")], collection="slow"))

    askers = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for asker in askers:
        asker.start()
    try:
        assert reading.wait(20)
        assert service.client.get("/healthz", timeout=5).status_code == 200
        assert service.client.get("/v1/jobs", timeout=5).status_code == 200
        assert soon(lambda: len(threads) == 2)
        assert len(threads) == 2
    finally:
        go_on.set()
        for asker in askers:
            asker.join()
    assert {response.json()["status"] for response in done} == {"completed"}
    assert "uvicorn" not in threads
