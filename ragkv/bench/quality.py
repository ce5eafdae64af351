"""`ragkv bench quality`: methods side by side on generated needle questions, read as the service reads them.

Accounting: chunks are encoded once, outside the figures; nothing is loaded from a store. Full prefill is done once per
set of documents and shared by its questions, which changes no answer (the question's rows come last).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from ragkv.bench.score import exact_match, f1
from ragkv.calibrate import gold_blocks
from ragkv.decode import Sampling, decode
from ragkv.methods import FULL, METHODS
from ragkv.model import DecoderModel
from ragkv.needles import NeedleSet, make
from ragkv.passes import append
from ragkv.reader import Context, Fresh, Reader
from ragkv.recompute.base import Plan
from ragkv.watch import Watch

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""


@dataclass(frozen=True)
class QualityParams:
    """sets of `documents` documents, one chunk each · questions of each set · seed of the first set; calibration uses
    other seeds."""

    methods: tuple[str, ...] = (FULL, "reuse", "samkv-fusion", "scout")
    sets: int = 4
    documents: int = 8
    questions: int = 25
    seed: int = 1
    max_tokens: int = 24


@dataclass(frozen=True)
class Figures:
    """Of one question, or means. recall: all blocks of the answer are kept in every layer · middle: blocks
    kept beside the fixed ones / all blocks · sequence, recompute: tokens kept, recomputed / all tokens."""

    em: float
    f1: float
    recall: float
    middle: float
    sequence: float
    recompute: float


@dataclass(frozen=True)
class Row(Figures):
    """One method over all questions."""

    method: str
    questions: int


def quality(model: DecoderModel, params: QualityParams, progress: Progress) -> list[Row]:
    """Ask every question with every method."""
    reader = Reader(model, model.prompt.prefix)
    outcomes: dict[str, list[Figures]] = {method: [] for method in params.methods}
    total = params.sets * params.questions
    for number in range(params.sets):
        size = model.profile.chunk_tokens - 32
        needles = make(
            params.seed + number, params.documents, size, params.questions, lambda t: len(model.prompt.plain(t))
        )
        chunks = [model.prompt.chunk(document.title, document.text) for document in needles.documents]
        sources = [Fresh(reader.encode(c), model.profile.block, exact=i == 0) for i, c in enumerate(chunks)]
        shared = reader.full(chunks[:-1], chunks[-1], 256, Watch()) if FULL in params.methods else None
        for i in range(len(needles.questions)):
            for method in params.methods:
                outcomes[method].append(_ask(reader, needles, i, method, sources, shared, params.max_tokens))
            progress("ask", number * params.questions + i + 1, total)
    return [_row(method, rows) for method, rows in outcomes.items()]


def _ask(
    reader: Reader,
    needles: NeedleSet,
    i: int,
    method: str,
    sources: Sequence[Fresh],
    shared: Context | None,
    max_tokens: int,
) -> Figures:
    model, question = reader.model, needles.questions[i]
    asked = model.prompt.question(question.question)
    if method == FULL and shared is not None:
        lengths = [shared.position] * model.shape.layers
        shared.cache.truncate(lengths)
        logits = model.forward([append(shared.cache, asked, shared.position)])[0][-1]
        context = Context(shared.cache, logits, shared.position + len(asked), None)
    else:
        context = reader.sparse(sources, asked, METHODS[method](model), max_tokens, Watch())
    sampling = Sampling(max_tokens)
    text = model.tokenizer.decode(
        list(decode(model, context.cache, context.logits, context.position, sampling))
    ).strip()
    chunk = next(n for n, document in enumerate(needles.documents) if document.id == question.document_id)
    gold = gold_blocks(model, needles, question)
    em, match = exact_match(text, [question.answer]), f1(text, [question.answer])
    if context.plan is None:
        return Figures(em, match, 1.0, 1.0, 1.0, 1.0)
    found = all(block in layer[chunk] for layer in context.plan.kept for block in gold)
    return Figures(
        em, match, float(found), *_shares(context.plan, sources, model.profile.initial + model.profile.local)
    )


def _shares(plan: Plan, sources: Sequence[Fresh], fixed: int) -> tuple[float, float, float]:
    """(middle blocks / all blocks, kept tokens / all tokens, recomputed tokens / all tokens), means over layers."""
    pieces, layers = [source.piece for source in sources], len(plan.kept)
    blocks, tokens = sum(p.blocks for p in pieces), sum(p.tokens for p in pieces)
    kept = sum(len(p.rows(layer[i])) for layer in plan.kept for i, p in enumerate(pieces)) / layers
    picked = sum(len(layer[i]) - min(fixed, p.blocks) for layer in plan.kept for i, p in enumerate(pieces)) / layers
    again = sum(len({t for layer in plan.recompute for t in layer[i]}) for i in range(len(pieces)))
    return picked / blocks, kept / tokens, again / tokens


def _row(method: str, answered: Sequence[Figures]) -> Row:
    names = [field.name for field in fields(Figures)]
    means = {name: sum(getattr(figures, name) for figures in answered) / len(answered) for name in names}
    return Row(method=method, questions=len(answered), **means)
