"""One question by stages, up to the logits of its first answer token; and, once it is decoded, its answer.

    prepare → retrieve → open → plan → load → repair → prefill        `passes`, which yields every pass
    complete → cite → judge → keep the turn                         `finalize`

The middle stages are those of the session (session_manager.py, stitched_prefill.py).
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Protocol

from ragkv.catalog import Catalog
from ragkv.config import Settings
from ragkv.engine.chunk_encoder import ChunkEncoder
from ragkv.engine.citations import cite
from ragkv.engine.confidence import confidence_of, evidence_of, held_of
from ragkv.engine.crossover import KeyTier
from ragkv.engine.detokenizer import Completion, Detokenizer
from ragkv.engine.generation import Sampling, Sequence
from ragkv.engine.paging import page_context
from ragkv.engine.passes import Passes
from ragkv.engine.policies import make_decode_policy, make_prefill_policy
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.registry import FULL, full_prefill, make_method
from ragkv.engine.report_builder import build_report
from ragkv.engine.request import Request
from ragkv.engine.retokenise import with_own_tokens, without_wrappers
from ragkv.engine.reuse_policy import ReusePolicy
from ragkv.engine.session_cache import MethodChoice
from ragkv.engine.session_manager import SessionManager
from ragkv.engine.speculation import make_drafter
from ragkv.engine.structured import Grammars, values_of
from ragkv.engine.table_lookup import cell_guide
from ragkv.engine.token_scores import AnswerScores
from ragkv.engine.whole_values import whole_value
from ragkv.errors import InputError, NotCalibrated, NotFound, Outdated
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.pooled_decode import PooledDecoder
from ragkv.model.execution.split_context import split_context
from ragkv.normalisation import visible
from ragkv.passages import UNKNOWN, Citation, is_unknown
from ragkv.report import Answer, Report
from ragkv.retrieval import Retriever
from ragkv.retrieval.follow_up import own_raised, resolved, search_text
from ragkv.sparse.psa import PsaState
from ragkv.timing import StepTimer
from ragkv.types import AskOptions, Chunk, Hit


class QuestionEngine(Protocol):
    """What a question needs of the engine, which says what its attributes are (engine.py)."""

    settings: Settings
    model: DecoderModel
    catalog: Catalog
    retriever: Retriever
    sessions: SessionManager
    chunks: ChunkEncoder
    fingerprint: str
    method: str
    reuse_refused: str
    reuse_policy: ReusePolicy | None
    speculation: bool
    pooled_decoder: PooledDecoder | None
    decode_tier: KeyTier


class Questions:
    """Takes questions through their stages. What is known of one is in its `Request`."""

    def __init__(self, engine: QuestionEngine):
        """Answer from what an engine owns."""
        self._engine, self._grammars = engine, Grammars(engine.model)

    def passes(self, request: Request) -> Passes[Request]:
        """Prefill a question as `Engine.prefill` does; yield its passes. What it raises comes before the first."""
        self.prepare(request)
        options = request.options
        with request.timer.step("retrieve"):
            request.hits = self.retrieve(request)
        self._choose_full_where_quicker(request)
        policy = request.prefill_options.prefill_policy
        request.session = yield from self._engine.sessions.recall(
            options.collection, options.conversation, request.method, request.timer, policy
        )
        request.session.sought = request.sought
        new = self.screen(request)
        self.check_room(request, new)
        request.context = yield from self._engine.sessions.passes(
            request.session, new, request.question_tokens, request.method.method, request.timer, request.prefill_options
        )
        return self._ready_to_decode(request)

    def finalize(self, request: Request) -> Answer:
        """Return the answer of a request whose decoding has ended, and keep the turn of its conversation.

        Raises:
            Outdated: A document that it was read from was deleted or replaced meanwhile. Nothing of it is kept.
        """
        if not self._engine.sessions.is_current(request.session):
            raise Outdated
        completion = request.detokenizer.complete(request.sequence)
        text = completion.text.strip()
        structured = request.sampling.schema is not None
        if self._engine.model.profile.extractive and completion.stopped and not structured:
            text = whole_value(text, request.read, [hit.chunk.text for hit in request.hits])
        held = values_of(text) if structured else text
        citations = cite(request.hits, held, request.read)
        report = build_report(self._engine.model, request, completion)
        report = self._judged(request, completion, report, text=held, citations=citations)
        if report.abstained:
            text, citations = UNKNOWN, ()
        asked = (request.question, request.question_tokens)
        if request.session.name:  # the next turn computes with it
            request.context.cache.move(self._engine.model.devices)
        rest = text.removeprefix(completion.text.strip())
        said = text if report.abstained else f"{completion.text.rstrip()}{rest}" if rest else completion.text
        self._engine.sessions.finish_turn(request.session, asked, completion.tokens, said)
        return Answer(request.question, text, citations, report)

    def _judged(
        self, request: Request, completion: Completion, report: Report, *, text: str, citations: abc.Sequence[Citation]
    ) -> Report:
        """Return the report with the confidence of the answer, and whether it is withheld."""
        report = replace(report, held=held_of(text, citations))
        # What is forced is certain, or a surprise: what confidence was fitted on has neither.
        if not completion.log_probabilities or not request.hits or request.sequence.guide is not None:
            return report
        evidence = evidence_of(
            completion.log_probabilities,
            request.hits,
            unknown=completion.unknown_log_probability,
            question=request.read,
            answer=text,
            citations=citations,
        )
        confidence = confidence_of(evidence, self._engine.model.profile.confidence)
        least = request.options.abstain_below
        low = confidence is not None and least is not None and confidence < least
        abstained = low and not is_unknown(text)
        return replace(report, confidence=confidence, evidence=evidence, abstained=abstained)

    def prepare(self, request: Request) -> None:
        """Check what is asked and look up what it names; nothing is computed yet."""
        engine, question, options = self._engine, request.question, request.options
        settings, profile = engine.settings, engine.model.profile
        if options.abstain_below is not None and not profile.confidence:
            hint = "run `ragkv calibrate --confidence QUESTIONS`, or ask without abstain_below"
            raise NotCalibrated(f"{engine.model.name} has no measured confidence to abstain by", hint)
        request.timer = StepTimer(engine.model.device)
        prefill_policy = make_prefill_policy(options.prefill or settings.prefill, profile)
        decode_policy = make_decode_policy(options.decode or settings.decode, profile, engine.decode_tier)
        name = options.method or engine.method
        method = None if full_prefill(name) else make_method(name, engine.model, options.collection)
        request.method = MethodChoice(name, method)
        request.reuse_refused = engine.reuse_refused if request.method.method else ""
        if request.reuse_refused:
            request.method = MethodChoice(FULL, None)
        max_tokens, stop = options.max_tokens or settings.max_tokens, (*options.stop, *profile.stop)
        if options.answer_schema is not None:
            max_tokens, stop = self._grammars.limits(options, settings.max_tokens)
        engine.sessions.check(options.conversation, request.method)
        request.earlier = self._earlier_turns(options)
        request.read = resolved(question, request.earlier[0]) if profile.extractive else question
        alone = request.read != question and options.conversation is None
        request.question_tokens = self._tokenize(request.read, replace(options, history=()) if alone else options)
        request.prefill_options = PrefillOptions(max_tokens, prefill_policy, decode_policy)
        request.sampling = Sampling.of(options, max_tokens, stop)
        request.speculation = engine.speculation if options.speculation is None else options.speculation

    def _tokenize(self, question: str, options: AskOptions) -> tuple[int, ...]:
        """Return the question part of the prompt and the answer's beginning, with the latest turns that fit."""
        prompt, beginning = self._engine.model.prompt, options.beginning
        if not question.strip():
            raise InputError("the question is empty")
        if any("\0" in text for text in (question, beginning, options.instructions, *chain(*options.history))):
            raise InputError("the question holds NUL characters; it is not text")
        if options.history and options.conversation is not None:
            raise InputError("a conversation keeps its own turns; give either `conversation` or `history`")
        limit, asked = self._engine.settings.max_question_tokens, visible(question).strip()
        for start in range(len(options.history) + 1):
            tokens = prompt.question(asked, options.history[start:], options.instructions)
            tokens += prompt.answer(beginning) if beginning else ()
            if len(tokens) <= limit:
                return tokens
        raise InputError(
            f"the question has {len(tokens)} tokens, the limit is {limit}; "
            "shorten it or put its material into a document"
        )

    def retrieve(self, request: Request) -> list[Hit]:
        """Return chunks in prompt order. While the question is embedded, KV of those with its words is fetched."""
        options, top_k = request.options, request.options.top_k or self._engine.settings.top_k
        fetch_ahead = partial(self._fetch_ahead, request)
        turns, own = request.earlier
        text = request.sought = search_text(request.question, turns)
        count = top_k if text == request.question or not own else 2 * top_k
        hits = self._engine.retriever.search(text, options.collection, count, fetch_ahead, options.filter)
        if count > top_k:
            hits = own_raised(hits, own, top_k)
        if not hits and options.filter and self._engine.catalog.generation(options.collection):
            raise NotFound(f"collection {options.collection!r} has no documents that the filter describes")
        if not hits:
            raise NotFound(f"collection {options.collection!r} has no documents", "add some with `ragkv ingest`")
        engine, reuses = self._engine, request.method.method is not None
        reader = (engine.catalog, engine.model.prompt, engine.fingerprint)
        ordered = prompt_order(with_own_tokens(hits, options.collection, *reader, wrapped=reuses))
        # Layers with a state go on from behind the last chunk.
        best = hits[0].row
        return sorted(ordered, key=lambda hit: hit.row == best) if engine.model.states.bytes else ordered

    def _earlier_turns(self, options: AskOptions) -> tuple[abc.Sequence[tuple[str, str]], set[str]]:
        """Return the (question, answer) of earlier turns, and the ids of the documents that they read."""
        if options.conversation is None:
            return options.history, set()
        turns = self._engine.catalog.turns(options.collection, options.conversation)
        own = {chunk.rpartition("#")[0] for turn in turns for _, chunk in turn.joined}
        return [(turn.question, turn.answer) for turn in turns], own  # a removed answer is empty

    def _fetch_ahead(self, request: Request, chunks: abc.Sequence[Chunk]) -> None:
        method = request.method.method
        if method is not None and self._engine.settings.host_bytes:
            # More than can join would be read for nothing.
            self._engine.chunks.fetch_ahead(request.options.collection, method, chunks[: method.chunks or None])

    def _choose_full_where_quicker(self, request: Request) -> None:
        """Prefill everything where that is predicted to be quicker than stored KV, unless a method was asked for."""
        if request.options.method or request.options.conversation or self._engine.reuse_policy is None:
            return
        method, sizes = request.method.method, [len(hit.chunk.tokens) for hit in request.hits]
        block, question = self._engine.model.profile.block, len(request.question_tokens)
        if not self._engine.reuse_policy.reuses(method, sizes, block, question):
            request.method = replace(request.method, name=FULL, method=None)
            request.hits = without_wrappers(request.hits)

    def screen(self, request: Request) -> list[Hit]:
        """Return the new chunks that join the context. Those that are left out are no hits of the request any more."""
        session, method = request.session, request.method.method
        new = session.unknown(request.hits)
        joining = self._engine.sessions.screen(session, new, method, request.timer)
        left_out = {hit.row for hit in session.left_out}
        request.hits = [hit for hit in request.hits if hit.row not in left_out]
        return joining

    def check_room(self, request: Request, new: list[Hit]) -> None:
        """Raise InputError where context, question and answer are longer than the model's positions."""
        session, question, answer = request.session, len(request.question_tokens), request.sampling.max_tokens
        context = session.state.position + sum(len(hit.chunk.tokens) for hit in new)
        needed, limit = context + question + answer, self._engine.model.max_positions
        if needed > limit:
            so_far = f" after {len(session.turns)} turns" if session.turns else ""
            instead = "start a new conversation" if session.turns else "ask with a smaller top_k or max_tokens"
            raise InputError(
                f"{context} context{so_far} + {question} question + {answer} answer tokens are "
                f"{needed}, the model reads {limit}; {instead}"
            )

    def _ready_to_decode(self, request: Request) -> Request:
        """Add the sequence to a request that is prefilled."""
        context, decoding, pooled = request.context, request.context.decoding, None
        if self._engine.pooled_decoder is not None and isinstance(decoding, PsaState):
            pooled = self._engine.pooled_decoder.open(context.cache, decoding.params, request.sampling.max_tokens)
        if pooled is not None:  # the pool has digests of its own
            request.context = context = replace(context, decoding=None)
        sampling, model = request.sampling, self._engine.model
        attention = split_context(model, context.cache, context.decoding, sampling.max_tokens) or context.decoding
        request.detokenizer = Detokenizer(model, sampling.stop, request.timer, request.options.beginning)
        request.sequence = Sequence(
            context.cache, context.logits, context.position, sampling, attention, request.detokenizer, pooled
        )
        if request.options.top_log_probabilities is not None:
            request.detokenizer.scores = AnswerScores(request.sequence, self._grammars.tokenizer)
        request.sequence.other = model.prompt.answer(UNKNOWN)[0]
        guide = self._grammars.guide(sampling.schema, sampling.max_tokens)
        request.sequence.guide = guide or cell_guide(model, request)
        request.sequence.drafter = make_drafter(model, request)
        self._page(request)
        return request

    def _page(self, request: Request) -> None:
        """Let a question read its context in place, where it is decoded by recorded steps and belongs to no session."""
        sequence, session, plan = request.sequence, request.session, request.context.plan
        if not self._engine.settings.paged or plan is None or session.name:
            return
        if sequence.attention is None and sequence.pooled is None:
            starts, room = session.state.stitch.starts, request.sampling.max_tokens
            sequence.paged = page_context(sequence.cache, plan, session.sources, starts, room)


def prompt_order(hits: abc.Sequence[Hit]) -> list[Hit]:
    """Order retrieved chunks for the prompt: documents by their best hit, chunks of one document adjacent, in order."""
    rank = {document: place for place, document in enumerate(dict.fromkeys(hit.chunk.document_id for hit in hits))}
    return sorted(hits, key=lambda hit: (rank[hit.chunk.document_id], hit.chunk.ordinal))
