"""Calibration: find the retrieval heads and stable layers of a model, which block selection needs.

Both come from questions with a known answer span: generated ones (`needle_sets`), or ones about a user's own documents
(tune/document_sets.py). They are processed as in the service: chunks are encoded alone, and the question is asked over
what scout's evidence finds best, as scout asks it.

    retrieval heads   added one by one: the head that most improves how often every block of the answer is among the few
                      best. Ties go to the larger share of attention on the answer
    reach             of several, the one whose heads find most
    cap               the smallest share of the blocks that finds as many answers as the largest, within `CAP_LOSS`
    stable layers     SamKV appendix A.2: the last layers in whose attention a chunk's best block stands out
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragkv.engine.evidence import EvidenceFinder, as_hits
from ragkv.engine.head_choice import (
    USUAL,
    CalibrationParams,
    CalibrationTrial,
    gold_blocks,
    pick_heads,
    recall,
    score_heads,
    smallest_cap,
    stable_layers,
)
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.needles import make_needles
from ragkv.engine.prefill import Prefiller
from ragkv.errors import InputError
from ragkv.model.decoder import DecoderModel
from ragkv.model.layer_kinds import LayerKind
from ragkv.model.profile import Profile
from ragkv.recompute.analysis import stability
from ragkv.recompute.base import Blocks
from ragkv.recompute.evidence import WITHOUT_PASS, evidence_logits
from ragkv.recompute.scout import TAIL, Scout, pool_blocks
from ragkv.types import ChunkKV

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""


MakeEvidence = Callable[[DecoderModel], EvidenceFinder]
"""Makes what finds evidence in chunks that a model reads."""


@dataclass(frozen=True)
class CalibrationQuestion:
    """A question and the characters start..end of a chunk's text that answer it."""

    text: str
    chunk: int
    start: int
    end: int


@dataclass(frozen=True)
class CalibrationSet:
    """Chunks, (title, text) in the order of the prompt, and questions about them."""

    chunks: tuple[tuple[str, str], ...]
    questions: tuple[CalibrationQuestion, ...]


@dataclass(frozen=True)
class NeedleSetParams:
    """Sizes of the generated questions.

    Attributes:
        sets: Needle sets.
        documents: Documents per set.
        questions: Questions per set.
        tokens: Tokens per document; 0 takes the profile's chunk size.
        seed: Seed of the first set.
    """

    sets: int = 3
    documents: int = 8
    questions: int = 30
    tokens: int = 0
    seed: int = 1000


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration.

    Attributes:
        profile: The profile to save.
        questions: Number of questions.
        recall: Recall of the answer's blocks at each budget.
        stability: A.2 score of each layer.
    """

    profile: Profile
    questions: int
    recall: tuple[float, ...]
    stability: tuple[int, ...]


def needle_sets(model: DecoderModel, params: NeedleSetParams = NeedleSetParams()) -> list[CalibrationSet]:
    """Generate documents with one planted answer per question, each document a chunk."""
    return [_needle_set(model, params, params.seed + number) for number in range(params.sets)]


def _needle_set(model: DecoderModel, params: NeedleSetParams, seed: int) -> CalibrationSet:
    size = params.tokens or model.profile.chunk_tokens - 32
    made = make_needles(seed, params.documents, size, params.questions, lambda text: len(model.prompt.plain(text)))
    numbers = {document.id: number for number, document in enumerate(made.documents)}
    asked = (CalibrationQuestion(q.question, numbers[q.document_id], q.start, q.end) for q in made.questions)
    return CalibrationSet(tuple((document.title, document.text) for document in made.documents), tuple(asked))


def calibrate(
    model: DecoderModel,
    sets: Sequence[CalibrationSet],
    progress: Progress,
    params: CalibrationParams = USUAL,
    evidence: MakeEvidence | None = None,
) -> Calibration:
    """Measure a model.

    Args:
        model: The model; it is not changed.
        sets: Questions with known answers.
        progress: Called after each step.
        params: Parameters of the calibration.
        evidence: Makes what finds evidence for the model; without it questions are asked over S alone.

    Returns:
        The profile with block, retrieval heads, reach, cap and stable layers filled in, and the measured scores.

    Raises:
        InputError: There are no questions, or queries cannot be compared with stored keys.
    """
    _check(model, sets)
    model = _with_block(model, params.block or model.profile.block)
    prefiller, finder = Prefiller(model, model.prompt.prefix), evidence(model) if evidence else None
    trials = [list[CalibrationTrial]() for _ in params.reaches]
    alphas: list[Tensor] = []
    for chunks, question_set in _encoded(prefiller, sets, progress):
        alphas += [chunk.digest.alpha for chunk in chunks]
        for done, question in enumerate(question_set.questions, 1):
            made = run_trials(prefiller, chunks, question_set, question, params.reaches, finder)
            for mine, trial in zip(trials, made, strict=True):
                mine.append(trial)
            progress("asking", done, len(question_set.questions))
    picked = [pick_heads(mine, params) for mine in trials]
    merits = [score_heads(mine, heads, params) for mine, heads in zip(trials, picked, strict=True)]
    best = merits.index(max(merits))
    found, heads = trials[best], picked[best]
    recalls = [recall(found, heads, cap, params.power) for cap in params.caps]
    scores = stability(alphas)
    profile = replace(
        model.profile,
        retrieval_heads=tuple(divmod(head, model.shape.q_heads) for head in heads),
        scout_reach=params.reaches[best],
        scout_cap=smallest_cap(params.caps, recalls),
        stable_layers=stable_layers(scores),
    )
    at_budgets = tuple(recall(found, heads, budget, params.power) for budget in params.budgets)
    return Calibration(profile, len(found), at_budgets, tuple(scores))


def _check(model: DecoderModel, sets: Sequence[CalibrationSet]) -> None:
    """Raise InputError where nothing can be measured."""
    if not model.compares_heads:
        raise InputError(f"{model.name} has no retrieval heads to find: stored keys are not the heads of its layers")
    if not any(each.questions for each in sets):
        raise InputError("no question could be made of these documents; give more or longer ones")


def _encoded(
    prefiller: Prefiller, sets: Sequence[CalibrationSet], progress: Progress
) -> Iterator[tuple[list[ChunkKV], CalibrationSet]]:
    """Yield the chunks of every set, encoded alone."""
    total, done = sum(len(each.chunks) for each in sets), 0
    for question_set in sets:
        chunks = list[ChunkKV]()
        for chunk in question_set.chunks:
            chunks.append(prefiller.encode(prefiller.model.prompt.chunk(*chunk)))
            done += 1
            progress("reading", done, total)
        yield chunks, question_set


def _with_block(model: DecoderModel, block: int) -> DecoderModel:
    """Return a model with the same weights and another block size."""
    other = copy.copy(model)
    other.profile = replace(model.profile, block=block)
    return other


def run_trials(
    prefiller: Prefiller,
    chunks: Sequence[ChunkKV],
    asked: CalibrationSet,
    question: CalibrationQuestion,
    reaches: Sequence[int],
    finder: EvidenceFinder | None = None,
) -> list[CalibrationTrial]:
    """Measure the attention of every head to every block of every chunk for one question, once for each reach.

    Args:
        prefiller: Prefills with the model.
        chunks: The encoded chunks of the set.
        asked: The set.
        question: One of its questions.
        reaches: As in `Scout`.
        finder: Finds the blocks over which the question is asked; without it that is S alone.
    """
    model, block = prefiller.model, prefiller.model.profile.block
    sources = [InMemoryChunk(chunk, block, exact=i == 0) for i, chunk in enumerate(chunks)]
    read = _look(model, asked, question, finder) if finder else ((),) * len(sources)
    queries = prefiller.queries(sources, read, model.prompt.question(question.text), model.shape.layers)
    group = model.shape.q_heads // model.shape.kv_heads
    attention = torch.cat(
        [
            _attention(rows[-TAIL:], torch.cat([chunk.k[layer] for chunk in chunks]).to(rows), group, kind)
            for layer, (rows, kind) in enumerate(zip(queries, model.kinds, strict=True))
        ]
    )
    title, text = asked.chunks[question.chunk]
    flags = [torch.zeros(source.piece.blocks, dtype=torch.bool) for source in sources]
    flags[question.chunk][list(gold_blocks(model, title, text, question.start, question.end))] = True
    pieces, gold = [source.piece for source in sources], torch.cat(flags)
    return [CalibrationTrial(pool_blocks(attention, pieces, reach).cpu(), gold) for reach in reaches]


def _look(
    model: DecoderModel, asked: CalibrationSet, question: CalibrationQuestion, finder: EvidenceFinder
) -> tuple[Blocks, ...]:
    """Return the blocks over which scout asks the question, whichever heads it has."""
    tokens = [model.prompt.chunk(*chunk) for chunk in asked.chunks]
    found = finder.find(question.text, as_hits(asked.chunks, tokens), WITHOUT_PASS)
    logits = evidence_logits(found, WITHOUT_PASS)
    blocks, shape = [-(-len(each) // model.profile.block) for each in tokens], model.shape
    scout = Scout(shape.layers, (), shape.q_heads // shape.kv_heads, model.scale)
    return scout.look_at(blocks, logits)


def _attention(queries: Tensor, keys: Tensor, group: int, kind: LayerKind) -> Tensor:
    """Average the attention of queries [T, Hq, d] to keys [N, Hkv, d] over the tokens: [Hq, N].

    A head with a window retrieves nothing from afar, so it gets the same share for every key.
    """
    if kind.window is not None:
        return keys.new_full((queries.shape[1], keys.shape[0]), 1 / keys.shape[0])
    grouped = queries.view(queries.shape[0], -1, group, queries.shape[2])
    scores = torch.einsum("tgrd,ngd->grtn", grouped, keys) * kind.scale
    return scores.softmax(-1).mean(2).flatten(0, 1)
