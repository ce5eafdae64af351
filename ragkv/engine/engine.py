"""The engine: read a chunk once, answer a question from what was read. Owns the model; one thread at a time.

remember(chunk)    encode → put
begin(question)    search → recall → open → [full prefill | plan, load, repair, prefill]: up to the first token's logits
finish(begun)      report; the conversation is kept
answer(question)   begin → decode → finish
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Unpack

import torch

from ragkv.admin.quota import Quota
from ragkv.catalog import Catalog
from ragkv.config import Settings
from ragkv.engine.chunk_source import StoredChunk, prefetch
from ragkv.engine.chunk_store import ChunkStore, Quarantine
from ragkv.engine.cost_model import FREE, measure_costs
from ragkv.engine.fingerprint import fingerprint
from ragkv.engine.generation import Detokenizer, Sampling, Sequence, generate
from ragkv.engine.kv_map import KVMap, kv_map
from ragkv.engine.methods import FULL, check_method, default_method, make_method
from ragkv.engine.policies import make_decode_policy, make_prefill_policy
from ragkv.engine.prefill import Prefiller
from ragkv.engine.report_builder import build_report
from ragkv.engine.request import AskOptions, RequestState
from ragkv.engine.reuse_policy import MEASURED, ReusePolicy, measure_reuse
from ragkv.engine.self_test import failed_self_test
from ragkv.engine.session_manager import Session, SessionManager
from ragkv.errors import ConfigError, InputError, NotFound, StoreError, StoreUnavailable
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import make_graph_decoder
from ragkv.recompute.base import Method
from ragkv.report import Answer
from ragkv.retrieval import Embedder, Retriever
from ragkv.store import open_store
from ragkv.store.base import KVStore
from ragkv.store.format.layout import Layout
from ragkv.store.format.seal import make_seal
from ragkv.store.tiers import TierBudgets, Tiers
from ragkv.timing import StepTimer
from ragkv.types import Chunk, ChunkKV, Filter, Hit, Key

FORGOTTEN_AT_ONCE = 100
"""Entries deleted in one transaction of the catalogue, while other writers wait."""


class Engine:
    """Model, KV store, catalogue and retrieval of one process. Not thread-safe: one thread owns it.

    unqualified: why the model must not reuse stored KV (see qualify.py), "" when it may · costs: of loading and of
    encoding here (see cost.py); until they are measured everything is loaded · steps: reads the tokens of answers that
    are decoded densely, None: the model's forward does · gate: where neither request nor settings name a method, short
    contexts are prefilled if that is quicker; measured on a GPU only, where it can be (gate.py).
    """

    def __init__(self, settings: Settings, model: DecoderModel, store: KVStore, catalog: Catalog, retriever: Retriever):
        self.settings, self.model, self.store, self.catalog, self.retriever = settings, model, store, catalog, retriever
        self.method = settings.method or default_method(model)
        with _named("RAGKV_METHOD"):
            check_method(self.method)
        with _named("RAGKV_PREFILL"):
            make_prefill_policy(settings.prefill, model.profile)
        with _named("RAGKV_DECODE"):
            make_decode_policy(settings.decode, model.profile)
        with _named("RAGKV_INGEST_PREFILL"):
            reading = make_prefill_policy(settings.ingest_prefill, model.profile)
        self.graph_decoder = make_graph_decoder(model) if settings.graphs else None
        self.prefiller = Prefiller(model, model.prompt.prefix, settings.prefix, reading, self.graph_decoder)
        self.chunk_tokens = settings.chunk_tokens or model.profile.chunk_tokens
        self.seal = make_seal(settings.store_secret.get_secret_value())
        self.fingerprint = fingerprint(model, settings.prefix, settings.store_body, self.seal.name, reading)
        block = Layout(model.shape, model.profile.block, model.profile.block, model.dtype, settings.store_body)
        self.tiers = Tiers(store, block, TierBudgets(settings.host_bytes, settings.gpu_bytes), model.device)
        self.quota = Quota(settings.collection_bytes, model.token_bytes)
        self.reuse_refused = ""
        self.costs = FREE
        self.reuse_policy: ReusePolicy | None = None
        self.quarantine = Quarantine()
        self.store_faults = 0
        self.sessions = SessionManager(
            self.prefiller, catalog, self._open, self.fingerprint, settings.conversation_bytes
        )

    @classmethod
    def open(cls, settings: Settings) -> Engine:
        """Load everything the settings name. Raises ConfigError, ModelNotFound, ModelUnsupported, CatalogCorrupt.

        A KV store that is down does not stop the engine: questions are then answered by encoding again. Nor does a
        model that fails its self-test: it is run once per fingerprint, and questions are then answered by `full`.
        """
        if settings.threads:
            torch.set_num_threads(settings.threads)
        store = open_store(
            settings.store, settings.data, settings.store_timeout, settings.store_ttl, settings.store_bytes
        )
        model = DecoderModel.load(settings.model_source, settings.device, settings.dtype, settings.data / "profiles")
        catalog = Catalog.open(settings.data / "catalog.sqlite")
        embedder = Embedder(settings.embedder)
        embedder.load()
        engine = cls(settings, model, store, catalog, Retriever(catalog, embedder, settings.data / "index"))
        engine.reuse_refused = failed_self_test(engine.prefiller, engine.fingerprint, settings.data / "qualified")
        machine = f"{engine.fingerprint} {model.place} {torch.get_num_threads()} {settings.store}"
        engine.costs = measure_costs(engine.prefiller, store, settings.data / "costs", machine)
        if model.device.type == "cuda" and not (settings.method or engine.reuse_refused):
            engine.reuse_policy = measure_reuse(
                engine.prefiller, engine._chunk_store(MEASURED), make_method(engine.method, model)
            )
        return engine

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Write the index out and let go of files and sockets."""
        self.tiers.close()
        self.retriever.save()
        self.store.close()
        self.catalog.close()

    def encode(self, chunk: Chunk) -> ChunkKV:
        """Run a chunk through the model once, after the prefix S."""
        return self.prefiller.encode(chunk.tokens)

    def key(self, chunk: Chunk, collection: str) -> Key:
        """The name under which `remember` stores the chunk."""
        return self._chunk_store(collection).key(chunk.tokens)

    def encode_and_store(self, chunk: Chunk, collection: str) -> Key:
        """Encode a chunk and store its KV, unless a valid entry is there.

        With the store down nothing is encoded: the first question that needs the chunk will do it. Nor with a model
        that is not qualified: what it would store is not to be trusted.
        """
        shelf = self._chunk_store(collection)
        if self.reuse_refused:
            return shelf.key(chunk.tokens)
        try:
            shelf.verify_stored(chunk.tokens)
        except StoreUnavailable:
            self.store_faults += 1
        except StoreError:
            self._put(shelf, self.encode(chunk))
        return shelf.key(chunk.tokens)

    def evict(self, keys: Iterable[Key], claim: int | None = None) -> None:
        """Delete KV that no chunk refers to and no ingest claims, but for the caller's own claim.

        What a failing store keeps is an orphan, no error.
        """
        left = list(keys)
        for key in left:
            self.tiers.drop(key)
        self.sessions.drop_chunks(lambda chunk, collection: self.key(chunk, collection) in left)
        for start in range(0, len(left), FORGOTTEN_AT_ONCE):
            try:
                with self.catalog.removing(left[start : start + FORGOTTEN_AT_ONCE], mine=claim) as free:
                    for key in free:
                        self.store.delete(key)
            except StoreError:
                self.store_faults += 1

    def answer(self, question: str, **wanted: Unpack[AskOptions]) -> Answer:
        """Answer one question: see `begin`, which says what may be wanted and what is raised."""
        begun = self.prefill(question, **wanted)
        for _ in generate(self.model, begun.sequence, self.graph_decoder):
            pass
        return self.finalize(begun)

    def prefill(
        self,
        question: str,
        *,
        collection: str = "default",
        conversation: str | None = None,
        top_k: int | None = None,
        filter: Filter | None = None,
        method: str | None = None,
        prefill: str | None = None,
        decode: str | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: abc.Sequence[str] = (),
        seed: int = 0,
    ) -> RequestState:
        """Read a question over the stored KV of the retrieved chunks. conversation: the name of one in this collection,
        with which the question goes on; its first question makes it. Until that one is finished none may begin that
        goes on with the same · filter: what the metadata of the documents has to say that are searched for this
        question (catalog/attributes.py).

        Raises InputError (empty or too long question, unknown method or policy, no filter, a conversation that is
        full), NotFound (empty collection, or nothing in it that the filter describes), NotCalibrated.
        """
        watch = StepTimer(self.model.device)
        reading, speaking = prefill or self.settings.prefill, decode or self.settings.decode
        profile = self.model.profile
        policy, decoder = make_prefill_policy(reading, profile), make_decode_policy(speaking, profile)
        name = method or self.method
        way = None if name == FULL else make_method(name, self.model)
        refused = self.reuse_refused if way else ""
        if refused:
            name, way = FULL, None
        asked = self._question(question)
        stops = (*stop, *profile.stop)
        sampling = Sampling(max_tokens or self.settings.max_tokens, temperature, top_p, stops, seed)
        with watch.step("retrieve"):
            hits = self._search(question, collection, top_k or self.settings.top_k, way, filter)
        if not (method or conversation or self._reuse_pays(way, hits, asked)):
            name, way = FULL, None
        talk = self.sessions.recall(collection, conversation, name, way, watch, policy)
        joining = talk.unknown(hits)
        self._check_room(talk, joining, asked, sampling)
        context = self.sessions.prefill(talk, joining, asked, way, sampling.max_tokens, watch, policy, decoder)
        speech = Detokenizer(self.model, sampling.stop, watch)
        run = Sequence(context.cache, context.logits, context.position, sampling, context.decoding, speech)
        return RequestState(question, asked, hits, talk, context, (reading, speaking), refused, watch, run, speech)

    def finalize(self, begun: RequestState) -> Answer:
        """The answer to a question whose decoding has ended. Keeps its conversation."""
        talk, context, asked = begun.session, begun.context, begun.question_tokens
        spoken = begun.detokenizer.complete(begun.sequence)
        report = build_report(
            self.model, talk, context, begun.policies, len(asked), spoken, begun.timer, begun.reuse_refused
        )
        self.sessions.finish_turn(talk, (begun.question, asked), spoken.tokens, spoken.text)
        return Answer(begun.question, spoken.text.strip(), begun.citations, report)

    def map(self, begun: RequestState) -> KVMap:
        """What the answer to a question was read from; call it as soon as the question is finished."""
        return kv_map(begun, self.model.profile.block, self.model.shape.layers)

    def health(self) -> dict[str, Any]:
        """status is `degraded` when the KV store does not answer, or the model may not reuse what is in it: questions
        are still answered, more slowly.

        reuse: `on`, or why it is off · store_faults: writes and deletions the store refused since the start; each cost
        an encoding, or left an orphan · quarantined: entries found damaged since the start; none is read twice.
        """
        try:
            self.store.ping()
            status, store = "ok", "ok"
        except StoreError as error:
            status, store = "degraded", str(error)
        if self.reuse_refused:
            status = "degraded"
        documents, _ = self.catalog.count()
        return {
            "status": status,
            "model": self.model.name,
            "method": self.method,
            "store": store,
            "reuse": self.reuse_refused or "on",
            "store_faults": self.store_faults,
            "quarantined": self.quarantine.count,
            "tiers": {name: asdict(pool) for name, pool in self.tiers.stats().items()},
            "documents": documents,
        }

    def _question(self, question: str) -> tuple[int, ...]:
        if not question.strip():
            raise InputError("the question is empty")
        if "\0" in question:
            raise InputError("the question holds NUL characters; it is not text")
        tokens = self.model.prompt.question(question.strip())
        if len(tokens) > self.settings.max_question_tokens:
            raise InputError(
                f"the question has {len(tokens)} tokens, the limit is {self.settings.max_question_tokens}; "
                "shorten it or put its material into a document"
            )
        return tokens

    def _search(
        self, question: str, collection: str, top_k: int, way: Method | None = None, wanted: Filter | None = None
    ) -> list[Hit]:
        """Retrieved chunks in prompt order: documents by their best hit, chunks of one document adjacent, in order.

        While the question is being embedded, the chunks that share its words are fetched ahead.
        """
        early = partial(self._fetch_ahead, collection, way)
        hits = self.retriever.search(question, collection, top_k, early, wanted)
        if not hits and wanted and self.catalog.generation(collection):
            raise NotFound(f"collection {collection!r} has no documents that the filter describes")
        if not hits:
            raise NotFound(f"collection {collection!r} has no documents; add some with `ragkv ingest`")
        order = {document: rank for rank, document in enumerate(dict.fromkeys(h.chunk.document_id for h in hits))}
        return sorted(hits, key=lambda hit: (order[hit.chunk.document_id], hit.chunk.ordinal))

    def _reuse_pays(self, way: Method | None, hits: abc.Sequence[Hit], question: abc.Sequence[int]) -> bool:
        """Whether stored KV is predicted to be quicker than a full prefill, as far as that can be told."""
        sizes = [len(hit.chunk.tokens) for hit in hits]
        return self.reuse_policy is None or self.reuse_policy.reuses(
            way, sizes, self.model.profile.block, len(question)
        )

    def _check_room(
        self, talk: Session, joining: abc.Sequence[Hit], question: abc.Sequence[int], sampling: Sampling
    ) -> None:
        context = talk.state.position + sum(len(hit.chunk.tokens) for hit in joining)
        needed, limit = context + len(question) + sampling.max_tokens, self.model.max_positions
        if needed > limit:
            so_far = f" after {len(talk.turns)} turns" if talk.turns else ""
            instead = "start a new conversation" if talk.turns else "ask with a smaller top_k or max_tokens"
            raise InputError(
                f"{context} context{so_far} + {len(question)} question + {sampling.max_tokens} answer tokens are "
                f"{needed}, the model reads {limit}; {instead}"
            )

    def _fetch_ahead(self, collection: str, way: Method | None, chunks: abc.Sequence[Chunk]) -> None:
        if way is not None and self.settings.host_bytes:
            self.tiers.prefetch(
                partial(prefetch, self._chunk_store(collection), [chunk.tokens for chunk in chunks], way)
            )

    def _chunk_store(self, collection: str) -> ChunkStore:
        body = self.settings.store_body
        return ChunkStore(self.tiers, self.model, self.fingerprint, collection, body, self.seal, self.quarantine)

    def _open(self, chunk: Chunk, collection: str, first: bool) -> StoredChunk:
        shelf = self._chunk_store(collection)
        exact = first and self.settings.prefix == "shared"
        encode, mend = partial(self.encode, chunk), partial(self._repair_entry, chunk, collection, shelf)
        return StoredChunk(shelf, chunk.tokens, exact, encode, mend, self.costs)

    def _repair_entry(self, chunk: Chunk, collection: str, shelf: ChunkStore, kv: ChunkKV) -> ChunkKV:
        """Store what the store did not deliver. If that was because another process deletes the document, nothing of it
        may stay behind: looked at after storing, so that one of the two removes it."""
        kv = self._put(shelf, kv)
        try:
            current = self.catalog.chunks_of(collection, chunk.document_id)
        except NotFound:
            current = []
        if chunk.tokens not in [other.tokens for other in current]:
            self.evict([shelf.key(chunk.tokens)])
        return kv

    def _put(self, shelf: ChunkStore, kv: ChunkKV) -> ChunkKV:
        kv, fault = shelf.put(kv)
        self.store_faults += fault is not None
        return kv


@contextmanager
def _named(setting: str) -> Iterator[None]:
    """What is wrong with a setting names it."""
    try:
        yield
    except InputError as error:
        raise ConfigError(f"{setting}: {error}") from None
