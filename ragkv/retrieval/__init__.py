"""Retrieval: an embedder, a vector index (FAISS) and full-text search (BM25), and the fusion of their results."""

from ragkv.retrieval.contract import PassageRanker, Retrieval, TextEmbedder
from ragkv.retrieval.embedder import Embedder, make_embedder, open_earlier
from ragkv.retrieval.follower import ViewStatus
from ragkv.retrieval.multilingual import MultilingualEmbedder
from ragkv.retrieval.reranker import Reranker, make_reranker
from ragkv.retrieval.retriever import Retriever
from ragkv.retrieval.scope import SearchScope

__all__ = [
    "Embedder",
    "MultilingualEmbedder",
    "PassageRanker",
    "Reranker",
    "Retrieval",
    "Retriever",
    "SearchScope",
    "TextEmbedder",
    "ViewStatus",
    "make_embedder",
    "make_reranker",
    "open_earlier",
]
