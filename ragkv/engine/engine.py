"""The engine: encode a chunk once, answer questions from stored KV. It owns the model; one thread at a time uses it.

encode_and_store_all   the KV of chunks into the store
prefill_passes         retrieve → open → plan → load → repair → prefill, up to the logits of the first answer token
finalize               the report; the turn of a conversation is kept
answer                 both, with decoding between them, for one question; loop.py answers several together
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import asdict
from math import inf
from types import TracebackType
from typing import Any

import torch

from ragkv.admin.quota import Quota
from ragkv.catalog import Catalog
from ragkv.config import Settings
from ragkv.engine.answer_alone import answer_alone
from ragkv.engine.chunk_encoder import ChunkEncoder, group_tokens
from ragkv.engine.chunk_flights import FLIGHT_RESULTS, ChunkFlights
from ragkv.engine.cost_model import CostModel, measure_costs
from ragkv.engine.crossover import key_tier
from ragkv.engine.evidence import EvidenceFinder
from ragkv.engine.fingerprint import fingerprint, keep_stored_block
from ragkv.engine.kv_map import KVMap, kv_map
from ragkv.engine.opening import check_choices, check_paging, make_pooled_decoder, open_parts
from ragkv.engine.passes import Passes, run_alone
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefix_cache import PrefixCache
from ragkv.engine.question import Questions
from ragkv.engine.registry import DEFAULT, full_prefill, make_method
from ragkv.engine.request import Request
from ragkv.engine.reuse_policy import MEASURED, ReusePolicy, measure_gate
from ragkv.engine.self_test import failed_self_test
from ragkv.engine.service_rules import answer_of, rule_of, rule_report
from ragkv.engine.session_manager import SessionManager
from ragkv.errors import OutOfMemory, RagkvError, is_out_of_memory
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.block_tables import BlockPoolMemory
from ragkv.model.execution.graph_decode import make_graph_decoder
from ragkv.model.model_cache import Notify
from ragkv.report import Answer
from ragkv.retrieval import Retriever
from ragkv.store.base import KVStore
from ragkv.store.format.layout import Layout
from ragkv.store.format.seal import make_seal
from ragkv.store.tiers import TierBudgets, Tiers
from ragkv.timing import StepTimer
from ragkv.types import AskOptions, Chunk, ChunkKV, Key

DEFAULTS = AskOptions()


class Engine:
    """Model, KV store, catalogue and retrieval of one process. Not thread-safe: one thread owns it.

    Attributes:
        method: Name of the default method.
        reuse_refused: Why the model must not reuse stored KV (self_test.py); "" when it may.
        reuse_policy: Decides whether stored KV is quicker than a full prefill, where neither the request nor the
            settings name a method; None where that was not measured, as on a CPU.
        group_tokens: Most tokens of chunks that are encoded together, where a single chunk has no more.
        split_seconds: Seconds of processor time that splitting a MiB of text may take.
        speculation: Whether answers are drafted where a question does not say.
        graph_decoder: Decodes densely by recorded graphs; None uses the model's forward.
        pooled_decoder: Decodes under PSA over a pool of KV blocks; None without a pool.
        key_tier: Where keys lie that a prefill reads.
        decode_tier: Where keys lie that decoding reads.
    """

    def __init__(self, settings: Settings, model: DecoderModel, store: KVStore, catalog: Catalog, retriever: Retriever):
        self.settings, self.model, self.store, self.catalog, self.retriever = settings, model, store, catalog, retriever
        self.method = settings.method or model.profile.method or DEFAULT
        self.key_tier = key_tier(model.device)
        self.decode_tier = key_tier(model.device, settings.pool_bytes > 0)  # contexts move when they are decoded
        ingest_policy = check_choices(settings, model.profile, self.method, self.key_tier, self.decode_tier)
        self.speculation = settings.speculation is not False
        self.pooled_decoder = make_pooled_decoder(model, settings.pool_bytes) if settings.pool_bytes else None
        self.chunk_tokens = settings.chunk_tokens or model.profile.chunk_tokens
        self.group_tokens = settings.group_tokens or group_tokens(model.device)
        self.split_seconds = settings.parse_seconds
        self.seal = make_seal(settings.store_secret.get_secret_value())
        stored_as = (settings.prefix, settings.store_body, self.seal.name, ingest_policy)
        keep_stored_block(model, catalog.fingerprint(), *stored_as)
        self.fingerprint = fingerprint(model, *stored_as)
        block = Layout(model.shape, model.profile.block, model.profile.block, model.dtype, settings.store_body)
        self.tiers = Tiers(store, block, TierBudgets(settings.host_bytes, settings.gpu_bytes), model.device)
        memory = BlockPoolMemory(self.tiers.resident, self.tiers.resident_format) if settings.paged else None
        self.graph_decoder = make_graph_decoder(model, memory) if settings.graphs else None
        if settings.paged:
            check_paging(self.graph_decoder, settings)
        self.prefiller = Prefiller(model, model.prompt.prefix, settings.prefix, ingest_policy, self.graph_decoder)
        self.chunks = ChunkEncoder(
            self.prefiller,
            self.tiers,
            catalog,
            self.fingerprint,
            settings.store_body,
            self.seal,
            ChunkFlights(store, settings.encode_wait),
        )
        self.quota = Quota(settings.collection_bytes, model.token_bytes)
        self.reuse_refused = ""
        self.reuse_policy: ReusePolicy | None = None
        self.sessions = SessionManager(
            self.prefiller,
            catalog,
            self.chunks.open_all,
            self.fingerprint,
            settings.conversation_bytes,
            PrefixCache(self.prefiller.prefix, settings.prefix_cache_bytes),
            EvidenceFinder(retriever, model.prompt, model.profile.block).find,
        )
        self.questions = Questions(self)

    @classmethod
    def open(cls, settings: Settings, notify: Notify = lambda line: None, asks: bool = True) -> Engine:
        """Load everything that the settings name.

        A KV store that is down does not stop the engine: questions are then answered by encoding again. Nor does a
        model that fails its self-test, which runs once per fingerprint: questions are then answered by `full`.

        Args:
            settings: What to load.
            notify: Receives lines that a user should see: the default model is missing, a GGUF file is converted.
            asks: Questions will be asked. Otherwise neither the reranker is loaded nor is measured what they need.

        Raises:
            ConfigError: A setting is wrong.
            ModelNotFound: The model cannot be read.
            ModelUnsupported: The model's architecture cannot be served.
            CatalogCorrupt: The catalogue is damaged.
        """
        parts = open_parts(settings, notify, reranks=asks)
        engine = cls(settings, parts.model, parts.store, parts.catalog, parts.retriever)
        engine.reuse_refused = failed_self_test(engine.prefiller, engine.fingerprint, settings.data / "qualified")
        if asks:
            engine._measure()
            _ = engine.model.decoding  # made now: on a CPU that takes seconds, and the first answer would wait
        return engine

    def _measure(self) -> None:
        """Measure what stored KV and a full prefill cost here, or read what an earlier start measured."""
        settings, folder = self.settings, self.settings.data / "costs"
        machine = f"{self.fingerprint} {self.model.device_names} {torch.get_num_threads()} {settings.store}"
        self.chunks.costs = measure_costs(self.prefiller, self.store, folder, machine)
        if settings.gate and not (settings.method or self.reuse_refused or full_prefill(self.method)):
            method, shelf = make_method(self.method, self.model), self.chunks.store(MEASURED)
            self.reuse_policy = measure_gate(self.prefiller, shelf, method, self.costs, folder, machine)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Write the index out and close files and sockets."""
        self.chunks.writer.close()
        self.chunks.flights.close()
        self.tiers.close()
        self.retriever.close()
        self.store.close()
        self.catalog.close()

    @property
    def costs(self) -> CostModel:
        """What loading and encoding cost here."""
        return self.chunks.costs

    def encode(self, chunk: Chunk) -> ChunkKV:
        """Run a chunk through the model once, after the prefix S."""
        return self.prefiller.encode(chunk.tokens)

    def key(self, chunk: Chunk, collection: str) -> Key:
        """Return the name under which `encode_and_store_all` stores the chunk."""
        return self.chunks.store(collection).key(chunk.tokens)

    def encode_and_store_all(self, chunks: Iterable[tuple[Chunk, str]]) -> None:
        """Encode chunks, each with its collection, together and store their KV, unless a valid entry is there.

        On a GPU the KV may still be written when this returns. A model that failed its self-test stores nothing.
        """
        if self.reuse_refused:
            return
        try:
            self.chunks.encode_and_store_all(chunks)
        except Exception as error:
            if (told := self.free_memory(error)) is error:
                raise
            raise told from error

    def is_writing(self, keys: Iterable[Key]) -> bool:
        """Whether the KV of one of these chunks is still being written."""
        return self.chunks.writer.is_writing(keys)

    def finish_writes(self, keys: Iterable[Key]) -> None:
        """Wait until the KV of these chunks is written."""
        self.chunks.writer.wait_for(keys)

    def body_bytes(self, tokens: int) -> int:
        """Return the bytes that the KV of a chunk of so many tokens takes in the store, its head record left out.

        A model that failed its self-test stores nothing: 0.
        """
        model, body = self.model, self.settings.store_body
        layout = Layout(model.shape, tokens, model.profile.block, model.dtype, body)
        return 0 if self.reuse_refused else layout.body_bytes

    def evict(self, keys: Iterable[Key], claim: int | None = None) -> None:
        """Delete KV that no chunk refers to and no ingest claims, and the sessions that hold it.

        Args:
            keys: The entries.
            claim: A claim of the caller, which does not protect them.
        """
        left = list(keys)
        self.sessions.drop_chunks(lambda chunk, collection: self.key(chunk, collection) in left)
        self.chunks.evict(left, claim)

    def drop_outdated(self, collections: abc.Set[str]) -> None:
        """Drop from memory what is kept of chunks that these collections had and have no more."""
        self.sessions.drop_outdated(collections)
        kept = {self.key(*pair) for pair in self.sessions.prefixes.chunks() if pair[1] in collections}
        unused = frozenset(self.catalog.unreferenced(kept)) if kept else frozenset()
        self.sessions.prefixes.drop_chunks(lambda chunk, of: of in collections and self.key(chunk, of) in unused)

    def free_memory(self, error: BaseException) -> BaseException:
        """Drop what is only kept to be quicker, if an error says that memory is short.

        Conversations are read from the catalogue again, and chunks from the store. The pools of the tiers have their
        size from the start, so they stay.

        Returns:
            OutOfMemory then; another error as it is.
        """
        if not is_out_of_memory(error):
            return error
        self.sessions.forget_states()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        return error if isinstance(error, RagkvError) else OutOfMemory()

    def answer(
        self,
        question: str,
        options: AskOptions = DEFAULTS,
        deadline: float = inf,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Answer one question. See `answer_alone` for the arguments and for what it raises."""
        return self.answer_by_rule(question, options) or answer_alone(self, question, options, deadline, stopped)

    def answer_by_rule(self, question: str, options: AskOptions = DEFAULTS) -> Answer | None:
        """Answer a question about the service itself; None for any other. No conversation keeps it."""
        extractive = self.model.profile.extractive
        rule = rule_of(question, extractive)
        if not rule or options.answer_schema is not None:
            return None
        timer = StepTimer()
        text = answer_of(rule, extractive, self.catalog, options)
        return Answer(question, text, (), rule_report(rule, self.model.name, timer))

    def prefill(self, question: str, options: AskOptions = DEFAULTS) -> Request:
        """Prefill a question over the stored KV of the retrieved chunks, up to the logits of the first answer token.

        The turn of a conversation must be finalized before its next question is prefilled.

        Raises:
            InputError: The question is empty or too long, a method or policy is unknown, the filter is malformed, or
                the conversation is full.
            NotFound: The collection is empty, or no document in it matches the filter.
            NotCalibrated: The method needs retrieval heads, or `abstain_below` a confidence, that the model's profile
                lacks.
        """
        return run_alone(self.model, self.prefill_passes(Request(question, options)))

    def prefill_passes(self, request: Request) -> Passes[Request]:
        """Prefill a question as `prefill` does; yield its passes. What `prefill` raises is raised before the first."""
        return self.questions.passes(request)

    def finalize(self, request: Request) -> Answer:
        """Return the answer of a request whose decoding has ended, and keep the turn of its conversation.

        Raises:
            Outdated: A document that it was read from was deleted or replaced meanwhile. Nothing of it is kept.
        """
        return self.questions.finalize(request)

    def map(self, request: Request) -> KVMap:
        """Return what the answer was read from. Call it as soon as the request is finalized."""
        return kv_map(request.context, request.session, self.model.profile.block, self.model.shape.layers)

    def health(self) -> dict[str, Any]:
        """Return the state of the engine, for humans and for `GET /readyz`.

        Returns:
            status: `ok`; `degraded` when the KV store is not ok or the model may not reuse what is in it. Questions are
                still answered then, more slowly.
            store: `ok`, or the kind of fault with its counts (store_faults.py).
            reuse: `on`, or why it is off.
            store_faults: Writes and deletions that the store refused since the start.
            faults: All faults of the store since the start, by kind.
            flights: Missing chunks since the start, by how they were obtained (chunk_flights.py).
            quarantined: Entries found damaged since the start.
            pool: Counters of the pool of KV blocks; None without one.
        """
        store = self.chunks.faults.health(self.store)
        status = "degraded" if store != "ok" or self.reuse_refused else "ok"
        documents, _ = self.catalog.count()
        pool = None if self.pooled_decoder is None else asdict(self.pooled_decoder.pool.use())
        return {
            "status": status,
            "model": self.model.name,
            "method": self.method,
            "store": store,
            "reuse": self.reuse_refused or "on",
            "store_faults": self.chunks.faults.refused,
            "faults": dict(self.chunks.faults.counts),
            "flights": {result: self.chunks.flights.counts[result] for result in FLIGHT_RESULTS},
            "quarantined": self.chunks.quarantine.count,
            "tiers": {name: asdict(pool) for name, pool in self.tiers.stats().items()},
            "pool": pool,
            "documents": documents,
        }
