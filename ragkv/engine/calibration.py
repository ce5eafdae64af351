"""Calibration: find the retrieval heads and stable layers of a model, which block selection needs.

Both come from generated documents with needle questions (needles.py). They are processed as in the service: chunks are
encoded alone, and the question is asked over S alone, as scout's first look asks it.

    retrieval heads   added one by one: the head that most improves how often every block of the answer is among the few
                      best. Ties go to the larger share of attention on the answer
    stable layers     SamKV appendix A.2: the last layers in whose attention a chunk's best block stands out
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.needles import NeedleQuestion, NeedleSet, make_needles, span_tokens
from ragkv.engine.prefill import Prefiller
from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import CALIBRATED_BLOCK, Profile
from ragkv.recompute.analysis import stability
from ragkv.recompute.scout import TAIL, join_heads, pool_blocks
from ragkv.types import ChunkKV

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""


@dataclass(frozen=True)
class CalibrationParams:
    """Parameters of a calibration.

    Attributes:
        sets: Needle sets.
        documents: Documents per set.
        questions: Questions per set.
        tokens: Tokens per document; 0 takes the profile's chunk size.
        heads: Largest number of retrieval heads.
        budgets: Shares of the blocks at which recall is measured.
        block: Tokens per block from now on; 0 keeps the profile's.
        power: As in `Scout`.
        reach: As in `Scout`.
        seed: Seed of the first set.
    """

    sets: int = 3
    documents: int = 8
    questions: int = 30
    tokens: int = 0
    heads: int = 3
    budgets: tuple[float, ...] = (0.03, 0.06)
    block: int = CALIBRATED_BLOCK
    power: float = 0.5
    reach: int = 8
    seed: int = 1000


@dataclass(frozen=True)
class CalibrationTrial:
    """Attention of one question.

    Attributes:
        masses: Share of the attention of every head on every block [L*Hq, N].
        gold: bool [N], blocks that hold the answer.
    """

    masses: Tensor
    gold: Tensor


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration.

    Attributes:
        profile: The profile to save.
        recall: Recall of the answer's blocks at each budget.
        stability: A.2 score of each layer.
    """

    profile: Profile
    recall: tuple[float, ...]
    stability: tuple[int, ...]


def calibrate(model: DecoderModel, params: CalibrationParams, progress: Progress) -> Calibration:
    """Measure a model.

    Args:
        model: The model; it is not changed.
        params: Parameters of the calibration.
        progress: Called after each step.

    Returns:
        The profile with block, retrieval heads and stable layers filled in, and the measured scores.
    """
    model = _with_block(model, params.block or model.profile.block)
    prefiller = Prefiller(model, model.prompt.prefix)
    trials: list[CalibrationTrial] = []
    alphas: list[Tensor] = []
    for number in range(params.sets):
        size = params.tokens or model.profile.chunk_tokens - 32
        needles = make_needles(
            params.seed + number, params.documents, size, params.questions, lambda t: len(model.prompt.plain(t))
        )
        chunks = []
        for i, document in enumerate(needles.documents):
            chunks.append(prefiller.encode(model.prompt.chunk(document.title, document.text)))
            progress("reading", number * params.documents + i + 1, params.sets * params.documents)
        alphas += [chunk.digest.alpha for chunk in chunks]
        for i, question in enumerate(needles.questions):
            trials.append(run_trial(prefiller, needles, chunks, question, params.reach))
            progress("asking", number * params.questions + i + 1, params.sets * params.questions)
    heads = pick_heads(trials, params)
    scores = stability(alphas)
    profile = replace(
        model.profile,
        retrieval_heads=tuple(divmod(head, model.shape.q_heads) for head in heads),
        stable_layers=stable_layers(scores),
    )
    return Calibration(profile, tuple(recall(trials, heads, b, params.power) for b in params.budgets), tuple(scores))


def _with_block(model: DecoderModel, block: int) -> DecoderModel:
    """Return a model with the same weights and another block size."""
    other = copy.copy(model)
    other.profile = replace(model.profile, block=block)
    return other


def run_trial(
    prefiller: Prefiller, needles: NeedleSet, chunks: Sequence[ChunkKV], question: NeedleQuestion, reach: int
) -> CalibrationTrial:
    """Measure the attention of every head to every block of every chunk for one question.

    Args:
        prefiller: Prefills with the model.
        needles: The set of the question.
        chunks: The encoded documents of the set.
        question: The question.
        reach: As in `Scout`.
    """
    model, block = prefiller.model, prefiller.model.profile.block
    sources = [InMemoryChunk(chunk, block, exact=i == 0) for i, chunk in enumerate(chunks)]
    queries = prefiller.queries(
        sources, ((),) * len(sources), model.prompt.question(question.question), model.shape.layers
    )
    group = model.shape.q_heads // model.shape.kv_heads
    attention = torch.cat(
        [
            _attention(rows[-TAIL:], torch.cat([chunk.k[layer] for chunk in chunks]).to(rows), group, model.scale)
            for layer, rows in enumerate(queries)
        ]
    )
    masses = pool_blocks(attention, [source.piece for source in sources], reach).cpu()
    answering = next(d for d in needles.documents if d.id == question.document_id)
    gold = gold_blocks(model, answering.title, answering.text, question.start, question.end)
    flags = [torch.zeros(source.piece.blocks, dtype=torch.bool) for source in sources]
    for flag, document in zip(flags, needles.documents, strict=True):
        if document.id == question.document_id:
            flag[list(gold)] = True
    return CalibrationTrial(masses, torch.cat(flags))


def _attention(queries: Tensor, keys: Tensor, group: int, scale: float) -> Tensor:
    """Average the attention of queries [T, Hq, d] to keys [N, Hkv, d] over the tokens: [Hq, N]."""
    grouped = queries.view(queries.shape[0], -1, group, queries.shape[2])
    scores = torch.einsum("tgrd,ngd->grtn", grouped, keys) * scale
    return scores.softmax(-1).mean(2).flatten(0, 1)


def gold_blocks(model: DecoderModel, title: str, text: str, start: int, end: int) -> tuple[int, ...]:
    """Return the blocks of a chunk that hold a token of text[start:end]."""
    piece = model.prompt.chunk_text(title, text)
    offsets = model.tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    shift = piece.index(text)
    span = span_tokens(offsets, start + shift, end + shift)
    return tuple(sorted({token // model.profile.block for token in span}))


def pick_heads(trials: Sequence[CalibrationTrial], params: CalibrationParams) -> list[int]:
    """Pick retrieval heads greedily, until another head no longer helps."""
    heads: list[int] = []
    best = 0.0
    for _ in range(params.heads):
        candidates = [
            (_score_heads(trials, [*heads, head], params), -head)
            for head in range(trials[0].masses.shape[0])
            if head not in heads
        ]
        merit, head = max(candidates)
        if merit <= best:
            break
        best, heads = merit, [*heads, -head]
    return heads


def recall(trials: Sequence[CalibrationTrial], heads: Sequence[int], budget: float, power: float) -> float:
    """Compute the share of the questions whose answer blocks are all among the best blocks.

    Args:
        trials: The questions.
        heads: Heads that score the blocks.
        budget: Share of all blocks that counts as the best.
        power: As in `Scout`.
    """
    found = 0
    for t in trials:
        mass = join_heads(t.masses[list(heads)], power)
        best = mass.topk(max(1, int(budget * mass.shape[0]))).indices
        kept = torch.zeros_like(t.gold)
        kept[best] = True
        found += bool(kept[t.gold].all())
    return found / len(trials)


def stable_layers(scores: Sequence[int]) -> tuple[int, ...]:
    """Return N*: the last consecutive layers that score at least half the maximum, at least max(1, round(L/8)) layers.

    Paper silent on the threshold; it takes the last few layers of every model.
    """
    layers = len(scores)
    first = layers - max(1, round(layers / 8))
    while first > layers // 2 and scores[first - 1] * 2 >= max(scores) > 0:
        first -= 1
    return tuple(range(first, layers))


def _score_heads(trials: Sequence[CalibrationTrial], heads: Sequence[int], params: CalibrationParams) -> float:
    """Add up recall over the budgets, and a small weight for the share of attention on the answer."""
    on_answer = sum(float(join_heads(t.masses[list(heads)], params.power)[t.gold].sum()) for t in trials) / len(trials)
    return sum(recall(trials, heads, budget, params.power) for budget in params.budgets) + 0.2 * on_answer
