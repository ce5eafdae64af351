"""`GET /v1/documents/{id}/pages/{number}` on a real service: an uploaded PDF's page, with a passage marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from ragkv.api.middleware.keys import make_key
from ragkv.client import Client, Refused
from ragkv.ingest.page_pictures import draw_page
from tests.api.conftest import Service, serving, settings
from tests.api.routes.test_document_parts import tenants as tenants
from tests.api.routes.test_documents import put
from tests.api.routes.test_uploads import upload
from tests.api.test_bad_input import check_problem
from tests.ingest.formats.files import pdf
from tests.ingest.formats.test_page_picture import decoded

FILE = pdf("The quay of Lund was paved by Sten Berg.", "The gate of Lund was\ncast by Ola Krus in 1931.")
LARGE = pdf("The lamp of Lund.", info={"Padding": "x" * 300_000})
PATH = "/v1/documents/lund.pdf"
IN = {"collection": "sheets"}


@pytest.fixture(scope="module")
def filled(service: Service) -> Service:
    assert upload(service, [("lund.pdf", FILE)], collection="sheets").json()["status"] == "completed"
    assert put(service, "typed", {"text": "The gate of Lund."}, "sheets", wait=True).status_code == 200
    return service


def test_a_passage_of_the_text_is_marked_on_its_page(filled: Service) -> None:
    text = filled.client.get(f"{PATH}/text", params=IN).json()["text"]
    start = text.index("cast by Ola Krus")
    passage: dict[str, Any] = {**IN, "start": start, "end": start + len("cast by Ola Krus")}
    marked = filled.client.get(f"{PATH}/pages/2", params=passage)
    assert (marked.status_code, marked.headers["content-type"]) == (200, "image/png")
    assert (marked.headers["x-ragkv-marked"], marked.headers["x-ragkv-pages"]) == ("true", "2")
    assert marked.headers["cache-control"] == "no-store"
    width, height, _ = decoded(marked.content)
    left, top, right, bottom = map(int, marked.headers["x-ragkv-mark"].split(","))
    assert 0 < left < right < width
    assert 0 < top < bottom < height
    bare = filled.client.get(f"{PATH}/pages/2", params=IN)
    other = filled.client.get(f"{PATH}/pages/1", params=passage)
    assert (bare.headers["x-ragkv-marked"], other.headers["x-ragkv-marked"]) == ("false", "false")
    assert "x-ragkv-mark" not in {*bare.headers, *other.headers}
    assert len({marked.content, bare.content, other.content}) == 3


def test_every_chunk_is_marked_on_the_page_that_it_names(filled: Service) -> None:
    chunks = filled.client.get(f"{PATH}/chunks", params=IN).json()["chunks"]
    assert chunks
    for chunk in chunks:
        asked: dict[str, Any] = {**IN, "start": chunk["start"], "end": chunk["end"]}
        assert filled.client.get(f"{PATH}/pages/{chunk['page']}", params=asked).headers["x-ragkv-marked"] == "true"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (f"{PATH}/pages/3", "no page 3"),
        (f"{PATH}/pages/0", "no page 0"),
        ("/v1/documents/typed/pages/1", "has no pages to show"),
        ("/v1/documents/none/pages/1", "collection 'sheets' has no document 'none'"),
    ],
)
def test_what_has_no_such_page_is_not_found(filled: Service, path: str, told: str) -> None:
    assert told in check_problem(filled.client.get(path, params=IN), 404)["detail"]


@pytest.mark.parametrize("parameters", [{"start": 5, "end": 2}, {"start": -1}, {"page": 3}])
def test_parameters_are_checked_as_those_of_the_text(filled: Service, parameters: dict[str, Any]) -> None:
    check_problem(filled.client.get(f"{PATH}/pages/1", params={**IN, **parameters}), 422)


def test_the_size_of_the_file_is_told(filled: Service) -> None:
    assert filled.client.get(PATH, params=IN).json()["file_bytes"] == len(FILE)
    listed = filled.client.get("/v1/documents", params=IN).json()["documents"]
    assert {each["id"]: each["file_bytes"] for each in listed} == {"lund.pdf": len(FILE), "typed": 0}


def test_kept_files_count_against_what_a_tenant_and_a_collection_may_hold(tmp_path: Path) -> None:
    (red, red_pair), (blue, blue_pair) = make_key("red", {"stored": len(LARGE)}), make_key("blue")
    bounds = {"max_document_bytes": 2**20, "collection_bytes": len(LARGE) * 3 // 2}
    with serving(settings(tmp_path, api_keys=f"{red_pair},{blue_pair}", **bounds)) as service:

        def send(name: str, key: str) -> httpx.Response:
            files, headers = [("files", (name, LARGE))], {"X-API-Key": key}
            return service.client.post("/v1/documents?wait=true", files=files, headers=headers)

        assert [send("a.pdf", key).json()["status"] for key in (red, blue)] == ["completed"] * 2
        (shown,) = service.client.get("/v1/collections", headers={"X-API-Key": red}).json()["collections"]
        assert shown["file_bytes"] == len(LARGE) > shown["kv_bytes"] > 0
        tenant, collection = (check_problem(send("b.pdf", key), 413) for key in (red, blue))
        assert tenant["code"] == collection["code"] == "quota_exceeded"
        assert f"{shown['kv_bytes'] + len(LARGE)} bytes of KV and files" in tenant["detail"]
        assert "remove some first" in tenant["detail"]
        assert f"with its file of {len(LARGE)}, and the limit" in collection["detail"]
        assert "remove documents or raise the limit" in collection["detail"]


def test_pages_go_with_the_document(filled: Service) -> None:
    there = {"collection": "short"}
    upload(filled, [("a.pdf", FILE), ("b.pdf", FILE)], collection="short")
    assert filled.client.get("/v1/documents/a.pdf/pages/1", params=there).status_code == 200
    upload(filled, [("a.pdf", pdf("Only one page."))], collection="short")
    check_problem(filled.client.get("/v1/documents/a.pdf/pages/2", params=there), 404)
    assert put(filled, "a.pdf", {"text": "Typed in."}, "short", wait=True).status_code == 200
    check_problem(filled.client.get("/v1/documents/a.pdf/pages/1", params=there), 404)
    filled.client.delete("/v1/documents/b.pdf", params=there)
    check_problem(filled.client.get("/v1/documents/b.pdf/pages/1", params=there), 404)


def test_a_document_that_goes_while_its_page_is_drawn_is_not_shown(
    filled: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(filled, [("a.pdf", FILE)], collection="gone")

    def drawn(*arguments: Any) -> Any:
        picture = draw_page(*arguments)
        filled.engine_thread.catalog_service.remove("gone", "a.pdf")
        return picture

    monkeypatch.setattr("ragkv.api.runtime.catalog_service.draw_page", drawn)
    check_problem(filled.client.get("/v1/documents/a.pdf/pages/1", params={"collection": "gone"}), 404)


def test_an_id_that_ends_like_a_page_is_sent_with_an_encoded_slash(filled: Service) -> None:
    with Client(filled.url) as client:
        assert client.put("book/pages/7", "The seventh page.", collection="sheets").id == "book/pages/7"
        shown = filled.client.get("/v1/documents/book/pages%2F7", params={**IN, "text": "true"}).json()
        assert (shown["id"], shown["text"]) == ("book/pages/7", "The seventh page.")
        assert client.document("book/pages/7", "sheets").id == "book/pages/7"
        told = check_problem(filled.client.get("/v1/documents/book/pages/7", params=IN), 404)["detail"]
        assert "no document 'book'" in told
        assert filled.client.delete("/v1/documents/book/pages/7", params=IN).status_code == 405
        told = check_problem(filled.client.get("/v1/documents/book/pages/first", params=IN), 404)["detail"]
        assert "no document 'book/pages/first'" in told
        assert filled.client.get("/v1/documents/book/pages%2F7/text", params=IN).json()["text"] == shown["text"]
        for id in ("book/pages/7", "shelf/book/7"):
            assert client.put(id, "The seventh page.", collection="sheets").id == id
            client.remove(id, "sheets")


def test_the_client_returns_a_picture(filled: Service) -> None:
    with Client(filled.url) as client:
        text = client.text("lund.pdf", "sheets").text
        picture = client.picture("lund.pdf", 1, "sheets", start=0, end=text.index("was"))
        assert (picture.marked, picture.pages) == (True, 2)
        assert picture.mark is not None
        assert picture.mark[1] < picture.mark[3]
        decoded(picture.png)
        bare = client.picture("lund.pdf", 1, "sheets")
        assert (bare.marked, bare.mark) == (False, None)
        assert client.document("lund.pdf", "sheets").file_bytes == len(FILE)
        with pytest.raises(Refused, match="no page 9"):
            client.picture("lund.pdf", 9, "sheets")


def test_a_file_that_the_client_uploads_is_kept(filled: Service, tmp_path: Path) -> None:
    (tmp_path / "plan.pdf").write_bytes(FILE)
    with Client(filled.url) as client:
        client.wait(client.upload([tmp_path / "plan.pdf"], collection="folder"))
        assert client.picture("plan.pdf", 1, "folder").pages == 2


def test_a_tenant_sees_no_page_of_another(tenants: tuple[Service, dict[str, str]]) -> None:
    service, keys = tenants
    red, blue = ({"X-API-Key": keys[name]} for name in ("red", "blue"))
    sent = service.client.post("/v1/documents?wait=true", files=[("files", ("p.pdf", FILE))], headers=red)
    assert sent.json()["status"] == "completed", sent.text
    path = "/v1/documents/p.pdf/pages/1"
    assert service.client.get(path, headers=red).status_code == 200
    assert "no document 'p.pdf'" in check_problem(service.client.get(path, headers=blue), 404)["detail"]
    check_problem(service.client.get(f"{path}?collection=red:default", headers=blue), 404)
    check_problem(service.client.get(path), 401)
