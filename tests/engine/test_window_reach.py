"""Layers with a window hold what their rows can see, at its true positions, and answers do not change."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import transformers

from ragkv.engine.decoding import decode
from ragkv.engine.generation import Sampling
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.registry import make_method
from ragkv.engine.window_reach import WindowReach
from ragkv.ingest.pipeline import ingest
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_kinds import LayerKind
from ragkv.model.layer_pass import Pass, Step
from ragkv.recompute.base import Piece, Plan
from ragkv.recompute.reuse import Reuse
from ragkv.timing import StepTimer
from ragkv.types import AskOptions, Document
from tests import families
from tests.libraries import open_engine

PREFIX, QUESTIONS = families.tokens(3, 99), [families.tokens(n, 50 + n) for n in (5, 4)]
CHUNKS = [families.tokens(n, n) for n in (18, 22, 13, 9)]
FAMILIES = ("gemma3_text", "gemma4_text", "gemma4_inputs", "gemma4_small", "gpt_oss", "exaone4", "mistral")
METHODS = (
    "reuse",
    "scout",
    "scout:repair=none",
    "samkv-overwrite",
    "samkv-fusion",
    "epic:link=3",
    "cacheblend",
    "random",
)


def sources(reader: Prefiller) -> list[InMemoryChunk]:
    return [InMemoryChunk(kv, 4, exact=i == 0) for i, kv in enumerate(reader.encode_many(CHUNKS))]


def two_turns(name: str, method: str) -> list[tuple[torch.Tensor, list[int], list[int]]]:
    """Logits, answer and rows by layer of two turns; two chunks join in each."""
    model = families.model(name)
    reader = Prefiller(model, PREFIX)
    state, found, read = reader.new_state(), [], sources(reader)
    for count, question in zip((2, 4), QUESTIONS, strict=True):
        made = make_method(method, model)
        context = reader.prefill_sparse(read[:count], question, made, StepTimer(), PrefillOptions(8), state)
        rows = list(context.cache.lengths)
        answer = list(decode(model, context.cache, context.logits, context.position, Sampling(5)))
        state.append_answer(answer, (5,))
        found.append((context.logits, answer, rows))
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_left_out_of_windows_changes_no_answer(monkeypatch, name, method):
    if method.startswith("samkv") and not families.model(name).compares_heads:
        pytest.skip("the method is refused")
    limited = two_turns(name, method)
    monkeypatch.setattr(WindowReach, "limit", lambda reach, requested, computed=None: list(requested))
    for (logits, answer, rows), (everything, other, more) in zip(limited, two_turns(name, method), strict=True):
        torch.testing.assert_close(logits, everything, rtol=0, atol=1e-4)
        assert answer == other
        assert sum(rows) < sum(more) or method == "cacheblend"


def test_without_repair_windows_hold_the_end_of_the_last_chunks_alone():
    """The window is 8: the question's first row sees 7 tokens before it, in the last blocks of 4, 4 and 2 tokens."""
    model = families.model("gemma3_text")
    assert [kind.window for kind in model.kinds] == [8] * 5 + [None]
    reader = Prefiller(model, PREFIX)
    read = sources(reader)[:2]
    context = reader.prefill_sparse(read, QUESTIONS[0], Reuse(6), StepTimer())
    assert context.cache.lengths == [len(PREFIX) + 10 + 5] * 5 + [len(PREFIX) + 18 + 22 + 5]


def reach(windows: list[int | None], blocks: int = 5) -> WindowReach:
    """Two chunks of 18 tokens in blocks of 4, from position 3 on."""
    digest = None
    pieces = [Piece(18, 4, digest), Piece(18, 4, digest)]
    return WindowReach([LayerKind(0, 1.0, window) for window in windows], pieces, [3, 21], 39)


ALL = ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4))


def test_windows_hold_all_that_the_question_sees_whatever_a_plan_keeps():
    plan = Plan((((0,), (0,)),) * 2, (((), ()),) * 2, (((), ()),) * 2)
    assert reach([7, None]).limit_plan(plan).kept == (((), (3, 4)), ((0,), (0,)))


def test_a_block_stays_where_one_of_its_tokens_is_seen_by_the_question():
    found = reach([None, 1, 2, 3, 4, 7, 19, 20]).limit((ALL,) * 8)
    assert found[0] == ALL
    assert found[1] == ((), ())  # the question's first row sees itself alone
    assert found[2] == found[3] == ((), (4,))  # positions 37 and 38
    assert found[4] == found[5] == ((), (3, 4))  # positions 33 to 36 as well
    assert found[6] == ((), (0, 1, 2, 3, 4))
    assert found[7] == ((4,), (0, 1, 2, 3, 4))


def test_a_block_stays_where_a_computed_row_sees_it():
    computed = (((), ()), ((9,), (0, 1)))  # positions 12, and 21 and 22
    assert reach([2, 2]).limit((ALL,) * 2, computed)[0] == ((), (4,))
    assert reach([2, 2]).limit((ALL,) * 2, computed)[1] == ((2, 4), (0, 4))
    assert reach([3, 3]).limit((ALL,) * 2, computed)[1] == ((1, 2, 4), (0, 4))


def test_plans_that_are_completed_while_they_run_keep_everything():
    plan = Plan((ALL,), (((), ()),), (((), ()),), expansion=lambda layer, queries, keys: ())
    assert reach([2]).limit_plan(plan) is plan
    assert reach([2]).limit_plan(replace(plan, expansion=None)).kept == (((), (4,)),)
    assert reach([None]).limit_plan(plan) is plan


@dataclass(frozen=True)
class Some(Reuse):
    """Keeps some blocks in every layer, the end that a window shows among them, and recomputes all of their tokens."""

    def plan(self, pieces, queries, read=()):
        kept = ((1, 3), (0, 3, 4, 5))
        again = tuple(piece.rows(blocks) for piece, blocks in zip(pieces, kept, strict=True))
        nothing = ((), ())
        return Plan((kept,) * self.layers, (again,) * self.layers, (nothing,) * self.layers, one_pass=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_windows_count_true_positions_across_dropped_blocks(name):
    """The reference is one pass over the kept tokens, each at its place in the whole context."""
    model = families.model(name)
    reader = Prefiller(model, PREFIX)
    pieces = [InMemoryChunk(kv, 4) for kv in reader.encode_many(CHUNKS[:2])]
    context = reader.prefill_sparse(pieces, QUESTIONS[0], Some(model.shape.layers), StepTimer())
    whole = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *QUESTIONS[0]]
    kept = [*range(3), *range(7, 11), *range(15, 19), *range(21, 25), *range(33, 43), *range(43, 48)]

    def plainly(positions: list[int]) -> torch.Tensor:
        ids, at = torch.tensor(whole)[kept], torch.tensor(positions)
        cache = ContextCache(model.shape, len(kept), model.dtype)
        steps = [Step(None, cache.reserve(layer, at)) for layer in range(model.shape.layers)]
        return model.forward([Pass(ids, at, cache, steps)])[0][-1]

    torch.testing.assert_close(context.logits, plainly(kept), rtol=0, atol=1e-4)
    assert (context.logits - plainly(list(range(len(kept))))).abs().max() > 1e-3, "packed positions see more"


def test_a_question_loads_a_third_of_what_it_loads_where_all_layers_are_full(tmp_path, tiny_folder, embedder):
    """Gemma's pattern: five layers with a window, one without."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    text = " ".join(f"The harbour of Tarn number {n} was built in {1800 + n} by Edda." for n in range(90))
    answers = {}
    for types in (None, ["full_attention"] * 6):
        folder = tmp_path / str(types is None)
        fields = {"vocab_size": len(tokenizer), "sliding_window": 64, "max_position_embeddings": 4096}
        families.weights("gemma3_text", **fields, layer_types=types).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model = DecoderModel.load(str(folder), "cpu", "float32")
        with open_engine(tmp_path / f"{folder.name}-data", model, embedder, chunk_tokens=512) as engine:
            assert engine.reuse_refused == ""
            ingest(engine, Document("tarn", "Tarn", text))
            answers[types is None] = engine.answer("Who built it?", AskOptions(method="reuse", max_tokens=2)).report
    windows, full = answers[True].bytes, answers[False].bytes
    assert answers[True].cache.hits.store == answers[True].cache.chunks > 3
    assert full.loaded == full.context_kv == windows.context_kv
    assert windows.loaded * 3 <= full.loaded
    assert 0 < windows.windows == windows.loaded - full.loaded // 6
    assert full.windows == 0
