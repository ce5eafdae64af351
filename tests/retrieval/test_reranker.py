"""A reranker orders what was found: by its own scores, with a model of sentence-transformers from a folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from ragkv.catalog import Catalog
from ragkv.errors import ConfigError, ModelNotFound
from ragkv.retrieval import Reranker, Retriever, SearchScope, make_reranker
from tests.cross_encoder import make_cross_encoder
from tests.ingest.reader import WordEmbedder
from tests.retrieval.test_retriever import put

QUESTION = "Who dredged the harbour?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder with random weights."""
    return make_cross_encoder(tmp_path_factory.mktemp("reranker"))


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    opened = Catalog.open(tmp_path / "catalog.sqlite")
    put(opened, "sea", "the ferry crosses the strait", "the harbour was dredged by Ada")
    put(opened, "land", "the railway climbs the pass", "a tunnel cuts the mountain", "a harbour of stone")
    return opened


class LongestFirst:
    """Prefers long passages: an order that no search gives."""

    source = "longest first"

    def __init__(self) -> None:
        self.asked = list[tuple[str, int]]()

    def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        self.asked.append((question, len(passages)))
        return [float(len(passage)) for passage in passages]


def test_scores_are_those_of_the_cross_encoder(folder: Path) -> None:
    reranker = Reranker(str(folder))
    passages = ["the harbour was dredged by Ada", "a tunnel", "the ferry crosses the strait"]
    found = reranker.scores(QUESTION, passages)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = [model(**tokenizer(QUESTION, each, return_tensors="pt")).logits.item() for each in passages]
    assert sorted(range(3), key=found.__getitem__) == sorted(range(3), key=logits.__getitem__)
    assert len(set(found)) == 3
    assert reranker.scores(QUESTION, []) == []


def test_the_best_candidates_are_ordered_anew(catalog: Catalog, tmp_path: Path) -> None:
    ranker = LongestFirst()
    plain = Retriever(catalog, WordEmbedder(), tmp_path / "index")
    ranked = Retriever(catalog, WordEmbedder(), tmp_path / "index", reranker=ranker)
    usual = plain.search(QUESTION, "default", 2)
    hits = ranked.search(QUESTION, "default", 2)
    assert len(hits) == len(usual) == 2
    lengths = [len(f"{hit.chunk.title}\n{hit.chunk.text}") for hit in hits]
    assert [hit.score for hit in hits] == [float(length) for length in lengths] == sorted(map(float, lengths))[::-1]
    assert [hit.row for hit in hits] != [hit.row for hit in usual]
    assert ranker.asked == [(QUESTION, 5)], "all of the five chunks are among four times two"


def test_a_search_says_which_reranker_it_asked(catalog: Catalog, tmp_path: Path) -> None:
    ranked = Retriever(catalog, WordEmbedder(), tmp_path / "index", reranker=LongestFirst())
    report = ranked.find_passages(QUESTION, SearchScope(), 2).report
    assert report.reranker == "longest first"
    assert report.timings_ms.rerank >= 0
    plain = Retriever(catalog, WordEmbedder(), tmp_path / "index").find_passages(QUESTION, SearchScope(), 2).report
    assert plain.reranker is None


def test_no_setting_is_no_reranker() -> None:
    assert make_reranker("") is None


def test_a_reranker_that_cannot_be_read_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="reranker: there is no folder"):
        Reranker("./nowhere").load()
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"reranker: .* is a pickle"):
        Reranker(str(pickled)).load()
