"""Find what ragkv must know about a model before it can choose blocks well: retrieval heads and stable layers.

Both come from generated documents with needle questions (needles.py), read as the service reads them: chunks encoded
alone, the question asked over their fixed blocks only.

    retrieval heads   picked one after another: the head that most improves how often every block of the answer is among
                      the few best; ties go to the larger share of attention on the answer
    stable layers     SamKV appendix A.2: last layers whose attention singles out a chunk's best block
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragkv.engine.chunk_source import InMemoryChunk
from ragkv.engine.needles import NeedleQuestion, NeedleSet, make_needles, span_tokens
from ragkv.engine.prefill import Prefiller
from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import CALIBRATED_BLOCK, Profile
from ragkv.recompute.analysis import stability
from ragkv.recompute.samkv import SamKV
from ragkv.recompute.scout import TAIL, join, pool
from ragkv.types import ChunkKV

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""


@dataclass(frozen=True)
class CalibrationParams:
    """sets, documents, questions: of each set · tokens: of a document; 0 takes the profile's chunk size · heads: at
    most this many retrieval heads · budgets: shares of the blocks at which recall is measured while picking · block:
    tokens of a block from now on; 0 keeps the profile's · power, reach: as in Scout."""

    sets: int = 3
    documents: int = 8
    questions: int = 30
    tokens: int = 0
    heads: int = 4
    budgets: tuple[float, ...] = (0.03, 0.06)
    block: int = CALIBRATED_BLOCK
    power: float = 0.5
    reach: int = 8
    seed: int = 1000


@dataclass(frozen=True)
class CalibrationTrial:
    """One question: masses [L*Hq, N] of every head on every block · fixed, gold [N] bool."""

    masses: Tensor
    fixed: Tensor
    gold: Tensor


@dataclass(frozen=True)
class Calibration:
    """What was found: the profile to save, recall of the answer's blocks at the budgets, A.2 scores per layer."""

    profile: Profile
    recall: tuple[float, ...]
    stability: tuple[int, ...]


def calibrate(model: DecoderModel, params: CalibrationParams, progress: Progress) -> Calibration:
    """Measure the model and return its profile with block, retrieval heads and stable layers filled in."""
    model = _with_block(model, params.block or model.profile.block)
    reader = Prefiller(model, model.prompt.prefix)
    trials: list[CalibrationTrial] = []
    alphas: list[Tensor] = []
    for number in range(params.sets):
        size = params.tokens or model.profile.chunk_tokens - 32
        needles = make_needles(
            params.seed + number, params.documents, size, params.questions, lambda t: len(model.prompt.plain(t))
        )
        chunks = []
        for i, document in enumerate(needles.documents):
            chunks.append(reader.encode(model.prompt.chunk(document.title, document.text)))
            progress("reading", number * params.documents + i + 1, params.sets * params.documents)
        alphas += [chunk.digest.alpha for chunk in chunks]
        for i, question in enumerate(needles.questions):
            trials.append(trial(reader, needles, chunks, question, params.reach))
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
    """The same weights, divided into such blocks."""
    other = copy.copy(model)
    other.profile = replace(model.profile, block=block)
    return other


def trial(
    reader: Prefiller, needles: NeedleSet, chunks: Sequence[ChunkKV], question: NeedleQuestion, reach: int
) -> CalibrationTrial:
    """Attention of the question, by every head, over every block of every chunk."""
    model, profile = reader.model, reader.model.profile
    sources = [InMemoryChunk(chunk, profile.block, exact=i == 0) for i, chunk in enumerate(chunks)]
    fixed = SamKV(initial=profile.initial, local=profile.local).first([source.piece for source in sources])
    queries = reader.queries(sources, fixed, model.prompt.question(question.question), model.shape.layers)
    group = model.shape.q_heads // model.shape.kv_heads
    attention = torch.cat(
        [
            _attention(rows[-TAIL:], torch.cat([chunk.k[layer] for chunk in chunks]).to(rows), group, model.scale)
            for layer, rows in enumerate(queries)
        ]
    )
    masses = pool(attention, [source.piece for source in sources], reach).cpu()
    home = next(d for d in needles.documents if d.id == question.document_id)
    held = gold_blocks(model, home.title, home.text, question.start, question.end)
    flags = [torch.zeros(2, source.piece.blocks, dtype=torch.bool) for source in sources]
    for i, document in enumerate(needles.documents):
        flags[i][0, list(fixed[i])] = True
        if document.id == question.document_id:
            flags[i][1, list(held)] = True
    fixed_flags, gold_flags = torch.cat(flags, dim=1)
    return CalibrationTrial(masses, fixed_flags, gold_flags)


def _attention(asked: Tensor, keys: Tensor, group: int, scale: float) -> Tensor:
    """Mean over the asking tokens [T, Hq, d] of each query head's attention to keys [N, Hkv, d]: [Hq, N]."""
    grouped = asked.view(asked.shape[0], -1, group, asked.shape[2])
    scores = torch.einsum("tgrd,ngd->grtn", grouped, keys) * scale
    return scores.softmax(-1).mean(2).flatten(0, 1)


def gold_blocks(model: DecoderModel, title: str, text: str, start: int, end: int) -> tuple[int, ...]:
    """Blocks of a chunk that hold a token of text[start:end]."""
    piece = model.prompt.chunk_text(title, text)
    offsets = model.tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    shift = piece.index(text)
    span = span_tokens(offsets, start + shift, end + shift)
    return tuple(sorted({token // model.profile.block for token in span}))


def pick_heads(trials: Sequence[CalibrationTrial], params: CalibrationParams) -> list[int]:
    """Greedy choice; stops when another head no longer helps."""
    heads: list[int] = []
    best = 0.0
    for _ in range(params.heads):
        gains = [
            (_merit(trials, [*heads, head], params), -head)
            for head in range(trials[0].masses.shape[0])
            if head not in heads
        ]
        merit, head = max(gains)
        if merit <= best:
            break
        best, heads = merit, [*heads, -head]
    return heads


def recall(trials: Sequence[CalibrationTrial], heads: Sequence[int], budget: float, power: float) -> float:
    """Share of the questions all of whose answer blocks are fixed or among the best `budget` of all blocks."""
    found = 0
    for t in trials:
        mass = join(t.masses[list(heads)], power).masked_fill(t.fixed, -1.0)
        best = mass.topk(max(1, int(budget * mass.shape[0]))).indices
        kept = t.fixed.clone()
        kept[best] = True
        found += bool(kept[t.gold].all())
    return found / len(trials)


def stable_layers(scores: Sequence[int]) -> tuple[int, ...]:
    """N*: the last layers in a row that score at least half the maximum, at least max(1, round(L/8)) of them (paper
    silent on the threshold; it takes the last few layers of every model)."""
    layers = len(scores)
    first = layers - max(1, round(layers / 8))
    while first > layers // 2 and scores[first - 1] * 2 >= max(scores) > 0:
        first -= 1
    return tuple(range(first, layers))


def _merit(trials: Sequence[CalibrationTrial], heads: Sequence[int], params: CalibrationParams) -> float:
    on_answer = sum(float(join(t.masses[list(heads)], params.power)[t.gold].sum()) for t in trials) / len(trials)
    return sum(recall(trials, heads, budget, params.power) for budget in params.budgets) + 0.2 * on_answer
