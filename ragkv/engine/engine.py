"""The engine: encode a chunk once, answer questions from stored KV. It owns the model; one thread at a time uses it.

encode_and_store_all   the KV of chunks into the store
prefill                retrieve → open → plan → load → repair → prefill, up to the logits of the first answer token
prefill_passes         the same; its passes may run together with those of other questions
finalize               the report; the turn of a conversation is kept
answer                 prefill → decode → finalize
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any

import torch

from ragkv.admin.quota import Quota
from ragkv.catalog import Catalog
from ragkv.config import Settings, ViewSettings
from ragkv.engine.chunk_encoder import ChunkEncoder, group_tokens
from ragkv.engine.chunk_flights import FLIGHT_RESULTS, ChunkFlights
from ragkv.engine.citations import cite
from ragkv.engine.confidence import confidence_of, evidence_of, held_of
from ragkv.engine.cost_model import CostModel, measure_costs
from ragkv.engine.crossover import key_tier
from ragkv.engine.decoding import generate
from ragkv.engine.detokenizer import Detokenizer
from ragkv.engine.evidence import EvidenceFinder
from ragkv.engine.fingerprint import fingerprint, keep_stored_block
from ragkv.engine.generation import Completion, Sampling, Sequence
from ragkv.engine.kv_map import KVMap, kv_map
from ragkv.engine.open_model import load_model
from ragkv.engine.paging import page_context
from ragkv.engine.passes import Passes, run_alone
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.prefix_cache import PrefixCache
from ragkv.engine.registry import (
    DEFAULT,
    FULL,
    check_method,
    full_prefill,
    make_decode_policy,
    make_method,
    make_prefill_policy,
)
from ragkv.engine.report_builder import build_report
from ragkv.engine.request import RequestState
from ragkv.engine.retokenise import with_own_tokens
from ragkv.engine.reuse_policy import MEASURED, ReusePolicy, measure_gate
from ragkv.engine.self_test import failed_self_test
from ragkv.engine.service_rules import answer_of, rule_of, rule_report
from ragkv.engine.session_manager import MethodChoice, SessionManager
from ragkv.engine.speculation import make_drafter
from ragkv.engine.whole_values import whole_value
from ragkv.errors import (
    ConfigError,
    EmbedderChanged,
    InputError,
    NotCalibrated,
    NotFound,
    Outdated,
    OutOfMemory,
    RagkvError,
    is_out_of_memory,
)
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.block_tables import BlockPoolMemory
from ragkv.model.execution.graph_decode import GraphDecoder, make_graph_decoder
from ragkv.model.execution.pooled_decode import PooledDecoder
from ragkv.model.model_cache import Notify
from ragkv.normalisation import visible
from ragkv.passages import UNKNOWN, Citation, is_unknown
from ragkv.report import Answer, Report
from ragkv.retrieval import Retriever, make_embedder, make_reranker, open_earlier
from ragkv.retrieval.follow_up import own_raised, resolved, search_text
from ragkv.sparse.psa import Psa, PsaState
from ragkv.store import open_store
from ragkv.store.base import KVStore
from ragkv.store.format.layout import Layout
from ragkv.store.format.seal import make_seal
from ragkv.store.tiers import TierBudgets, Tiers
from ragkv.timing import StepTimer
from ragkv.types import AskOptions, Chunk, ChunkKV, Hit, Key

DEFAULTS = AskOptions()
ATTEMPTS = 3
"""How often a question is answered, where documents that it read are deleted or replaced meanwhile."""


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
    """

    def __init__(self, settings: Settings, model: DecoderModel, store: KVStore, catalog: Catalog, retriever: Retriever):
        self.settings, self.model, self.store, self.catalog, self.retriever = settings, model, store, catalog, retriever
        self.method = settings.method or model.profile.method or DEFAULT
        with _naming("RAGKV_METHOD"):
            check_method(self.method)
        self._key_tier = key_tier(model.device)
        self._decode_tier = key_tier(model.device, settings.pool_bytes > 0)  # contexts move when they are decoded
        with _naming("RAGKV_PREFILL"):
            make_prefill_policy(settings.prefill, model.profile, self._key_tier)
        with _naming("RAGKV_DECODE"):
            make_decode_policy(settings.decode, model.profile, self._decode_tier)
        with _naming("RAGKV_INGEST_PREFILL"):
            ingest_policy = make_prefill_policy(settings.ingest_prefill, model.profile, self._key_tier)
        self.speculation = settings.speculation is not False
        self.pooled_decoder = _make_pooled_decoder(model, settings.pool_bytes) if settings.pool_bytes else None
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
            _check_paging(self.graph_decoder, settings)
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
            EvidenceFinder(retriever, model.prompt, model.profile.block, model.device).find,
        )

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
        store = open_store(
            settings.store, settings.data, settings.store_timeout, settings.store_ttl, settings.store_bytes
        )
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
        if reranker is not None and asks:
            reranker.load()
        parameters = Retriever.parameters_of(settings.part(ViewSettings), catalog)
        retriever = Retriever(catalog, embedder, settings.data / "index", parameters, reranker, open_earlier)
        engine = cls(settings, model, store, catalog, retriever)
        engine.reuse_refused = failed_self_test(engine.prefiller, engine.fingerprint, settings.data / "qualified")
        if asks:
            engine._measure()
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

    def answer(self, question: str, options: AskOptions = DEFAULTS) -> Answer:
        """Answer one question. Raises as `prefill`, and Outdated where its documents change all the time."""
        if (ruled := self.answer_by_rule(question, options)) is not None:
            return ruled
        for _ in range(ATTEMPTS):
            request = self.prefill(question, options)
            for _ in generate(self.model, request.sequence, self.graph_decoder):
                pass
            with suppress(Outdated):
                return self.finalize(request)
        raise Outdated

    def answer_by_rule(self, question: str, options: AskOptions = DEFAULTS) -> Answer | None:
        """Answer a question about the service itself; None for any other. No conversation keeps it."""
        extractive = self.model.profile.extractive
        rule = rule_of(question, extractive)
        if not rule:
            return None
        timer = StepTimer()
        text = answer_of(rule, extractive, self.catalog, options)
        return Answer(question, text, (), rule_report(rule, self.model.name, timer))

    def prefill(self, question: str, options: AskOptions = DEFAULTS) -> RequestState:
        """Prefill a question over the stored KV of the retrieved chunks, up to the logits of the first answer token.

        The turn of a conversation must be finalized before its next question is prefilled.

        Raises:
            InputError: The question is empty or too long, a method or policy is unknown, the filter is malformed, or
                the conversation is full.
            NotFound: The collection is empty, or no document in it matches the filter.
            NotCalibrated: The method needs retrieval heads, or `abstain_below` a confidence, that the model's profile
                lacks.
        """
        return run_alone(self.model, self.prefill_passes(question, options))

    def prefill_passes(self, question: str, options: AskOptions = DEFAULTS) -> Passes[RequestState]:
        """Prefill a question as `prefill` does; yield its passes. What `prefill` raises is raised before the first."""
        request = self._start(question, options)
        with request.timer.step("retrieve"):
            request.hits = self._retrieve(request)
        self._choose_full_where_quicker(request)
        policy = request.prefill_options.prefill_policy
        request.session = yield from self.sessions.recall(
            options.collection, options.conversation, request.method, request.timer, policy
        )
        request.session.sought = request.sought
        new = self._screen(request)
        self._check_room(request, new)
        request.context = yield from self.sessions.passes(
            request.session, new, request.question_tokens, request.method.method, request.timer, request.prefill_options
        )
        return self._ready_to_decode(request)

    def finalize(self, request: RequestState) -> Answer:
        """Return the answer of a request whose decoding has ended, and keep the turn of its conversation.

        Raises:
            Outdated: A document that it was read from was deleted or replaced meanwhile. Nothing of it is kept.
        """
        if not self.sessions.is_current(request.session):
            raise Outdated
        completion = request.detokenizer.complete(request.sequence)
        text = completion.text.strip()
        if self.model.profile.extractive and completion.stopped:
            text = whole_value(text, request.read, [hit.chunk.text for hit in request.hits])
        citations = cite(request.hits, text, request.read)
        report = build_report(self.model, request, completion)
        report = self._judged(request, completion, report, text=text, citations=citations)
        if report.abstained:
            text, citations = UNKNOWN, ()
        asked = (request.question, request.question_tokens)
        if request.sequence.pooled is not None and request.session.name:  # the next turn computes with it
            request.context.cache.move(self.model.devices)
        rest = text.removeprefix(completion.text.strip())
        said = text if report.abstained else f"{completion.text.rstrip()}{rest}" if rest else completion.text
        self.sessions.finish_turn(request.session, asked, completion.tokens, said)
        return Answer(request.question, text, citations, report)

    def map(self, request: RequestState) -> KVMap:
        """Return what the answer was read from. Call it as soon as the request is finalized."""
        return kv_map(request, self.model.profile.block, self.model.shape.layers)

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

    def _judged(
        self,
        request: RequestState,
        completion: Completion,
        report: Report,
        *,
        text: str,
        citations: abc.Sequence[Citation],
    ) -> Report:
        """Return the report with the confidence of the answer, and whether it is withheld."""
        report = replace(report, held=held_of(text, citations))
        if not completion.log_probabilities or not request.hits:
            return report
        evidence = evidence_of(
            completion.log_probabilities,
            request.hits,
            unknown=completion.unknown_log_probability,
            question=request.read,
            answer=text,
            citations=citations,
        )
        confidence, least = confidence_of(evidence, self.model.profile.confidence), request.options.abstain_below
        low = confidence is not None and least is not None and confidence < least
        abstained = low and not is_unknown(text)
        return replace(report, confidence=confidence, evidence=evidence, abstained=abstained)

    def _start(self, question: str, options: AskOptions) -> RequestState:
        """Check what is asked and look up what it names; nothing is computed yet."""
        if options.abstain_below is not None and not self.model.profile.confidence:
            hint = "run `ragkv calibrate --confidence QUESTIONS`, or ask without abstain_below"
            raise NotCalibrated(f"{self.model.name} has no measured confidence to abstain by", hint)
        timer, settings, profile = StepTimer(self.model.device), self.settings, self.model.profile
        prefill_policy = make_prefill_policy(options.prefill or settings.prefill, profile, self._key_tier)
        decode_policy = make_decode_policy(options.decode or settings.decode, profile, self._decode_tier)
        name = options.method or self.method
        full = full_prefill(name)
        choice = MethodChoice(name, None if full else make_method(name, self.model))
        refused = self.reuse_refused if choice.method else ""
        if refused:
            choice = MethodChoice(FULL, None)
        max_tokens, stop = options.max_tokens or settings.max_tokens, (*options.stop, *profile.stop)
        self.sessions.check(options.conversation, choice)
        earlier = self._earlier_turns(options)
        read = resolved(question, earlier[0]) if profile.extractive else question
        return RequestState(
            question,
            options,
            self._tokenize(read, options if read == question or options.conversation else replace(options, history=())),
            choice,
            PrefillOptions(max_tokens, prefill_policy, decode_policy),
            Sampling(max_tokens, options.temperature, options.top_p, stop, options.seed),
            timer,
            refused,
            self.speculation if options.speculation is None else options.speculation,
            read,
            earlier,
        )

    def _tokenize(self, question: str, options: AskOptions) -> tuple[int, ...]:
        """Return the question part of the prompt. Of the turns that come with it, the latest that fit are in it."""
        if not question.strip():
            raise InputError("the question is empty")
        if any("\0" in text for text in (question, options.instructions, *chain.from_iterable(options.history))):
            raise InputError("the question holds NUL characters; it is not text")
        if options.history and options.conversation is not None:
            raise InputError("a conversation keeps its own turns; give either `conversation` or `history`")
        limit, asked = self.settings.max_question_tokens, visible(question).strip()
        for start in range(len(options.history) + 1):
            tokens = self.model.prompt.question(asked, options.history[start:], options.instructions)
            if len(tokens) <= limit:
                return tokens
        raise InputError(
            f"the question has {len(tokens)} tokens, the limit is {limit}; "
            "shorten it or put its material into a document"
        )

    def _retrieve(self, request: RequestState) -> list[Hit]:
        """Return chunks in prompt order.

        While the question is embedded, the KV of chunks that share its words is fetched ahead.
        """
        options, top_k = request.options, request.options.top_k or self.settings.top_k
        fetch_ahead = partial(self._fetch_ahead, request)
        turns, own = request.earlier
        text = request.sought = search_text(request.question, turns)
        count = top_k if text == request.question or not own else 2 * top_k
        hits = self.retriever.search(text, options.collection, count, fetch_ahead, options.filter)
        if count > top_k:
            hits = own_raised(hits, own, top_k)
        if not hits and options.filter and self.catalog.generation(options.collection):
            raise NotFound(f"collection {options.collection!r} has no documents that the filter describes")
        if not hits:
            raise NotFound(f"collection {options.collection!r} has no documents", "add some with `ragkv ingest`")
        ordered = prompt_order(
            with_own_tokens(hits, options.collection, self.catalog, self.model.prompt, self.fingerprint)
        )
        # Layers with a state go on from behind the last chunk.
        best = hits[0].row
        return sorted(ordered, key=lambda hit: hit.row == best) if self.model.states.bytes else ordered

    def _earlier_turns(self, options: AskOptions) -> tuple[abc.Sequence[tuple[str, str]], set[str]]:
        """Return the (question, answer) of earlier turns, and the ids of the documents that they read."""
        if options.conversation is None:
            return options.history, set()
        turns = self.catalog.turns(options.collection, options.conversation)
        own = {chunk.rpartition("#")[0] for turn in turns for _, chunk in turn.joined}
        return [(turn.question, turn.answer) for turn in turns], own  # a removed answer is empty

    def _fetch_ahead(self, request: RequestState, chunks: abc.Sequence[Chunk]) -> None:
        method = request.method.method
        if method is not None and self.settings.host_bytes:
            self.chunks.fetch_ahead(request.options.collection, method, chunks)

    def _choose_full_where_quicker(self, request: RequestState) -> None:
        """Prefill everything where that is predicted to be quicker than stored KV, unless a method was asked for."""
        if request.options.method or request.options.conversation or self.reuse_policy is None:
            return
        sizes = [len(hit.chunk.tokens) for hit in request.hits]
        question = len(request.question_tokens)
        if not self.reuse_policy.reuses(request.method.method, sizes, self.model.profile.block, question):
            request.method = replace(request.method, name=FULL, method=None)

    def _screen(self, request: RequestState) -> list[Hit]:
        """Return the new chunks that join the context. Those that are left out are no hits of the request any more."""
        session, method = request.session, request.method.method
        new = session.unknown(request.hits)
        joining = self.sessions.screen(session, new, method, request.timer)
        left_out = {hit.row for hit in session.left_out}
        request.hits = [hit for hit in request.hits if hit.row not in left_out]
        return joining

    def _check_room(self, request: RequestState, new: list[Hit]) -> None:
        """Raise InputError where context, question and answer are longer than the model's positions."""
        session, question, answer = request.session, len(request.question_tokens), request.sampling.max_tokens
        context = session.state.position + sum(len(hit.chunk.tokens) for hit in new)
        needed, limit = context + question + answer, self.model.max_positions
        if needed > limit:
            so_far = f" after {len(session.turns)} turns" if session.turns else ""
            instead = "start a new conversation" if session.turns else "ask with a smaller top_k or max_tokens"
            raise InputError(
                f"{context} context{so_far} + {question} question + {answer} answer tokens are "
                f"{needed}, the model reads {limit}; {instead}"
            )

    def _ready_to_decode(self, request: RequestState) -> RequestState:
        """Add the sequence to a request that is prefilled."""
        context, decoding, pooled = request.context, request.context.decoding, None
        if self.pooled_decoder is not None and isinstance(decoding, PsaState):
            pooled = self.pooled_decoder.open(context.cache, decoding.params, request.sampling.max_tokens)
        if pooled is not None:  # the pool has digests of its own
            request.context = context = replace(context, decoding=None)
        request.detokenizer = Detokenizer(self.model, request.sampling.stop, request.timer)
        request.sequence = Sequence(
            context.cache,
            context.logits,
            context.position,
            request.sampling,
            context.decoding,
            request.detokenizer,
            pooled,
        )
        request.sequence.other = self.model.prompt.answer(UNKNOWN)[0]
        request.sequence.drafter = make_drafter(self.model, request)
        self._page(request)
        return request

    def _page(self, request: RequestState) -> None:
        """Let a question read its context in place, where it is decoded by recorded steps and belongs to no session."""
        sequence, session, plan = request.sequence, request.session, request.context.plan
        if not self.settings.paged or plan is None or session.name:
            return
        if sequence.attention is None and sequence.pooled is None:
            starts, room = session.state.stitch.starts, request.sampling.max_tokens
            sequence.paged = page_context(sequence.cache, plan, session.sources, starts, room)


def prompt_order(hits: abc.Sequence[Hit]) -> list[Hit]:
    """Order retrieved chunks for the prompt: documents by their best hit, chunks of one document adjacent, in order."""
    rank = {document: place for place, document in enumerate(dict.fromkeys(hit.chunk.document_id for hit in hits))}
    return sorted(hits, key=lambda hit: (rank[hit.chunk.document_id], hit.chunk.ordinal))


def _make_pooled_decoder(model: DecoderModel, budget: int) -> PooledDecoder:
    """Raises ConfigError where the model has no use for a pool, or it is too small for a block."""
    policy = make_decode_policy("psa", model.profile)
    assert isinstance(policy, Psa)
    try:
        return PooledDecoder(model, policy, budget)
    except ValueError as error:
        raise ConfigError(f"RAGKV_POOL_BYTES: {error}; unset it, or give it more") from None


def _check_paging(graph_decoder: GraphDecoder | None, settings: Settings) -> None:
    """Raise ConfigError where no block could be read in place."""
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
