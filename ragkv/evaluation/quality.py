"""Answer quality and time to first token of every method on question sets.

Chunks are encoded once per set; that time is in no figure. Two times to the first token are measured, both without
retrieval:

    ttft        cache-ready: the chunks' KV is in memory
    ttft_load   head records and blocks are loaded from a store whose files are in the page cache

With a store both use the same numbers: the chunks in memory are those that the store returned, so a quantised body
counts in both.

The full prefill of a set's chunks runs once and its questions share it. This changes no answer, because the question's
rows come last; its time is added to each of them. Under a prefill policy every question is a prefill of its own,
because what a policy reads depends on where the input ends.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from ragkv.engine.evidence import EvidenceFinder, as_hits
from ragkv.engine.head_choice import gold_blocks
from ragkv.engine.memory_source import ChunkSource, InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefilledContext, PrefillOptions
from ragkv.engine.registry import FULL, make_method
from ragkv.errors import InputError
from ragkv.evaluation.decoded import DecodedAnswer, decode_answer
from ragkv.evaluation.quality_figures import QualityFigures, QualityOutcome, ReadChunk
from ragkv.evaluation.sets import QuestionSet, SetQuestion
from ragkv.model.decoder import DecoderModel
from ragkv.model.layer_pass import append
from ragkv.model.profile import Profile
from ragkv.model.wrapper import without_wrapper
from ragkv.recompute.base import Plan, Tokens, middle_blocks, recomputed_tokens
from ragkv.sparse.prefill import PrefillPolicy
from ragkv.timing import StepTimer
from ragkv.types import ChunkKV

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""

NO_CONTEXT = "no-context"
"""The question alone, without any chunk: what the model knows or guesses by itself."""

Asked = tuple[int, int, str]
"""(number of the set, number of its question, method)"""


class BenchStore(Protocol):
    """A store to measure with."""

    def put(self, kv: ChunkKV) -> ChunkKV:
        """Store a chunk. Returns it as the store has it: digests rounded, and K and V if the body is quantised."""
        ...

    def open(self, kv: ChunkKV, exact: bool) -> ReadChunk:
        """Return the stored chunk with its head record loaded."""
        ...


@dataclass(frozen=True)
class QualityParams:
    """How questions are asked.

    Attributes:
        max_tokens: longest answer.
        prefix: what chunks are encoded after, as in `Prefiller`.
        store: for the figures that need a store; without it they are None.
        done: outcomes of an earlier run, which are not asked for again.
        keep: called with each new outcome.
        policies: names among the methods that mean full prefill under a policy.
        evidence: finds evidence in the chunks of a set (evidence.py); without it no method has any.
    """

    max_tokens: int = 24
    prefix: str = "shared"
    store: BenchStore | None = None
    done: Mapping[Asked, QualityOutcome] = field(default_factory=dict)
    keep: Callable[[QualityOutcome], None] = lambda outcome: None
    policies: Mapping[str, PrefillPolicy] = field(default_factory=dict)
    evidence: EvidenceFinder | None = None


def ask_all(
    model: DecoderModel,
    sets: abc.Sequence[QuestionSet],
    methods: abc.Sequence[str],
    progress: Progress,
    params: QualityParams = QualityParams(),
) -> list[QualityOutcome]:
    """Ask every question with every method, in the order of the sets.

    Raises:
        InputError: before anything is asked, for an unknown method or a set that does not fit the model.
    """
    for method in methods:
        if method not in (FULL, NO_CONTEXT, *params.policies):
            make_method(method, model)
    for question_set in sets:
        check_fits(model, question_set, params.max_tokens)
    prefiller = Prefiller(model, model.prompt.prefix, params.prefix)
    known = dict(params.done)
    total = sum(len(each.questions) for each in sets)
    asked = 0
    for i, question_set in enumerate(sets):
        missing = [(j, m) for j in range(len(question_set.questions)) for m in methods if (i, j, m) not in known]
        todo = list(dict.fromkeys(method for _, method in missing))
        asker = _Asker(prefiller, question_set, todo, params) if missing else None
        for j, question in enumerate(question_set.questions):
            for method in methods:
                if asker is not None and (i, j, method) not in known:
                    known[i, j, method] = asker.ask(question, method, (i, j))
                    params.keep(known[i, j, method])
            asked += 1
            progress("ask", asked, total)
    return [known[i, j, m] for i, each in enumerate(sets) for j in range(len(each.questions)) for m in methods]


def check_fits(model: DecoderModel, asked: QuestionSet, max_tokens: int) -> None:
    """Raise InputError if a question with its context is longer than the model's longest input."""
    needed = context_tokens(model, asked) + max_tokens
    if needed > model.max_positions:
        raise InputError(
            f"{asked.name}: {needed} tokens of context, question and answer, {model.name} reads {model.max_positions}; "
            "use another model, or leave out what does not fit (--fit)"
        )


def context_tokens(model: DecoderModel, asked: QuestionSet) -> int:
    """Tokens of the prefix, all chunks and the longest question."""
    prompt = model.prompt
    question = max((len(prompt.question(question.text)) for question in asked.questions), default=0)
    return len(prompt.prefix) + sum(len(prompt.chunk(*chunk)) for chunk in asked.chunks) + question


class _Asker:
    """Asks about one set. Its chunks are encoded once, and prefilled once."""

    def __init__(self, prefiller: Prefiller, asked: QuestionSet, methods: abc.Sequence[str], params: QualityParams):
        self._prefiller, self._set, self._params = prefiller, asked, params
        model, store = prefiller.model, params.store
        chunks = [model.prompt.chunk(title, text) for title, text in asked.chunks]
        self._chunks = plain = [without_wrapper(chunk) for chunk in chunks]  # of a prefill in full
        reuse = any(method not in (FULL, NO_CONTEXT, *params.policies) for method in methods)
        encoded = map(prefiller.encode, chunks if reuse else [])
        self._encoded = [kv if store is None else store.put(kv) for kv in encoded]
        self._shared = prefiller.mode == "shared"
        block = model.profile.block
        self._sources = [InMemoryChunk(kv, block, self._shared and i == 0) for i, kv in enumerate(self._encoded)]
        timer = StepTimer(model.device)
        self._full = (
            prefiller.prefill_full(plain[:-1], plain[-1], timer, PrefillOptions(256)) if FULL in methods else None
        )
        self._full_ms = timer.total()
        self._size = sum(map(len, chunks))
        self._hits = as_hits(asked.chunks, chunks)
        self._text = "\n".join(f"{title}\n{text}" for title, text in asked.chunks)
        shape = model.shape
        self._token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * model.dtype.itemsize

    def ask(self, question: SetQuestion, method: str, at: tuple[int, int]) -> QualityOutcome:
        """Answer one question with one method."""
        tokens = self._prefiller.model.prompt.question(question.text)
        context, ttft = self._prefill(question, tokens, method)
        decoded, ended = self._answer(context, question)
        answer, scores = decoded.text, (decoded.em, decoded.f1)
        if context.plan is None:
            load, ttft_load = (None, None) if self._params.store is None else (0.0, ttft)
            if method == NO_CONTEXT:
                nothing = QualityFigures(
                    *scores, 0.0, 0.0, 0.0, 0.0, ended, 0.0, ttft, ttft_load, load, layer_recall=0.0
                )
                return QualityOutcome(question, method, answer, nothing, at)
            read = 1.0 if context.sparse is None else context.sparse.computed_pairs / context.sparse.dense_pairs
            kv = float(self._token_bytes * self._size)
            figures = QualityFigures(*scores, 1.0, 1.0, 1.0, 1.0, ended, kv, ttft, ttft_load, load, read, 1.0)
            return QualityOutcome(question, method, answer, figures, at)
        layer_recall = self._layer_recall(question, context.plan)
        profile = self._prefiller.model.profile
        shares = _shares(context.plan, self._sources, profile)
        stored = self._from_store(question, method)
        kv = self._token_bytes * self._size * shares[1]
        found = (float(layer_recall == 1), *shares)
        figures = QualityFigures(*scores, *found, ended, kv, ttft, *stored, layer_recall=layer_recall)
        return QualityOutcome(question, method, answer, figures, at)

    def _prefill(self, question: SetQuestion, tokens: abc.Sequence[int], method: str) -> tuple[PrefilledContext, float]:
        """(the context, milliseconds to the first token). Retrieval has embedded the question before."""
        if self._params.evidence is not None:
            self._params.evidence.find(question.text, self._hits[:1], ())
        timer, params = StepTimer(self._prefiller.model.device), self._params
        if method == FULL:
            context = self._prefill_question(tokens)
            return context, self._full_ms + timer.total()
        if method == NO_CONTEXT:
            return self._prefiller.prefill_full((), tokens, timer, PrefillOptions(params.max_tokens)), timer.total()
        if method in params.policies:
            policy = params.policies[method]
            context = self._prefiller.prefill_full(
                self._chunks, tokens, timer, PrefillOptions(params.max_tokens, prefill_policy=policy)
            )
        else:
            context = self._prefill_sparse(self._sources, question, method, timer)
        return context, timer.total()

    def _prefill_sparse(
        self, sources: abc.Sequence[ChunkSource], question: SetQuestion, method: str, timer: StepTimer
    ) -> PrefilledContext:
        """Prefill over stored KV. The plan of the result has all chunks; those that do not join keep nothing."""
        made, options = make_method(method, self._prefiller.model), PrefillOptions(self._params.max_tokens)
        tokens, joining = self._prefiller.model.prompt.question(question.text), tuple(range(len(sources)))
        if self._params.evidence is not None and made.evidence:
            with timer.step("plan"):
                found = self._params.evidence.find(question.text, self._hits, made.evidence)
                joining = made.screen(found) if made.chunks else joining
            for source, mine in zip(sources, found, strict=True):
                source.piece = replace(source.piece, evidence=mine)
        context = self._prefiller.prefill_sparse([sources[i] for i in joining], tokens, made, timer, options)
        if context.plan is None or len(joining) == len(sources):
            return context
        kept, recompute = (
            tuple(_spread(layer, joining, len(sources)) for layer in each)
            for each in (context.plan.kept, context.plan.recompute)
        )
        return replace(context, plan=replace(context.plan, kept=kept, recompute=recompute))

    def _prefill_question(self, tokens: abc.Sequence[int]) -> PrefilledContext:
        model, full = self._prefiller.model, self._full
        if full is None:
            raise ValueError("full is not among the methods")
        full.cache.truncate([full.position] * model.shape.layers)
        logits = model.forward([append(full.cache, tokens, full.position)])[0][-1]
        return PrefilledContext(full.cache, logits, full.position + len(tokens), None)

    def _answer(self, context: PrefilledContext, question: SetQuestion) -> tuple[DecodedAnswer, float]:
        """(the answer, whether it ended by itself)."""
        decoded = decode_answer(self._prefiller.model, context, question, self._params.max_tokens)
        ended = decoded.stopped and (decoded.text == "unknown" or decoded.text in self._text)
        return decoded, float(ended)

    def _from_store(self, question: SetQuestion, method: str) -> tuple[float | None, float | None]:
        """(milliseconds to the first token, bytes loaded / bytes of the full KV) with everything in the store."""
        store, model = self._params.store, self._prefiller.model
        if store is None:
            return None, None
        timer = StepTimer(model.device)
        sources = [store.open(kv, self._shared and i == 0) for i, kv in enumerate(self._encoded)]
        self._prefill_sparse(sources, question, method, timer)
        ttft = timer.total()
        return ttft, sum(s.head_bytes + s.loaded_bytes for s in sources) / (self._token_bytes * self._size)

    def _layer_recall(self, question: SetQuestion, plan: Plan) -> float:
        """Return the share of layers in which all blocks of the answer are kept."""
        span = question.span
        if span is None:
            return 1.0
        gold = gold_blocks(self._prefiller.model, *self._set.chunks[span.chunk], span.start, span.end)
        return sum(set(gold) <= set(layer[span.chunk]) for layer in plan.kept) / len(plan.kept)


def _spread(layer: abc.Sequence[Tokens], joining: abc.Sequence[int], count: int) -> tuple[Tokens, ...]:
    """Return what a layer has of the joining chunks, with nothing for the others of `count` chunks."""
    found = dict(zip(joining, layer, strict=True))
    return tuple(found.get(i, ()) for i in range(count))


def _shares(plan: Plan, sources: abc.Sequence[InMemoryChunk], profile: Profile) -> tuple[float, float, float]:
    """(middle blocks / all blocks, kept tokens / all tokens, recomputed tokens / all tokens), means over layers."""
    pieces, layers = [source.piece for source in sources], len(plan.kept)
    blocks, tokens = sum(p.blocks for p in pieces), sum(p.tokens for p in pieces)
    kept = sum(p.row_count(layer[i]) for layer in plan.kept for i, p in enumerate(pieces)) / layers
    middles = [set(middle_blocks(piece.blocks, profile.initial, profile.local)) for piece in pieces]
    picked = sum(len(middle.intersection(layer[i])) for layer in plan.kept for i, middle in enumerate(middles)) / layers
    return picked / blocks, kept / tokens, sum(recomputed_tokens(plan.recompute)) / tokens
