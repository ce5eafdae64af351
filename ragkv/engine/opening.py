"""What an engine is made of, opened and checked as the settings say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ragkv.catalog import Catalog
from ragkv.config import Settings, ViewSettings
from ragkv.engine.crossover import KeyTier
from ragkv.engine.open_model import load_model
from ragkv.engine.registry import (
    check_decode_policy,
    check_method,
    check_prefill_policy,
    make_decode_policy,
    make_prefill_policy,
)
from ragkv.errors import ConfigError, EmbedderChanged, InputError
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder
from ragkv.model.execution.pooled_decode import PooledDecoder
from ragkv.model.model_cache import Notify
from ragkv.model.profile import Profile
from ragkv.retrieval import Retriever, make_embedder, make_reranker, open_earlier
from ragkv.sparse.prefill import PrefillPolicy
from ragkv.sparse.psa import Psa
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
        with _naming("RAGKV_METHOD"):
            check_method(settings.method)
    for name in ("prefill", "ingest_prefill"):
        with _naming(f"RAGKV_{name.upper()}"):
            check_prefill_policy(getattr(settings, name))
    with _naming("RAGKV_DECODE"):
        check_decode_policy(settings.decode)


def check_choices(
    settings: Settings, profile: Profile, method: str, key_tier: KeyTier, decode_tier: KeyTier
) -> PrefillPolicy | None:
    """Check the method and the policies that the settings name; return the policy of ingest.

    Raises:
        ConfigError: There is no such method or policy, or the model cannot have it.
    """
    with _naming("RAGKV_METHOD"):
        check_method(method)
    with _naming("RAGKV_PREFILL"):
        make_prefill_policy(settings.prefill, profile, key_tier)
    with _naming("RAGKV_DECODE"):
        make_decode_policy(settings.decode, profile, decode_tier)
    with _naming("RAGKV_INGEST_PREFILL"):
        return make_prefill_policy(settings.ingest_prefill, profile, key_tier)


def make_pooled_decoder(model: DecoderModel, budget: int) -> PooledDecoder:
    """Make what decodes over a pool of so many bytes.

    Raises:
        ConfigError: The model has no use for a pool, or it is too small for a block.
    """
    policy = make_decode_policy("psa", model.profile)
    assert isinstance(policy, Psa)
    try:
        return PooledDecoder(model, policy, budget)
    except ValueError as error:
        raise ConfigError(f"RAGKV_POOL_BYTES: {error}; unset it, or give it more") from None


def check_paging(graph_decoder: GraphDecoder | None, settings: Settings) -> None:
    """Check that blocks can be read in place.

    Raises:
        ConfigError: They cannot.
    """
    if graph_decoder is None:
        raise ConfigError("RAGKV_PAGED needs one GPU, RAGKV_GRAPHS on, and a model made as Llama is; unset it")
    if not settings.gpu_bytes:
        raise ConfigError("RAGKV_PAGED reads blocks in GPU memory; set RAGKV_GPU_BYTES, or unset it")


@contextmanager
def _naming(setting: str) -> Iterator[None]:
    """Name the setting in what is wrong with it."""
    try:
        yield
    except InputError as error:
        raise ConfigError(f"{setting}: {error}") from None
