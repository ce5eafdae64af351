"""Objects of S3, by a server of moto: what is under a prefix is ingested, with the credentials of the user only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto")
pytest.importorskip("s3fs")
import boto3
from moto.server import ThreadedMotoServer

from ragkv.cli import run
from ragkv.errors import ConfigError, InputError
from ragkv.ingest.loader import Rejected
from ragkv.ingest.sources import load_locations
from ragkv.types import Document
from tests.api.conftest import serving, settings
from tests.ingest.formats.packages import pptx, shape
from tests.start_records import with_records

pytestmark = [
    pytest.mark.integrations,
    # The libraries of AWS leave sockets and event loops to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::DeprecationWarning"),
]

LIMIT = 20_000
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A bucket with some objects, and the user's credentials for it."""
    for name in KEYS:
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    client = boto3.client("s3")
    client.create_bucket(Bucket="yard")
    objects = {
        "docs/tarn.md": b"# Tarn\n\nThe harbour of Tarn was built in 1889 by Ada Brook.",
        "docs/deep/slides.pptx": pptx(shape("Bridge", kind="title")),
        "docs/lines.jsonl": b'{"id": "one", "text": "first"}\n{"id": "two", "text": "second"}\n',
        "docs/large.md": b"x" * (LIMIT + 1),
        "docs/picture.png": b"PNG",
        "docs/.hidden.md": b"hidden",
        "docs/": b"",
        "docs2/other.md": b"of another prefix",
        "../../../tmp/up.md": b"a key that looks like a path",
    }
    for key, body in objects.items():
        client.put_object(Bucket="yard", Key=key, Body=body)
    yield client
    for found in client.list_objects_v2(Bucket="yard")["Contents"]:
        client.delete_object(Bucket="yard", Key=found["Key"])
    client.delete_bucket(Bucket="yard")


def load(address: str) -> tuple[dict[str, str], list[str]]:
    """Texts of the documents at an address by id, and why others were refused."""
    items = list(load_locations([address], LIMIT))
    texts = {item.id: item.text for item in items if isinstance(item, Document)}
    return texts, [str(item.error) for item in items if isinstance(item, Rejected)]


def test_what_is_under_a_prefix_is_read(bucket: Any) -> None:
    texts, refused = load("s3://yard/docs")
    assert texts == {
        "s3://yard/docs/deep/slides.pptx": "## Bridge",
        "s3://yard/docs/tarn.md": "# Tarn\n\nThe harbour of Tarn was built in 1889 by Ada Brook.",
        "one": "first",
        "two": "second",
    }
    assert len(refused) == 1
    assert refused[0].startswith("s3://yard/docs/large.md: it has 20001 bytes")


def test_a_single_object_and_a_key_that_looks_like_a_path_are_read(bucket: Any) -> None:
    assert set(load("s3://yard/docs/tarn.md")[0]) == {"s3://yard/docs/tarn.md"}
    assert load("s3://yard/../../../tmp/up.md")[0] == {"s3://yard/../../../tmp/up.md": "a key that looks like a path"}
    assert not Path("/tmp/up.md").exists()


def test_what_is_too_large_is_not_fetched(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was fetched")

    monkeypatch.setattr(s3fs.S3FileSystem, "get_file", refuse)
    _, refused = load("s3://yard/docs/large.md")
    assert "limit" in refused[0]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://", "name a bucket"),
        ("s3://nothing/docs", "no such bucket|nothing there"),
        ("s3://yard/nothing", "no such bucket or object|nothing there"),
    ],
)
def test_what_is_not_there_is_an_error_with_a_reason(bucket: Any, address: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load(address)


def test_without_credentials_nothing_is_read(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    with pytest.raises(InputError, match="no credentials; credentials come from AWS_PROFILE"):
        load("s3://yard/docs")


def test_a_server_that_is_away_is_an_error_with_a_reason(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(InputError, match="cannot be listed"):
        load("s3://yard/docs")


def test_a_missing_package_is_said(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "botocore.exceptions", None)
    with pytest.raises(ConfigError, match=r"pip install 'fsspec.*ragkv\[sources\]"):
        load("s3://yard/docs")


def test_the_program_ingests_an_object_once(bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data", str(with_records(tmp_path / "data"))]
    address, again = "s3://yard/docs/tarn.md", "The harbour of Tarn was closed in 1950."
    assert run(["ingest", address, "s3://yard/docs/lines.jsonl", *data]) == 0
    assert capsys.readouterr().out.count("added") == 3
    assert run(["ingest", "s3://yard/docs/lines.jsonl", *data]) == 0
    assert capsys.readouterr().out.startswith("unchanged  one")
    bucket.put_object(Bucket="yard", Key="docs/tarn.md", Body=again.encode())
    assert run(["ingest", address, *data]) == 0
    assert capsys.readouterr().out.startswith(f"replaced   {address}")
    assert run(["rm", address, *data]) == 0


def test_the_program_sends_a_prefix_to_a_service(
    bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(settings(tmp_path / "service")) as service:
        assert run(["ingest", "--url", service.url, "s3://yard/docs"]) == 0
        assert "completed  s3://yard/docs/tarn.md" in capsys.readouterr().out
        listed = service.client.get("/v1/documents").json()["documents"]
        assert "s3://yard/docs/tarn.md" in [each["id"] for each in listed]
        assert run(["rm", "--url", service.url, "s3://yard/docs/tarn.md"]) == 0


def test_the_service_fetches_no_address(bucket: Any, tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as service:
        body = {"id": "s3://yard/docs/tarn.md", "text": "s3://yard/docs/tarn.md"}
        assert service.post("/v1/documents?wait=true", body).status_code == 200
        files = {"files": ("s3://yard/docs/tarn.md", b"what was sent")}
        service.client.post("/v1/documents?wait=true&collection=sent", files=files)
        for collection, text in (("default", body["text"]), ("sent", "what was sent")):
            shown = service.client.get("/v1/documents", params={"collection": collection}).json()["documents"]
            assert len(shown) == 1
            got = service.client.get(f"/v1/documents/{httpx_quoted(shown[0]['id'])}?collection={collection}&text=true")
            assert json.loads(got.text)["text"] == text


def httpx_quoted(id: str) -> str:
    return id.replace("/", "%2F").replace(":", "%3A")
