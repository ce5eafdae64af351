"""Retrieval: an embedder, a vector index (FAISS) and full-text search (BM25), and the fusion of their results."""

from ragkv.retrieval.embedder import Embedder
from ragkv.retrieval.retriever import Retrieval, Retriever, SearchScope, TextEmbedder

__all__ = ["Embedder", "Retrieval", "Retriever", "SearchScope", "TextEmbedder"]
