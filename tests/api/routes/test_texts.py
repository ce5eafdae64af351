"""`/v1/embeddings` and `/v1/rerank`: the embedder and the reranker of searches, for texts of the request."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from ragkv.api.middleware.keys import make_key
from ragkv.client import AsyncClient, Client, Refused
from ragkv.retrieval import Embedder, Reranker
from tests.api.conftest import Service, serving, settings
from tests.api.test_bad_input import check_problem
from tests.cross_encoder import make_cross_encoder

NAME = "all-MiniLM-L6-v2"
ROUNDING = 5e-3
"""Vectors of a text read alone and among others differ by so much, where the embedder computes in bfloat16."""
TEXTS = ["The harbour of Tarn was built in 1889.", "A bridge is green.", "Wer hat den Hafen gebaut?"]
QUERY = "Who built the harbour?"


@pytest.fixture(scope="module")
def reranker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cross_encoder(tmp_path_factory.mktemp("cross") / "cross-encoder")


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory, reranker_folder: Path) -> Iterator[tuple[Service, str]]:
    """A service with a reranker and a tenant of 60 tokens a minute, and the tenant's key."""
    key, pair = make_key("red", {"tokens": 60})
    free, other = make_key("blue")
    chosen = settings(
        tmp_path_factory.mktemp("ranking"), reranker=str(reranker_folder), api_keys=f"{pair}, {other}", deadline=30.0
    )
    with serving(chosen) as service:
        service.client.headers["X-API-Key"] = free
        yield service, key


def embed(service: Service, **body: Any) -> Any:
    return service.post("/v1/embeddings", {"model": NAME, "input": TEXTS, **body})


def test_openais_client_gets_the_vectors_of_the_embedder(service: Service, embedder: Embedder) -> None:
    expected = embedder.encode(TEXTS)
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        as_base64 = client.embeddings.create(model=NAME, input=TEXTS)  # the client asks for base64 and decodes it
        as_floats = client.embeddings.create(model=NAME, input=TEXTS, encoding_format="float", dimensions=384)
        one = client.embeddings.create(model=NAME, input=TEXTS[1])
    for made in (as_base64, as_floats):
        np.testing.assert_allclose([each.embedding for each in made.data], expected, atol=ROUNDING)
        assert [each.index for each in made.data] == [0, 1, 2]
        assert (made.object, made.model) == ("list", NAME)
        assert made.usage.prompt_tokens == made.usage.total_tokens == embedder.count_tokens(TEXTS) > 20
    np.testing.assert_allclose(one.data[0].embedding, expected[1], atol=ROUNDING)


def test_base64_holds_32_bit_floats(service: Service, embedder: Embedder) -> None:
    data = embed(service, encoding_format="base64").json()["data"]
    found = np.frombuffer(base64.b64decode(data[2]["embedding"]), "<f4")
    np.testing.assert_allclose(found, embedder.encode(TEXTS)[2], atol=ROUNDING)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "text-embedding-3-small"}, 404, NAME),
        ({"input": [[1, 2, 3]]}, 400, "check_embedding_ctx_length=False"),
        ({"input": [1, 2, 3]}, 400, "not token ids"),
        ({"input": []}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input"),
        ({"input": None}, 400, "input"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({"dimensions": 256}, 400, "384"),
        ({"encoding_format": "hex"}, 400, "encoding_format"),
    ],
)
def test_what_cannot_be_embedded_is_an_openai_error(
    service: Service, body: dict[str, Any], status: int, says: str
) -> None:
    refused = embed(service, **body)
    assert refused.status_code == status, refused.text
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert says in f"{error['message']} {error['param']}"


def test_many_texts_are_embedded_in_their_order(service: Service) -> None:
    texts = [f"lamp number {number}" for number in range(21)]
    data = embed(service, input=texts).json()["data"]
    again = embed(service, input=texts[20]).json()["data"]
    assert len(data) == 21
    np.testing.assert_allclose(data[20]["embedding"], again[0]["embedding"], atol=ROUNDING)


def test_texts_are_ordered_by_the_reranker(ranking: tuple[Service, str], reranker_folder: Path) -> None:
    service, _ = ranking
    scores = Reranker(str(reranker_folder)).scores(QUERY, TEXTS)
    best = sorted(range(3), key=lambda index: -scores[index])
    found = service.post("/v1/rerank", {"query": QUERY, "documents": TEXTS}).json()
    assert [each["index"] for each in found["results"]] == best
    assert [each["relevance_score"] for each in found["results"]] == pytest.approx([scores[i] for i in best], abs=1e-5)
    assert all(set(each) == {"index", "relevance_score"} for each in found["results"])
    assert found["model"] == "cross-encoder"
    assert found["usage"]["total_tokens"] > 30
    objects = [{"text": text} for text in TEXTS]
    body = {"model": "cross-encoder", "query": QUERY, "documents": objects, "top_n": 2, "return_documents": True}
    two = service.post("/v1/rerank", body).json()["results"]
    assert [each["document"]["text"] for each in two] == [TEXTS[index] for index in best[:2]]


def test_another_reranker_and_bad_bodies_are_refused(ranking: tuple[Service, str]) -> None:
    service, _ = ranking
    body = {"query": QUERY, "documents": TEXTS}
    problem = check_problem(service.post("/v1/rerank", {**body, "model": "rerank-v3"}), 404)
    assert "cross-encoder" in problem["detail"]
    for wrong in ({"documents": []}, {"query": ""}, {"top_n": 0}, {"documents": [{"title": "x"}]}):
        check_problem(service.post("/v1/rerank", {**body, **wrong}), 422)


def test_a_service_without_a_reranker_names_the_setting(service: Service) -> None:
    problem = check_problem(service.post("/v1/rerank", {"query": QUERY, "documents": TEXTS}), 409)
    assert problem["code"] == "no_reranker"
    assert "RAGKV_RERANKER" in problem["detail"]


def test_tokens_count_against_the_limit_of_the_tenant_and_in_the_metrics(ranking: tuple[Service, str]) -> None:
    service, key = ranking
    red = {"X-API-Key": key}
    before = service.engine_thread.text_service.tokens.total()
    used = 0
    while (response := service.post("/v1/embeddings", {"model": NAME, "input": TEXTS}, headers=red)).is_success:
        used += response.json()["usage"]["total_tokens"]
        assert used < 500
    assert used >= 60
    assert response.json()["error"]["type"] == "rate_limit_error"
    refused = service.post("/v1/rerank", {"query": QUERY, "documents": TEXTS}, headers=red)
    assert check_problem(refused, 429)["code"] == "rate_limited"
    assert service.engine_thread.text_service.tokens.total() == before + used
    embedded = service.engine_thread.text_service.tokens["embeddings"]
    metrics = service.client.get("/metrics").text
    assert f'ragkv_text_tokens_total{{work="embeddings"}} {embedded}' in metrics
    assert service.client.get("/v1/models", headers={"X-API-Key": "wrong"}).status_code == 401
    assert service.post("/v1/embeddings", {}, headers={"X-API-Key": "wrong"}).json()["error"]["code"] == (
        "invalid_api_key"
    )


def test_a_request_that_takes_too_long_is_given_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.engine_thread.text_service, "_seconds", 0.0)
    late = embed(service)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")


def test_requests_beyond_the_queue_are_refused(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.engine_thread.text_service, "_capacity", 0)
    refused = embed(service)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "busy")
    assert int(refused.headers["retry-after"]) >= 1


def test_the_client_embeds_and_ranks(ranking: tuple[Service, str], embedder: Embedder) -> None:
    service, _ = ranking
    key = service.client.headers["X-API-Key"]
    with Client(service.url, key) as client:
        made = client.embed(TEXTS, NAME)
        np.testing.assert_allclose([each.embedding for each in made.data], embedder.encode(TEXTS), atol=ROUNDING)
        ranked = client.rerank(QUERY, TEXTS, top_n=1)
        assert len(ranked.results) == 1
        with pytest.raises(Refused) as refused:
            client.embed(TEXTS, "other")
        assert refused.value.status == 404

    async def exchange() -> None:
        async with AsyncClient(service.url, key) as other:
            assert (await other.embed(TEXTS, NAME, "query")).usage == made.usage
            assert (await other.rerank(QUERY, TEXTS, 1)).results == ranked.results

    asyncio.run(exchange())
