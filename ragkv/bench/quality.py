"""Methods side by side on question sets, read as the service reads them.

Chunks are encoded once, outside the figures. Two accountings of the time to the first token, both without retrieval:

    ttft        cache-ready: the chunks' KV lies in memory
    ttft_load   heads and blocks come from a store, whose files the page cache holds

With a store, both read the same numbers: chunks lie in memory as they came back from it, quantised bodies included.

Full prefill of the chunks is done once per set and shared by its questions, which changes no answer (the question's
rows come last); its time counts for each of them. Under a prefill policy every question is a prefill of its own, since
what a policy reads depends on where the input ends.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ragkv.bench.score import exact_match, f1
from ragkv.bench.sets import QuestionSet, SetQuestion
from ragkv.engine.calibration import gold_blocks
from ragkv.engine.generation import Detokenizer, Sampling, Sequence, generate
from ragkv.engine.memory_source import ChunkSource, InMemoryChunk
from ragkv.engine.methods import FULL, make_method
from ragkv.engine.prefill import PrefilledContext, Prefiller
from ragkv.errors import InputError
from ragkv.model.decoder import DecoderModel
from ragkv.model.layer_pass import append
from ragkv.recompute.base import Plan, recomputed_tokens
from ragkv.sparse.base import PrefillPolicy
from ragkv.timing import StepTimer
from ragkv.types import ChunkKV

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""

Asked = tuple[int, int, str]
"""(number of the set, number of its question, method)"""


class ReadChunk(ChunkSource, Protocol):
    """A chunk in a store, and how many bytes were read of it."""

    head_bytes: int
    loaded_bytes: int


class BenchStore(Protocol):
    """A store to measure with."""

    def put(self, kv: ChunkKV) -> ChunkKV:
        """Store a chunk; returns it as it comes back: its digest rounded, K and V too where the body is quantised."""
        ...

    def open(self, kv: ChunkKV, exact: bool) -> ReadChunk:
        """The stored chunk, its head read."""
        ...


@dataclass(frozen=True)
class QualityFigures:
    """Of one question. recall: all blocks of the answer are kept in every layer, 1 where its place is not known ·
    middle: blocks kept beside the fixed ones / all blocks · sequence, recompute: tokens kept, recomputed / all tokens ·
    stopped: the answer ended by itself, at the end of a span of the context (or of "unknown") · kv: bytes of the kept
    KV · ttft, ttft_load: milliseconds · load: bytes read / bytes of the full KV. No store: ttft_load and load are None
    · read: query-key pairs computed / those of a dense prefill of everything; None for what reuses stored KV.
    """

    em: float
    f1: float
    recall: float
    middle: float
    sequence: float
    recompute: float
    stopped: float
    kv: float
    ttft: float
    ttft_load: float | None = None
    load: float | None = None
    read: float | None = None


@dataclass(frozen=True)
class QualityOutcome:
    """What one method answered to one question. at: where in the sets."""

    question: SetQuestion
    method: str
    answer: str
    figures: QualityFigures
    at: tuple[int, int] = (0, 0)


def ask_all(
    model: DecoderModel,
    sets: abc.Sequence[QuestionSet],
    methods: abc.Sequence[str],
    progress: Progress,
    max_tokens: int = 24,
    prefix: str = "shared",
    store: BenchStore | None = None,
    done: dict[Asked, QualityOutcome] | None = None,
    keep: Callable[[QualityOutcome], None] = lambda outcome: None,
    policies: Mapping[str, PrefillPolicy] | None = None,
) -> list[QualityOutcome]:
    """Ask every question with every method, in the order of the sets.

    prefix: what chunks are encoded after, as in `Reader` · store: for the figures that need one · done: outcomes that
    need not be asked for again · keep: called with each new one · policies: names among `methods` that mean full
    prefill under a policy. Raises InputError, before anything is asked, for a method that there is not and a set that
    does not fit the model.
    """
    policies = policies or {}
    for method in methods:
        if method != FULL and method not in policies:
            make_method(method, model)
    for each in sets:
        check_fits(model, each, max_tokens)
    reader = Prefiller(model, model.prompt.prefix, prefix)
    known = dict(done or {})
    total = sum(len(each.questions) for each in sets)
    asked = 0
    for i, each in enumerate(sets):
        missing = [(j, m) for j in range(len(each.questions)) for m in methods if (i, j, m) not in known]
        todo = list(dict.fromkeys(method for _, method in missing))
        asker = _Asker(reader, each, todo, max_tokens, store, policies) if missing else None
        for j, question in enumerate(each.questions):
            for method in methods:
                if asker is not None and (i, j, method) not in known:
                    known[i, j, method] = asker.ask(question, method, (i, j))
                    keep(known[i, j, method])
            asked += 1
            progress("ask", asked, total)
    return [known[i, j, m] for i, each in enumerate(sets) for j in range(len(each.questions)) for m in methods]


def check_fits(model: DecoderModel, asked: QuestionSet, max_tokens: int) -> None:
    """Raise InputError when a question with its context is longer than the model reads."""
    needed = context_tokens(model, asked) + max_tokens
    if needed > model.max_positions:
        raise InputError(
            f"{asked.name}: {needed} tokens of context, question and answer, {model.name} reads {model.max_positions}; "
            "use another model, or leave out what does not fit (--fit)"
        )


def context_tokens(model: DecoderModel, asked: QuestionSet) -> int:
    """Tokens of S, all chunks and the longest question."""
    prompt = model.prompt
    question = max((len(prompt.question(question.text)) for question in asked.questions), default=0)
    return len(prompt.prefix) + sum(len(prompt.chunk(*chunk)) for chunk in asked.chunks) + question


class _Asker:
    """Asks about one set, whose chunks are encoded, and prefilled, once."""

    def __init__(
        self,
        reader: Prefiller,
        asked: QuestionSet,
        methods: abc.Sequence[str],
        max_tokens: int,
        store: BenchStore | None,
        policies: Mapping[str, PrefillPolicy],
    ):
        self._reader, self._set, self._max_tokens, self._store = reader, asked, max_tokens, store
        self._policies = policies
        model = reader.model
        self._chunks = chunks = [model.prompt.chunk(title, text) for title, text in asked.chunks]
        reuse = any(method != FULL and method not in policies for method in methods)
        encoded = map(reader.encode, chunks if reuse else [])
        self._encoded = [kv if store is None else store.put(kv) for kv in encoded]
        self._shared = reader.mode == "shared"
        block = model.profile.block
        self._sources = [InMemoryChunk(kv, block, self._shared and i == 0) for i, kv in enumerate(self._encoded)]
        watch = StepTimer(model.device)
        self._full = reader.prefill_full(chunks[:-1], chunks[-1], 256, watch) if FULL in methods else None
        self._prefill = watch.total()
        self._size = sum(map(len, chunks))
        self._text = "\n".join(f"{title}\n{text}" for title, text in asked.chunks)

    def ask(self, question: SetQuestion, method: str, at: tuple[int, int]) -> QualityOutcome:
        model = self._reader.model
        tokens = model.prompt.question(question.text)
        watch = StepTimer(model.device)
        if method == FULL:
            context = self._ask_full(tokens)
            ttft = self._prefill + watch.total()
        elif method in self._policies:
            context = self._reader.prefill_full(self._chunks, tokens, self._max_tokens, watch, self._policies[method])
            ttft = watch.total()
        else:
            way = make_method(method, model)
            context = self._reader.prefill_sparse(self._sources, tokens, way, self._max_tokens, watch)
            ttft = watch.total()
        answer, ended = self._answer(context)
        scores = (
            exact_match(answer, question.gold, question.language),
            f1(answer, question.gold, question.language),
        )
        shape = model.shape
        row = 2 * shape.layers * shape.kv_heads * shape.head_dim * model.dtype.itemsize
        if context.plan is None:
            load, ttft_load = (None, None) if self._store is None else (0.0, ttft)
            read = 1.0 if context.sparse is None else context.sparse.computed_pairs / context.sparse.dense_pairs
            figures = QualityFigures(
                *scores, 1.0, 1.0, 1.0, 1.0, ended, float(row * self._size), ttft, ttft_load, load, read
            )
            return QualityOutcome(question, method, answer, figures, at)
        found = self._found(question, context.plan)
        shares = _shares(context.plan, self._sources, model.profile.initial + model.profile.local)
        stored = self._from_store(tokens, method, row)
        figures = QualityFigures(*scores, found, *shares, ended, row * self._size * shares[1], ttft, *stored)
        return QualityOutcome(question, method, answer, figures, at)

    def _ask_full(self, tokens: abc.Sequence[int]) -> PrefilledContext:
        model, full = self._reader.model, self._full
        if full is None:
            raise ValueError("full was not among the methods")
        full.cache.truncate([full.position] * model.shape.layers)
        logits = model.forward([append(full.cache, tokens, full.position)])[0][-1]
        return PrefilledContext(full.cache, logits, full.position + len(tokens), None)

    def _answer(self, context: PrefilledContext) -> tuple[str, float]:
        """(the answer, whether it ended by itself)."""
        model = self._reader.model
        speech = Detokenizer(model, model.profile.stop, StepTimer(model.device))
        run = Sequence(context.cache, context.logits, context.position, Sampling(self._max_tokens), should_stop=speech)
        for _ in generate(model, run):
            pass
        answer = speech.text.strip()
        ended = run.stopped and (answer == "unknown" or answer in self._text)
        return answer, float(ended)

    def _from_store(self, tokens: abc.Sequence[int], method: str, row: int) -> tuple[float | None, float | None]:
        """(milliseconds to the first token, bytes read / bytes of the full KV) when everything comes from the store."""
        store, model = self._store, self._reader.model
        if store is None:
            return None, None
        watch = StepTimer(model.device)
        sources = [store.open(kv, self._shared and i == 0) for i, kv in enumerate(self._encoded)]
        self._reader.prefill_sparse(sources, tokens, make_method(method, model), self._max_tokens, watch)
        ttft = watch.total()
        return ttft, sum(s.head_bytes + s.loaded_bytes for s in sources) / (row * self._size)

    def _found(self, question: SetQuestion, plan: Plan) -> float:
        span = question.span
        if span is None:
            return 1.0
        gold = gold_blocks(self._reader.model, *self._set.chunks[span.chunk], span.start, span.end)
        return float(all(block in layer[span.chunk] for layer in plan.kept for block in gold))


def _shares(plan: Plan, sources: abc.Sequence[InMemoryChunk], fixed: int) -> tuple[float, float, float]:
    """(middle blocks / all blocks, kept tokens / all tokens, recomputed tokens / all tokens), means over layers."""
    pieces, layers = [source.piece for source in sources], len(plan.kept)
    blocks, tokens = sum(p.blocks for p in pieces), sum(p.tokens for p in pieces)
    kept = sum(len(p.rows(layer[i])) for layer in plan.kept for i, p in enumerate(pieces)) / layers
    picked = sum(len(layer[i]) - min(fixed, p.blocks) for layer in plan.kept for i, p in enumerate(pieces)) / layers
    return picked / blocks, kept / tokens, sum(recomputed_tokens(plan.recompute)) / tokens
