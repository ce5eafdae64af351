"""Engines over sample documents, built from real parts, for tests that must not share one."""

from __future__ import annotations

import shutil
from pathlib import Path

from ragkv.catalog import Catalog
from ragkv.cli.samples import samples_folder
from ragkv.config import load_settings
from ragkv.engine.chunk_store import ChunkStore
from ragkv.engine.engine import Engine
from ragkv.engine.opening import OpenedParts
from ragkv.ingest.loader import load
from ragkv.ingest.pipeline import ingest
from ragkv.model.decoder import DecoderModel
from ragkv.retrieval import Embedder, Retriever
from ragkv.store import open_store
from ragkv.store.base import KVStore
from ragkv.store.format.layout import Layout
from ragkv.store.format.seal import CHECKSUMS, Seal
from ragkv.store.tiers import TierBudgets, Tiers
from ragkv.types import Document

SIX = ("01", "02", "04", "05", "11", "14")
QUESTION, ANSWER = "Who did the architect of the Skerrow Light marry?", "Aldous Finch"
"""Two documents, 01 and 02, are needed to answer it."""


def documents(numbers: tuple[str, ...] = SIX) -> list[Document]:
    """Sample documents by number."""
    paths = [path for path in sorted(samples_folder().glob("*.md")) if path.name[:2] in numbers]
    return [document for document in load(paths, 2**20, root=samples_folder()) if isinstance(document, Document)]


def open_engine(data: Path, model: DecoderModel, embedder: Embedder, **settings: object) -> Engine:
    """An engine on a data folder, with a model and an embedder that are loaded already. Unless told otherwise it keeps
    nothing in memory, so that every question meets the store."""
    chosen = load_settings(**{"data": data, "host_bytes": 0, **settings})
    store = open_store(chosen.store, chosen.data, chosen.store_timeout, chosen.store_ttl, chosen.store_bytes)
    catalog = Catalog.open(chosen.data / "catalog.sqlite")
    return Engine(chosen, OpenedParts(model, store, catalog, Retriever(catalog, embedder, chosen.data / "index")))


def open_library(
    data: Path, model: DecoderModel, embedder: Embedder, numbers: tuple[str, ...] = SIX, **settings: object
) -> Engine:
    """The same, with sample documents ingested."""
    engine = open_engine(data, model, embedder, **settings)
    for document in documents(numbers):
        ingest(engine, document)
    return engine


def open_copy(filled: Path, data: Path, model: DecoderModel, embedder: Embedder, **settings: object) -> Engine:
    """An engine on a copy of a data folder: quicker than ingesting its documents again."""
    shutil.copytree(filled, data)
    return open_engine(data, model, embedder, **settings)


def chunk_store_of(
    store: KVStore,
    model: DecoderModel,
    fingerprint: str,
    collection: str,
    body: str = "exact",
    seal: Seal = CHECKSUMS,
    host_bytes: int = 0,
) -> ChunkStore:
    """Return a chunk store over a store, with so many bytes of host memory for the tiers."""
    block = Layout(model.shape, model.profile.block, model.profile.block, model.dtype, body)
    tiers = Tiers(store, block, TierBudgets(host_bytes), model.device)
    return ChunkStore(tiers, model, fingerprint, collection, body, seal)
