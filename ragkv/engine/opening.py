"""What of an engine holds files, sockets or weights, opened as the settings say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ragkv.catalog import Catalog
from ragkv.config import Settings, ViewSettings
from ragkv.engine.open_model import load_model
from ragkv.engine.policies import check_decode_policy, check_prefill_policy
from ragkv.engine.registry import check_method
from ragkv.errors import ConfigError, EmbedderChanged, InputError
from ragkv.model.decoder import DecoderModel
from ragkv.model.model_cache import Notify
from ragkv.retrieval import Retriever, make_embedder, make_reranker, open_earlier
from ragkv.store import open_store
from ragkv.store.base import KVStore


@dataclass(frozen=True)
class OpenedParts:
    """The parts of an engine that hold files, sockets or weights."""

    model: DecoderModel
    store: KVStore
    catalog: Catalog
    retriever: Retriever


def open_parts(settings: Settings, notify: Notify, reranks: bool) -> OpenedParts:
    """Open the parts that the settings name. See `Engine.open` for what is raised.

    Args:
        settings: What to open.
        notify: Receives lines that a user should see.
        reranks: Whether the reranker is loaded.
    """
    check_names(settings)
    store = open_store(settings.store, settings.data, settings.store_timeout, settings.store_ttl, settings.store_bytes)
    model = load_model(settings, notify)
    catalog = Catalog.open(settings.catalog_address, store.give_way)
    # Beside a model on a GPU, where a question is embedded in a fraction of the time.
    embedder = make_embedder(settings.embedder, str(model.device))
    embedder.load()
    try:
        catalog.check_embedder(embedder.identity)
    except EmbedderChanged as error:
        how = "the earlier embedder, or by words alone where it is missing"
        notify(f"{error.message}; searches use {how}, until `ragkv serve` or `ragkv reindex` embedded all again")
    reranker = make_reranker(settings.reranker)
    if reranker is not None and reranks:
        reranker.load()
    parameters = Retriever.parameters_of(settings.part(ViewSettings), catalog)
    retriever = Retriever(catalog, embedder, settings.data / "index", parameters, reranker, open_earlier)
    return OpenedParts(model, store, catalog, retriever)


def check_names(settings: Settings) -> None:
    """Check what can be checked of the settings without a model, which takes seconds to be loaded.

    Raises:
        ConfigError: There is no such method or policy.
    """
    if settings.method:
        with naming("RAGKV_METHOD"):
            check_method(settings.method)
    for name in ("prefill", "ingest_prefill"):
        with naming(f"RAGKV_{name.upper()}"):
            check_prefill_policy(getattr(settings, name))
    with naming("RAGKV_DECODE"):
        check_decode_policy(settings.decode)


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Name the setting in what is wrong with it."""
    try:
        yield
    except InputError as error:
        raise ConfigError(f"{setting}: {error}") from None
