"""First passes of several questions in one forward equal those of each question alone, whatever their methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.passes import Passes, run_alone
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefilledContext, PrefillOptions
from ragkv.model.decoder import DecoderModel
from ragkv.model.layer_pass import Pass
from ragkv.recompute.base import Method
from ragkv.recompute.cacheblend import CacheBlend
from ragkv.recompute.epic import Epic
from ragkv.recompute.multi_infllm import MultiInfLLM
from ragkv.recompute.reuse import Reuse
from ragkv.recompute.samkv import SamKV
from ragkv.recompute.scout import Scout
from ragkv.timing import StepTimer
from tests import tiny

T = TypeVar("T")

CHUNKS = [tiny.tokens(n, n) for n in (30, 26, 41)]
LAYERS = (2, 3)
HEADS = ((1, 1), (2, 6))
MAKERS: tuple[Callable[[Prefiller], Method | None], ...] = (
    lambda reader: None,  # a full prefill
    lambda reader: Reuse(4),
    lambda reader: Scout(layers=4, heads=HEADS, group=4, scale=reader.model.scale, floor=1, cap=0.2),
    lambda reader: SamKV(layers=LAYERS, update="overwrite", extremes="dynamic"),
    lambda reader: Epic(4, link=9),
    lambda reader: CacheBlend(4),
    lambda reader: MultiInfLLM(4, local=2, share=0.2),
)


def passes_of(reader: Prefiller, method: Method | None, question: Sequence[int]) -> Passes[PrefilledContext]:
    """The passes of a question."""
    if method is None:
        return reader.full_passes(CHUNKS, question, StepTimer(), PrefillOptions(8))
    sources = [InMemoryChunk(reader.encode(chunk), 4, exact=not i) for i, chunk in enumerate(CHUNKS)]
    return reader.sparse_passes(sources, question, method, StepTimer(), PrefillOptions(8))


def count_passes(model: DecoderModel, passes: Passes[T]) -> tuple[T, int]:
    """Run the passes of one question; return what came of them, and how many they were."""
    count = 0

    class Counting:
        def forward(self, passes: Sequence[Pass]) -> list[Tensor]:
            nonlocal count
            count += 1
            return model.forward(passes)

    return run_alone(Counting(), passes), count  # type: ignore[arg-type]


def run_together(model: DecoderModel, passes: Sequence[Passes[T]]) -> tuple[list[T], int]:
    """Run the next passes of all in one forward, until all have ended; return what came of them, and the forwards."""
    found, forwards = dict[int, T](), 0
    waiting = {i: next(each) for i, each in enumerate(passes)}
    while waiting:
        logits, forwards = model.forward(list(waiting.values())), forwards + 1
        for i, rows in zip(list(waiting), logits, strict=True):
            try:
                waiting[i] = passes[i].send(rows)
            except StopIteration as end:
                found[i] = end.value
                del waiting[i]
    return [found[i] for i in range(len(passes))], forwards


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_questions_that_are_prefilled_together_equal_those_alone(kind: str) -> None:
    reader = Prefiller(tiny.model(kind), tiny.tokens(3, 99))
    reader.model.profile = replace(reader.model.profile, retrieval_heads=HEADS)
    asked = [(make(reader), tiny.tokens(5 + i, 50 + i)) for i, make in enumerate(MAKERS)]
    alone, counts = zip(*(count_passes(reader.model, passes_of(reader, *each)) for each in asked), strict=True)
    together, forwards = run_together(reader.model, [passes_of(reader, *each) for each in asked])
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=1e-10)
        assert (a.cache.lengths, a.position) == (b.cache.lengths, b.position)
        for layer in range(reader.model.shape.layers):
            torch.testing.assert_close(a.cache.k(layer), b.cache.k(layer), rtol=0, atol=1e-10)
            torch.testing.assert_close(a.cache.v(layer), b.cache.v(layer), rtol=0, atol=1e-10)
    assert forwards == max(counts) > reader.model.shape.layers, "they share their forwards"


@pytest.mark.parametrize("method", [CacheBlend(4), MultiInfLLM(4, local=2, share=0.2)], ids=["refine", "expand"])
def test_a_plan_that_is_completed_on_the_run_leaves_all_passes_to_others(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Prefiller(tiny.model(), tiny.tokens(3, 99))
    passes, forward = passes_of(reader, method, tiny.tokens(5, 50)), reader.model.forward

    def refuse(passes: Sequence[Pass]) -> list[Tensor]:
        raise AssertionError("a pass went around whoever drives the passes")

    monkeypatch.setattr(reader.model, "forward", refuse)
    count, step = 1, next(passes)
    with suppress(StopIteration):
        while isinstance(step, Pass):
            count, step = count + 1, passes.send(forward([step])[0])
    assert count > 2


def test_what_breaks_off_ends_the_work() -> None:
    reader = Prefiller(tiny.model(), tiny.tokens(3, 99))
    passes = passes_of(reader, None, tiny.tokens(5, 50))

    class Broken:
        def forward(self, passes: object) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        run_alone(Broken(), passes)  # type: ignore[arg-type]
    with pytest.raises(StopIteration):
        next(passes)
