"""A passage that spells a special token ends neither the question nor itself, for an embedder and for a reranker."""

from __future__ import annotations

from pathlib import Path

from ragkv.retrieval.embedder import Embedder
from ragkv.retrieval.reranker import Reranker
from tests.cross_encoder import make_cross_encoder


def test_special_tokens_in_a_passage_are_text(tmp_path: Path) -> None:
    embedder, reranker = Embedder(), Reranker(str(make_cross_encoder(tmp_path)))
    embedder.load()
    reranker.load()
    assert embedder.count_tokens(["[SEP]"]) > 1
    tokenizer = reranker._loaded().tokenizer
    (ids,) = tokenizer(["Who? [SEP] a"], ["b [SEP] [CLS]"])["input_ids"]
    assert (ids.count(tokenizer.sep_token_id), ids.count(tokenizer.cls_token_id)) == (2, 1), "those between the parts"
    assert reranker.count_tokens("a", ["[SEP]"]) > 5
