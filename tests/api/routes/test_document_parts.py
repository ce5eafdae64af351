"""Listings in any order, and the parts of a document: its text and its chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragkv.api.middleware.keys import make_key
from tests.api.conftest import Service, serving, settings
from tests.api.routes.test_documents import put
from tests.api.test_bad_input import check_problem

SECTIONS = "\n\n".join(
    f"# Part {n}\n\n" + f"The lamp {n} of Tarn is kept by Ada Brook at the quay. " * 12 for n in range(4)
)


def listed(service: Service, **parameters: Any) -> list[str]:
    found = service.client.get("/v1/documents", params={"collection": "parts", **parameters}).json()
    return [each["id"] for each in found["documents"]]


@pytest.fixture(scope="module")
def filled(service: Service) -> Service:
    for name, text, title in (
        ("b.md", SECTIONS, "Lamps"),
        ("a", "A bell.", "Zebra"),
        ("c/text", "A gate of iron.", "Gate"),
    ):
        assert put(service, name, {"text": text, "title": title}, "parts", wait=True).status_code == 200
    return service


def test_documents_are_sorted_and_searched(filled: Service) -> None:
    assert listed(filled, sort="title") == ["c/text", "b.md", "a"]
    assert listed(filled, sort="bytes", order="desc")[0] == "b.md"
    assert listed(filled, sort="created") == ["b.md", "a", "c/text"]
    assert listed(filled, q="LAMPS") == ["b.md"]
    assert listed(filled, q="c/ gate") == ["c/text"]


def test_every_order_is_paged_to_its_end(filled: Service) -> None:
    for sort in ("id", "title", "updated", "chunks"):
        seen, after = [], ""
        while after is not None:
            parameters = {"collection": "parts", "sort": sort, "order": "desc", "limit": 1, "after": after}
            page = filled.client.get("/v1/documents", params=parameters).json()
            seen += [each["id"] for each in page["documents"]]
            after = page["after"]
        assert seen == listed(filled, sort=sort, order="desc", limit=100)


@pytest.mark.parametrize(
    "parameters",
    [
        {"sort": "hash"},
        {"order": "up"},
        {"sort": "title", "after": "a"},
        {"sort": "title", "after": '[1,"a"]'},
        {"sort": "bytes", "after": '["x","a"]'},
        {"sort": "bytes", "after": '[1e999,"a"]'},
        {"sort": "bytes", "after": "[true,1]"},
        {"q": "a\0"},
    ],
)
def test_a_wrong_order_or_place_is_refused(filled: Service, parameters: dict[str, str]) -> None:
    check_problem(filled.client.get("/v1/documents", params=parameters), 422)


def test_the_text_is_returned_whole_or_in_part(filled: Service) -> None:
    whole = filled.client.get("/v1/documents/b.md/text", params={"collection": "parts"}).json()
    assert (whole["text"], whole["start"], whole["end"], whole["version"]) == (SECTIONS, 0, len(SECTIONS), 1)
    part = filled.client.get(
        "/v1/documents/b.md/text?start=2&end=8", params={"collection": "parts", "start": 2, "end": 8}
    )
    assert part.json()["text"] == SECTIONS[2:8]
    beyond = filled.client.get("/v1/documents/b.md/text", params={"collection": "parts", "start": 10**6}).json()
    assert (beyond["text"], beyond["start"], beyond["end"]) == ("", len(SECTIONS), len(SECTIONS))
    check_problem(filled.client.get("/v1/documents/b.md/text?collection=parts&start=9&end=2"), 422)


def test_the_chunks_are_slices_of_the_text_with_headings_in_pages(filled: Service) -> None:
    found: list[Any] = []
    after: int | None = -1
    while after is not None:
        path = f"/v1/documents/b.md/chunks?collection=parts&limit=2&after={after}"
        page = filled.client.get(path).json()
        found += page["chunks"]
        after = page["after"]
    assert [each["chunk"] for each in found] == list(range(len(found)))
    assert [SECTIONS[each["start"] : each["end"]] for each in found] == [each["text"] for each in found]
    assert {each["heading"] for each in found} == {f"Part {n}" for n in range(4)}
    assert {each["page"] for each in found} == {None}
    shown = filled.client.get("/v1/documents/b.md?collection=parts").json()
    assert (shown["chunks"], shown["tokens"]) == (len(found), sum(each["tokens"] for each in found))
    assert shown["stored_bytes"] == shown["kv_bytes"], "an exact body has the size of the KV"


def test_an_id_that_ends_like_a_part_is_sent_with_an_encoded_slash(filled: Service) -> None:
    document = filled.client.get("/v1/documents/c%2Ftext?collection=parts&text=true").json()
    assert (document["id"], document["text"]) == ("c/text", "A gate of iron.")
    part = filled.client.get("/v1/documents/c%2Ftext/text?collection=parts").json()
    assert (part["id"], part["text"]) == ("c/text", "A gate of iron.")
    assert "no document 'c'" in check_problem(filled.client.get("/v1/documents/c/text?collection=parts"), 404)["detail"]


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, str]]]:
    """A service with two tenants and the key of each."""
    pairs = {name: make_key(name) for name in ("red", "blue")}
    chosen = settings(Path(tmp_path_factory.mktemp("tenants")), api_keys=",".join(pair for _, pair in pairs.values()))
    with serving(chosen) as service:
        yield service, {name: key for name, (key, _) in pairs.items()}


def test_a_tenant_sees_no_list_text_or_chunks_of_another(tenants: tuple[Service, dict[str, str]]) -> None:
    service, keys = tenants
    red, blue = ({"X-API-Key": keys[name]} for name in ("red", "blue"))
    body = {"text": "The secret of Tarn.", "title": "Secret"}
    assert service.client.put("/v1/documents/s?wait=true", json=body, headers=red).status_code == 200
    for path in ("/v1/documents/s/text", "/v1/documents/s/chunks"):
        assert service.client.get(path, headers=red).json()["collection"] == "default"
        assert "Secret" not in check_problem(service.client.get(path, headers=blue), 404)["detail"]
        check_problem(service.client.get(f"{path}?collection=red:default", headers=blue), 404)
    for query in ("sort=created", "q=secret", "sort=bytes&order=desc"):
        assert service.client.get(f"/v1/documents?{query}", headers=blue).json()["documents"] == []
        assert len(service.client.get(f"/v1/documents?{query}", headers=red).json()["documents"]) == 1
