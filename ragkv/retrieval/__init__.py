"""Retrieval: an embedder, FAISS and BM25 as views of the catalogue, and their fusion."""

from ragkv.retrieval.embedder import Embedder
from ragkv.retrieval.retriever import Retrieval, Retriever, TextEmbedder

__all__ = ["Embedder", "Retrieval", "Retriever", "TextEmbedder"]
