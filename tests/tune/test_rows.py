"""Rows of training compute what the service computes: the oracle is the engine itself."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.registry import make_method
from ragkv.evaluation.questions import Asked
from ragkv.model.decoder import DecoderModel
from ragkv.timing import StepTimer
from ragkv.tune.contexts import Context
from ragkv.tune.masks import RowBatch, full_mask, stored_mask
from ragkv.tune.rows import CHUNK, COPY, PADDING, PREFIX, QUESTION, DropParams, RowMaker, TrainingRow
from ragkv.tune.training import columns

CHUNKS = (
    ("Tarn", "The harbour of Tarn was built in 1889 by Ada Brook, an engineer. " * 4),
    ("Lindmouth", "Ada Brook was born in Lindmouth, where her father kept a mill on the quay. " * 3),
    ("Skerrow", "The light of Skerrow is older than its harbour and was lit with fish oil. " * 5),
)
ASKED = (
    Asked("Who built the harbour of Tarn?", "Ada Brook", 0),
    Asked("Where was Ada Brook born?", "Lindmouth", 1),
    Asked("What was the light lit with?", "fish oil", 2),
)
USUAL = DropParams()


def batch(row: TrainingRow) -> RowBatch:
    found = columns([row])
    return RowBatch(*found["columns"].unbind(1), found["targets"], found["kept"])


def maker(model: DecoderModel, drop: DropParams = USUAL) -> RowMaker:
    return RowMaker(model.tokenizer, model.prompt, model.profile.block, model.tokenizer.eos_token_id, drop)


def logits(model: DecoderModel, rows: RowBatch, mask: Tensor) -> Tensor:
    """Logits of the loaded model's own forward at the targets."""
    bias = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
    with torch.inference_mode():
        hidden = model.body(
            input_ids=rows.ids, position_ids=rows.positions, attention_mask=bias[:, None], use_cache=False
        ).last_hidden_state
        return model.lm_head(hidden[rows.targets])


@pytest.fixture(scope="module")
def row(model: DecoderModel) -> TrainingRow:
    return maker(model, DropParams(reuse=1.0)).row(Context(CHUNKS, ASKED), 512, Random(0))


def answers(model: DecoderModel) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(model.prompt.question(each.text), model.prompt.answer(each.answer)) for each in ASKED]


def expected(model: DecoderModel, method: str) -> tuple[Tensor, list[list[tuple[int, ...]]]]:
    """Logits that the engine computes at the first token of every answer, and the blocks kept for it."""
    prefiller = Prefiller(model, model.prompt.prefix)
    chunks = [model.prompt.chunk(*chunk) for chunk in CHUNKS]
    found, kept = [], []
    for question, _ in answers(model):
        timer = StepTimer(model.device)
        if method == "full":
            context = prefiller.prefill_full(chunks, question, timer)
        else:
            encoded = [prefiller.encode(chunk) for chunk in chunks]
            sources = [InMemoryChunk(kv, model.profile.block, i == 0) for i, kv in enumerate(encoded)]
            context = prefiller.prefill_sparse(sources, question, make_method(method, model), timer)
            assert context.plan is not None
            kept.append([tuple(blocks) for blocks in context.plan.kept[0]])
        found.append(context.logits)
    return torch.stack(found), kept


def firsts(row: TrainingRow) -> list[int]:
    """Index among the targets of the first token of every answer."""
    places = np.flatnonzero(row.targets)
    parts = row.parts[places]
    return [int(np.flatnonzero(parts == number)[0]) for number in range(len(ASKED))]


def test_full_attention_of_a_row_is_the_engines_full_prefill(model: DecoderModel, row: TrainingRow) -> None:
    rows = batch(row)
    mine = logits(model, rows, full_mask(rows))[firsts(row)]
    torch.testing.assert_close(mine, expected(model, "full")[0], rtol=0, atol=2e-4)


def test_the_stored_mask_of_a_row_is_the_engines_reuse(model: DecoderModel, row: TrainingRow) -> None:
    rows = batch(row)
    mine = logits(model, rows, stored_mask(rows))[firsts(row)]
    torch.testing.assert_close(mine, expected(model, "reuse")[0], rtol=0, atol=2e-4)


def test_with_dropped_blocks_it_is_scout_without_repair(model: DecoderModel, row: TrainingRow) -> None:
    wanted, kept = expected(model, "scout:repair=none,cap=0.2")
    sizes = [-(-len(model.prompt.chunk(*chunk)) // model.profile.block) for chunk in CHUNKS]
    starts = np.cumsum([0, *sizes[:-1]])
    seen = np.zeros_like(row.kept)
    for question, chunks in enumerate(kept):
        for start, blocks in zip(starts, chunks, strict=True):
            seen[question, [start + block for block in blocks]] = True
    assert 0.1 < seen.mean() < 0.9
    dropped = TrainingRow(row.ids, row.positions, row.kinds, row.parts, row.blocks, row.targets, seen)
    rows = batch(dropped)
    mine = logits(model, rows, stored_mask(rows))[firsts(row)]
    torch.testing.assert_close(mine, wanted, rtol=0, atol=2e-4)
    whole = logits(model, batch(row), stored_mask(batch(row)))[firsts(row)]
    assert (whole - wanted).abs().max() > 0.01, "the blocks matter"


@pytest.mark.parametrize("stored", [False, True])
def test_masks_are_their_definition(model: DecoderModel, stored: bool) -> None:
    made = maker(model, DropParams(reuse=0.3)).row(Context(CHUNKS, ASKED), 400, Random(3))
    rows = batch(made)
    found = (stored_mask if stored else full_mask)(rows)[0]
    for q in range(400):
        for k in range(400):
            assert found[q, k] == sees(made, q, k, stored), (q, k)


def sees(row: TrainingRow, q: int, k: int, stored: bool) -> bool:
    """Whether token q sees token k, said in words."""
    if k > q:
        return False
    if q == k:
        return True
    a, b = row.kinds[q], row.kinds[k]
    same = row.parts[q] == row.parts[k]
    if a == PADDING or b == PADDING:
        return False
    if a == PREFIX:
        return bool(b == PREFIX)
    if a == COPY:
        return bool(b == COPY and same)
    if a == CHUNK:
        return bool(same and b in (COPY, CHUNK)) if stored else bool(b in (PREFIX, CHUNK))
    assert a == QUESTION
    if b == QUESTION:
        return bool(same)
    if b == CHUNK:
        return bool(row.kept[row.parts[q], row.blocks[k]]) if stored else True
    return bool(b == PREFIX)


def test_targets_are_the_tokens_before_an_answers(model: DecoderModel, row: TrainingRow) -> None:
    after = np.roll(row.ids, -1)[row.targets].tolist()
    eos = model.tokenizer.eos_token_id
    assert after == [token for _, answer in answers(model) for token in (*answer, eos)]


def test_questions_start_at_the_end_of_the_context(model: DecoderModel, row: TrainingRow) -> None:
    end = len(model.prompt.prefix) + sum(len(model.prompt.chunk(*chunk)) for chunk in CHUNKS)
    for number in range(len(ASKED)):
        asking = (row.kinds == QUESTION) & (row.parts == number)
        assert row.positions[asking][0] == end


def test_what_does_not_fit_is_left_out(model: DecoderModel) -> None:
    short = maker(model).row(Context(CHUNKS, ASKED), 100, Random(0))
    assert len(short.ids) == 100
    assert set(short.parts[short.kinds == CHUNK].tolist()) == {0}
    nothing = maker(model).row(Context(CHUNKS, ASKED), 20, Random(0))
    assert not nothing.targets.any()


def test_the_answers_block_and_the_opening_of_its_chunk_are_kept(model: DecoderModel) -> None:
    drop = DropParams(reuse=0.0, cap=(0.0, 0.0), answer=1.0)
    made = maker(model, drop).row(Context(CHUNKS, ASKED), 512, Random(1))
    block = model.profile.block
    start = 0
    for number, chunk in enumerate(CHUNKS):
        tokens, answer = model.prompt.chunk(*chunk), model.prompt.answer(ASKED[number].answer)
        assert made.kept[number, start], "the opening holds the title"
        places = [at for at in range(len(tokens)) if tokens[at : at + len(answer)] == answer]
        assert places
        assert all(made.kept[number, start + (at + i) // block] for at in places for i in range(len(answer)))
        start += -(-len(tokens) // block)
    assert not made.kept.all()


def test_a_chunk_of_which_a_question_sees_nothing_keeps_no_opening(model: DecoderModel) -> None:
    """The smallest number of blocks is two, so of three chunks one is not seen."""
    chunks = [*CHUNKS, ("Other", "Nothing of this is asked for. " * 8)]
    made = maker(model, DropParams(reuse=0.0, cap=(0.0, 0.0), answer=1.0)).row(Context(chunks, ASKED), 512, Random(1))
    counts = [-(-len(model.prompt.chunk(*chunk)) // model.profile.block) for chunk in chunks]
    starts = np.cumsum([0, *counts])
    seen = np.array([made.kept[:, start:stop].any(1) for start, stop in pairwise(starts)])
    assert not seen.all()
    assert (seen == made.kept[:, starts[:-1]].T).all(), "a chunk's opening is seen where anything of the chunk is"


def test_a_row_depends_on_its_random_numbers_alone(model: DecoderModel) -> None:
    first, second, other = (maker(model).row(Context(CHUNKS, ASKED), 512, Random(seed)) for seed in (5, 5, 6))
    assert (first.kept == second.kept).all()
    assert (first.ids == other.ids).all()
    assert (first.kept != other.kept).any()
