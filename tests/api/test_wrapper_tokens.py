"""Wrapper tokens on a running service: each collection has its own, and answers as if it ran alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ragkv.model.checkpoint import load_checkpoint
from ragkv.model.wrapper import Wrapper, save_wrapper
from tests.program import served
from tests.tune.tiny_folder import passages, tiny_folder

QUESTION = "Who built the harbour of Tarn?"
COLLECTIONS = ("laws", "manuals")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and two wrappers that change its answers."""
    root = tmp_path_factory.mktemp("wrapped")
    model = tiny_folder(root / "model")
    found = load_checkpoint(str(model), "cpu", "float32", None)
    for seed, name in enumerate(("first", "second")):
        rows = 3 * torch.randn(6, found.weights.config.hidden_size, generator=torch.Generator().manual_seed(seed))
        save_wrapper(Wrapper(rows[:4].clone(), rows[4:].clone(), "", found.weights_hash), root / name)
    return root


def settings(folder: Path, data: str, adapter: str) -> dict[str, str]:
    return {
        "RAGKV_MODEL": str(folder / "model"),
        "RAGKV_DATA": str(folder / data),
        "RAGKV_ADAPTER": adapter,
        "RAGKV_DTYPE": "float32",
        "RAGKV_DEVICE": "cpu",
    }


def put_documents(client: httpx.Client, collection: str) -> None:
    documents = [
        {"id": each.title, "title": each.title, "text": each.text, "collection": collection} for each in passages(6)
    ]
    client.post("/v1/documents", params={"wait": True}, json={"documents": documents}).raise_for_status()


def ask(client: httpx.Client, collection: str, method: str = "reuse") -> dict[str, Any]:
    body = {"question": QUESTION, "collection": collection, "method": method, "max_tokens": 12, "speculation": False}
    answer: dict[str, Any] = client.post("/v1/answers", json=body).raise_for_status().json()
    return answer


def check_map(client: httpx.Client) -> None:
    """Each chunk of the newest answer's map has as many texts as states of blocks."""
    newest = client.get("/v1/answers", params={"limit": 1}).raise_for_status().json()["answers"][0]["id"]
    for chunk in client.get(f"/v1/answers/{newest}/map").raise_for_status().json()["chunks"]:
        assert {len(layer) for layer in chunk["states"]} == {len(chunk["texts"])}


def alone(folder: Path, collection: str, wrapper: str) -> dict[str, Any]:
    with served(folder, **settings(folder, f"alone-{wrapper}", f"{collection}={wrapper}")) as (_, client):
        put_documents(client, collection)
        return ask(client, collection)


def test_two_collections_with_two_wrappers_answer_as_if_each_ran_alone(folder: Path) -> None:
    expected = {"laws": alone(folder, "laws", "first"), "manuals": alone(folder, "manuals", "second")}
    assert expected["laws"]["answer"] != expected["manuals"]["answer"], "the wrappers matter"
    with served(folder, **settings(folder, "both", "laws=first,manuals=second")) as (_, client):
        for collection in COLLECTIONS:
            put_documents(client, collection)
        for collection in COLLECTIONS:
            found = ask(client, collection)
            assert found["answer"] == expected[collection]["answer"]
            assert found["report"]["cache"]["misses"] == 0
        check_map(client)
        whole = [ask(client, collection, "full")["answer"] for collection in COLLECTIONS]
        check_map(client)
        assert whole[0] == whole[1], "a prefill in full has no wrapper tokens"
    with served(folder, **settings(folder, "both", "laws=second,manuals=first")) as (_, client):
        swapped = ask(client, "laws")
        assert swapped["report"]["cache"]["misses"] > 0, "KV of one wrapper is no hit for another"
        assert swapped["answer"] == expected["manuals"]["answer"]
    with served(folder, **settings(folder, "both", "")) as (_, client):
        plain = ask(client, "laws")
        assert plain["report"]["cache"]["misses"] > 0
        assert plain["answer"] not in (expected["laws"]["answer"], expected["manuals"]["answer"])
