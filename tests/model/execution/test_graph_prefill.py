"""Recorded passes, here without a GPU: the same pass, done by the references, is the model's forward."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.methods import FULL, METHOD_NAMES, make_method
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder, make_graph_decoder
from ragkv.model.execution.graph_prefill import LONG, WIDEST
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, Pass, Step, append
from ragkv.model.profile import Profile
from ragkv.timing import StepTimer
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = Profile(block=4, stable_layers=(2, 3), retrieval_heads=((1, 2), (2, 5)))


def begun(model, length):
    """A cache with `length` rows that stand apart, in no order."""
    cache = ContextCache(model.shape, length, model.dtype, model.device)
    model.forward([append(cache, tiny.tokens(length, length), 0, outputs=0)])
    order = torch.randperm(length, generator=torch.Generator().manual_seed(length))
    mixed = ContextCache(model.shape, length, model.dtype, model.device)
    for layer in range(model.shape.layers):
        at = order.to(model.device)
        mixed.put(layer, cache.k(layer)[at], cache.v(layer)[at], 3 * cache.positions(layer)[order])
    return mixed


def question(cache, count):
    """Behind all that the cache holds."""
    return append(cache, tiny.tokens(count, count), 3 * cache.lengths[0] + 5)


def repair(cache, count, asked):
    """Some rows again, in place, and a question behind them."""
    again, behind = torch.arange(1, 1 + count), question(cache, asked)
    at = torch.cat([cache.positions(0)[again], behind.positions])
    order = at.argsort()
    steps = [Step(None, torch.cat([again, step.slots])[order]) for step in behind.steps]
    steps[-1] = replace(steps[-1], leave=torch.tensor([count + asked - 1]))
    return Pass(torch.cat([torch.tensor(tiny.tokens(count, 1)), behind.tokens])[order], at[order], cache, steps)


def check(model, make, tolerance=1e-10, steps=None):
    """make(cache) -> a pass; begins with equal caches: the same logits and rows by both ways."""
    one, two = make(), make()
    steps = steps or GraphDecoder(model)
    assert steps.prefill.supports(one)
    torch.testing.assert_close(steps.prefill.last_logits(one), model.forward([two])[0][-1], rtol=0, atol=tolerance)
    for layer in range(model.shape.layers):
        torch.testing.assert_close(one.cache.k(layer), two.cache.k(layer), rtol=0, atol=tolerance)
        torch.testing.assert_close(one.cache.v(layer), two.cache.v(layer), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_a_question_behind_its_context(kind, kv_heads):
    model = tiny.model(kind, kv_heads=kv_heads)
    for length, count in ((1, 1), (9, 5), (150, 70)):
        check(model, lambda length=length, count=count: question(begun(model, length), count))


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_rows_that_are_repaired_with_the_question(kind):
    model = tiny.model(kind)
    for length, count, asked in ((9, 1, 1), (40, 30, 4), (200, 130, 9)):
        check(model, lambda a=length, b=count, c=asked: repair(begun(model, a), b, c))


def test_a_prefill_of_everything():
    model = tiny.model("qwen3", layers=2)
    for count in (1, 64, 65, 300):
        check(
            model,
            lambda count=count: append(ContextCache(model.shape, 0, model.dtype), tiny.tokens(count, count), 0),
        )


def test_what_a_graph_cannot_do_is_left_to_the_forward():
    model = tiny.model("llama", layers=3)
    takes = GraphDecoder(model).prefill.supports

    def asked(**changes):
        return replace(question(begun(model, 12), 4), **changes)

    assert takes(asked())
    assert not takes(asked(attention=lambda *_, **__: None))
    assert not takes(asked(capture=Capture()))
    assert not takes(asked(hidden=torch.zeros(4, 64), start=1))
    assert not takes(append(begun(model, 12), tiny.tokens(4), 60, outputs=2))
    assert not takes(append(begun(model, 12), tiny.tokens(4), 60, outputs=0, depth=2))
    assert not takes(append(begun(model, 12), tiny.tokens(4), 7))  # before rows that are there
    assert not takes(append(begun(model, 12), tiny.tokens(WIDEST + 1, 3), 60))
    ragged = begun(model, 12)
    ragged.truncate([12, 11, 12])
    assert not takes(question(ragged, 4))
    moved = begun(model, 12)
    moved.positions(1)[3] += 1
    assert not takes(question(moved, 4))
    for at, change in ((0, {"blend": 2}), (1, {"leave": torch.tensor([1, 3])}), (2, {"write": torch.tensor([0])})):
        mended = asked()
        steps = list(mended.steps)
        steps[at] = replace(steps[at], **change)
        assert not takes(replace(mended, steps=steps))


class Coming:
    """Rows that are being written."""

    def wait(self):
        pass


def test_a_long_cache_that_is_still_being_loaded_is_left_to_the_forward():
    """That begins with the first layer while the others come."""
    model = tiny.model("llama", layers=2)
    takes, rows = GraphDecoder(model).prefill.supports, (model.shape.kv_heads, model.shape.head_dim)
    for length, taken in ((100, True), (LONG, False)):
        cache = ContextCache(model.shape, length, model.dtype)
        for layer in range(2):
            none = torch.zeros(length, *rows, dtype=model.dtype)
            cache.put(layer, none, none, torch.arange(length))
        asked = append(cache, tiny.tokens(4), length)
        assert takes(asked)
        cache.record_event(1, Coming())
        assert takes(asked) == taken


class Counted:
    """Knows which passes were taken."""

    def __init__(self, passes):
        self.passes, self.taken = passes, 0

    def takes(self, p):
        found = self.passes.takes(p)
        self.taken += found
        return found

    def read(self, p):
        return self.passes.read(p)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_every_method_reads_a_question_alike(name):
    model, answers = tiny.model("qwen3", profile=HEADS), []
    steps = GraphDecoder(model)
    steps.prefill = Counted(steps.prefill)
    chunks = [tiny.tokens(n, n) for n in (33, 40, 37)]
    for way in (None, steps):
        reader = Prefiller(model, tiny.tokens(3, 7), graph_decoder=way)
        if name == FULL:
            answers.append(reader.prefill_full(chunks, tiny.tokens(6, 6), StepTimer(), PrefillOptions(4)).logits)
            continue
        sources = [InMemoryChunk(reader.encode(chunk), 4, exact=not i) for i, chunk in enumerate(chunks)]
        answers.append(
            reader.prefill_sparse(
                sources, tiny.tokens(6, 6), make_method(name, model), StepTimer(), PrefillOptions(4)
            ).logits
        )
    torch.testing.assert_close(answers[1], answers[0], rtol=0, atol=1e-9)
    # Layers of these hold different rows, or grow.
    assert steps.prefill.taken == (name not in ("multi-infllm", "samkv-overwrite", "samkv-fusion"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="passes are recorded on a GPU")
def test_a_few_graphs_serve_all_passes():
    model = DecoderModel(tiny.weights("qwen3", max_positions=4096).float().cuda())
    steps = make_graph_decoder(model)
    for _ in range(2):
        for length, count, asked in ((9, 1, 1), (40, 30, 4), (42, 28, 9), (600, 500, 30), (1300, 900, 32)):
            check(model, lambda a=length, b=count, c=asked: repair(begun(model, a), b, c), 1e-4, steps)
            check(model, lambda a=length, b=asked: question(begun(model, a), b), 1e-4, steps)
    assert 3 <= steps.recorded <= 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="passes are recorded on a GPU")
def test_what_a_replay_gave_outlives_the_next():
    model = DecoderModel(tiny.weights("llama", max_positions=2048).float().cuda())
    steps = make_graph_decoder(model)
    first = steps.prefill.last_logits(question(begun(model, 20), 5))
    kept = copy.deepcopy(first)
    steps.prefill.last_logits(question(begun(model, 30), 5))
    assert torch.equal(first, kept)
