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

from ragkv.config import Settings
from ragkv.engine.answer_alone import answer_alone
from ragkv.engine.assembly import assemble
from ragkv.engine.cost_model import CostModel
from ragkv.engine.kv_map import KVMap, kv_map
from ragkv.engine.measurements import UNMEASURED, measure_engine
from ragkv.engine.opening import OpenedParts, open_parts
from ragkv.engine.passes import Passes, run_alone
from ragkv.engine.question import Questions
from ragkv.engine.request import Request
from ragkv.engine.service_rules import answer_by_rule
from ragkv.errors import OutOfMemory, RagkvError, is_out_of_memory
from ragkv.model.model_cache import Notify
from ragkv.report import Answer
from ragkv.types import AskOptions, Chunk, ChunkKV, Key

DEFAULTS = AskOptions()


class Engine:
    """Model, KV store, catalogue and retrieval of one process. Not thread-safe: one thread owns it.

    Attributes:
        settings: What it was made by.
        model: The loaded model.
        store: The KV store.
        catalog: The catalogue.
        retriever: Finds chunks. Store, catalogue and retriever are closed with the engine.
        method: Name of the default method.
        fingerprint: Of everything that makes stored KV valid.
        tiers: The KV store with what is kept of it in memory.
        prefiller: Prefills contexts and encodes chunks.
        chunks: The KV of all chunks.
        sessions: Conversations.
        graph_decoder: Decodes densely by recorded graphs; None uses the model's forward.
        pooled_decoder: Decodes under PSA over a pool of KV blocks; None without a pool.
        decode_tier: Where keys lie that decoding reads.
        reuse_refused: Why the model must not reuse stored KV (self_test.py); "" when it may.
        reuse_policy: Decides whether stored KV is quicker than a full prefill, where neither the request nor the
            settings name a method; None where that was not measured.
        chunk_tokens: Tokens of the longest chunk.
        group_tokens: Most tokens of chunks that are encoded together, where a single chunk has no more.
        split_seconds: Seconds of processor time that splitting a MiB of text may take.
        speculation: Whether answers are drafted where a question does not say.
        quota: How much KV a collection may hold.
    """

    def __init__(self, settings: Settings, parts: OpenedParts):
        """Join what was opened. Nothing is tested or measured yet.

        Raises:
            ConfigError: The model or the machine cannot have what a setting names.
        """
        self.settings = settings
        self.model, self.store, self.catalog, self.retriever = parts.model, parts.store, parts.catalog, parts.retriever
        made = assemble(settings, parts)
        self.method, self.fingerprint, self.tiers = made.method, made.fingerprint, made.tiers
        self.prefiller, self.chunks, self.sessions = made.prefiller, made.chunks, made.sessions
        self.graph_decoder, self.pooled_decoder = made.graph_decoder, made.pooled_decoder
        self.decode_tier = made.decode_tier
        self.chunk_tokens = settings.chunk_tokens or self.model.profile.chunk_tokens
        self.group_tokens = settings.group_tokens or self.chunks.group_tokens
        self.split_seconds, self.speculation = settings.parse_seconds, settings.speculation is not False
        self.quota = made.quota
        self.reuse_refused, self.reuse_policy = UNMEASURED.reuse_refused, UNMEASURED.reuse_policy
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
        engine = cls(settings, open_parts(settings, notify, reranks=asks))
        measured = measure_engine(engine, asks)
        engine.reuse_refused, engine.reuse_policy = measured.reuse_refused, measured.reuse_policy
        engine.chunks.costs = measured.costs
        if asks:
            _ = engine.model.decoding  # made now: on a CPU that takes seconds, and the first answer would wait
        return engine

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
        return 0 if self.reuse_refused else self.chunks.body_bytes(tokens)

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
        return answer_by_rule(question, options, self.model, self.catalog)

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
            "flights": self.chunks.flights.results,
            "quarantined": self.chunks.quarantine.count,
            "tiers": {name: asdict(pool) for name, pool in self.tiers.stats().items()},
            "pool": pool,
            "documents": documents,
        }
