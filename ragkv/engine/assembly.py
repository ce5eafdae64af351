"""How the parts of an engine are joined: what runs the model, where KV lies, what it is called, and who keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.admin.quota import Quota
from ragkv.config import Settings
from ragkv.engine.chunk_encoder import ChunkEncoder
from ragkv.engine.chunk_flights import ChunkFlights
from ragkv.engine.crossover import KeyTier, key_tier
from ragkv.engine.evidence import EvidenceFinder
from ragkv.engine.fingerprint import fingerprint, keep_stored_block
from ragkv.engine.opening import OpenedParts, naming
from ragkv.engine.policies import make_decode_policy, make_prefill_policy
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefix_cache import PrefixCache
from ragkv.engine.registry import DEFAULT, check_method
from ragkv.engine.session_manager import SessionManager
from ragkv.errors import ConfigError
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.block_tables import BlockPoolMemory
from ragkv.model.execution.graph_decode import GraphDecoder, make_graph_decoder
from ragkv.model.execution.pooled_decode import PooledDecoder
from ragkv.sparse.prefill import PrefillPolicy
from ragkv.sparse.psa import Psa
from ragkv.store.base import KVStore
from ragkv.store.format.layout import Layout
from ragkv.store.format.seal import make_seal
from ragkv.store.tiers import TierBudgets, Tiers


@dataclass(frozen=True)
class Assembly:
    """What an engine has beside what it was opened with.

    Attributes:
        method: Name of the default method.
        decode_tier: Where keys lie that decoding reads.
        fingerprint: Of everything that makes stored KV valid.
        tiers: The KV store with what is kept of it in memory.
        graph_decoder: Decodes densely by recorded graphs; None uses the model's forward.
        pooled_decoder: Decodes under PSA over a pool of KV blocks; None without a pool.
        prefiller: Prefills contexts and encodes chunks.
        chunks: The KV of all chunks.
        sessions: Conversations.
        quota: How much KV a collection may hold.
    """

    method: str
    decode_tier: KeyTier
    fingerprint: str
    tiers: Tiers
    graph_decoder: GraphDecoder | None
    pooled_decoder: PooledDecoder | None
    prefiller: Prefiller
    chunks: ChunkEncoder
    sessions: SessionManager
    quota: Quota


def assemble(settings: Settings, parts: OpenedParts) -> Assembly:
    """Join opened parts as the settings say.

    Raises:
        ConfigError: There is no such method or policy, or the model or the machine cannot have what a setting names.
    """
    model, catalog = parts.model, parts.catalog
    method = settings.method or model.profile.method or DEFAULT
    decode_tier = key_tier(model.device, settings.pool_bytes > 0)  # contexts move when they are decoded
    ingest_policy = _check_choices(settings, model, method, decode_tier)
    pooled_decoder = _make_pooled_decoder(model, settings.pool_bytes) if settings.pool_bytes else None
    seal = make_seal(settings.store_secret.get_secret_value())
    stored_as = (settings.prefix, settings.store_body, seal.name, ingest_policy)
    keep_stored_block(model, catalog.fingerprint(), *stored_as)
    own = fingerprint(model, *stored_as)
    tiers = _make_tiers(settings, model, parts.store)
    graph_decoder = _make_graph_decoder(settings, model, tiers)
    prefiller = Prefiller(model, model.prompt.prefix, settings.prefix, ingest_policy, graph_decoder)
    flights = ChunkFlights(parts.store)
    chunks = ChunkEncoder(prefiller, tiers, catalog, own, settings.store_body, seal, flights)
    limit = settings.conversation_bytes
    prefixes = PrefixCache(prefiller.prefix, limit)
    evidence = EvidenceFinder(parts.retriever, model.prompt, model.profile.block).find
    sessions = SessionManager(prefiller, catalog, chunks.open_all, own, limit, prefixes, evidence)
    return Assembly(
        method=method,
        decode_tier=decode_tier,
        fingerprint=own,
        tiers=tiers,
        graph_decoder=graph_decoder,
        pooled_decoder=pooled_decoder,
        prefiller=prefiller,
        chunks=chunks,
        sessions=sessions,
        quota=Quota(settings.collection_bytes, model.token_bytes),
    )


def _check_choices(settings: Settings, model: DecoderModel, method: str, decode_tier: KeyTier) -> PrefillPolicy | None:
    """Check the method and the policies that the settings name; return the policy of ingest."""
    with naming("RAGKV_METHOD"):
        check_method(method)
    with naming("RAGKV_PREFILL"):
        make_prefill_policy(settings.prefill, model.profile)
    with naming("RAGKV_DECODE"):
        make_decode_policy(settings.decode, model.profile, decode_tier)
    with naming("RAGKV_INGEST_PREFILL"):
        return make_prefill_policy(settings.ingest_prefill, model.profile)


def _make_pooled_decoder(model: DecoderModel, budget: int) -> PooledDecoder:
    """Make what decodes over a pool of so many bytes."""
    policy = make_decode_policy("psa", model.profile)
    assert isinstance(policy, Psa)
    try:
        return PooledDecoder(model, policy, budget)
    except ValueError as error:
        raise ConfigError(f"RAGKV_POOL_BYTES: {error}; unset it, or give it more") from None


def _make_tiers(settings: Settings, model: DecoderModel, store: KVStore) -> Tiers:
    """Put pools in memory in front of the store."""
    block = model.profile.block
    layout = Layout(model.shape, block, block, model.dtype, settings.store_body)
    return Tiers(store, layout, TierBudgets(settings.host_bytes, settings.gpu_bytes), model.device)


def _make_graph_decoder(settings: Settings, model: DecoderModel, tiers: Tiers) -> GraphDecoder | None:
    """Make what decodes by recorded graphs, over blocks in place where the settings say so; None where it cannot."""
    memory = BlockPoolMemory(tiers.resident, tiers.resident_format) if settings.paged else None
    decoder = make_graph_decoder(model, memory) if settings.graphs else None
    if settings.paged and decoder is None:
        raise ConfigError("RAGKV_GRAPHS=paged needs one GPU and a model made as Llama is; unset it")
    if settings.paged and not settings.gpu_bytes:
        raise ConfigError("RAGKV_GRAPHS=paged reads blocks in GPU memory; set RAGKV_GPU_BYTES, or unset it")
    return decoder
