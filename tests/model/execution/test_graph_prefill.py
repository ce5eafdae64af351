"""Graph prefill equals the model's forward. Without a GPU the references run the same pass."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.registry import FULL, METHOD_NAMES, make_method
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


def prefilled(model, length):
    """Prefill a cache with `length` rows at spaced positions, shuffled."""
    cache = ContextCache(model.shape, length, model.dtype, model.device)
    model.forward([append(cache, tiny.tokens(length, length), 0, outputs=0)])
    order = torch.randperm(length, generator=torch.Generator().manual_seed(length))
    mixed = ContextCache(model.shape, length, model.dtype, model.device)
    for layer in range(model.shape.layers):
        at = order.to(model.device)
        mixed.put(layer, cache.k(layer)[at], cache.v(layer)[at], 3 * cache.positions(layer)[order])
    return mixed


def question(cache, count):
    """Return a pass of a question behind all rows of the cache."""
    return append(cache, tiny.tokens(count, count), 3 * cache.lengths[0] + 5)


def repair(cache, count, question_length):
    """Return a pass that recomputes some rows in place, with a question behind them."""
    again, question_pass = torch.arange(1, 1 + count), question(cache, question_length)
    at = torch.cat([cache.positions(0)[again], question_pass.positions])
    order = at.argsort()
    steps = [Step(None, torch.cat([again, step.slots])[order]) for step in question_pass.steps]
    steps[-1] = replace(steps[-1], leave=torch.tensor([count + question_length - 1]))
    tokens = torch.cat([torch.tensor(tiny.tokens(count, 1)), question_pass.tokens])[order]
    return Pass(tokens, at[order], cache, steps)


def check(model, make, tolerance=1e-10, decoder=None):
    """Compare logits and rows of both paths for a pass that `make` returns."""
    one, two = make(), make()
    decoder = decoder or GraphDecoder(model)
    assert decoder.prefill.supports(one)
    torch.testing.assert_close(decoder.prefill.last_logits(one), model.forward([two])[0][-1], rtol=0, atol=tolerance)
    for layer in range(model.shape.layers):
        torch.testing.assert_close(one.cache.k(layer), two.cache.k(layer), rtol=0, atol=tolerance)
        torch.testing.assert_close(one.cache.v(layer), two.cache.v(layer), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_a_question_behind_its_context(kind, kv_heads):
    model = tiny.model(kind, kv_heads=kv_heads)
    for length, count in ((1, 1), (9, 5), (150, 70)):
        check(model, lambda length=length, count=count: question(prefilled(model, length), count))


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_rows_that_are_repaired_with_the_question(kind):
    model = tiny.model(kind)
    for length, count, question_length in ((9, 1, 1), (40, 30, 4), (200, 130, 9)):
        check(model, lambda a=length, b=count, c=question_length: repair(prefilled(model, a), b, c))


def test_a_prefill_of_everything():
    model = tiny.model("qwen3", layers=2)
    for count in (1, 64, 65, 300):
        check(
            model,
            lambda count=count: append(ContextCache(model.shape, 0, model.dtype), tiny.tokens(count, count), 0),
        )


def test_unsupported_passes_are_left_to_the_forward():
    model = tiny.model("llama", layers=3)
    supports = GraphDecoder(model).prefill.supports

    def question_pass(**changes):
        return replace(question(prefilled(model, 12), 4), **changes)

    assert supports(question_pass())
    assert not supports(question_pass(attention=lambda *_, **__: None))
    assert not supports(question_pass(capture=Capture()))
    assert not supports(question_pass(hidden=torch.zeros(4, 64), start=1))
    assert not supports(append(prefilled(model, 12), tiny.tokens(4), 60, outputs=2))
    assert not supports(append(prefilled(model, 12), tiny.tokens(4), 60, outputs=0, depth=2))
    assert not supports(append(prefilled(model, 12), tiny.tokens(4), 7))  # before existing rows
    assert not supports(append(prefilled(model, 12), tiny.tokens(WIDEST + 1, 3), 60))
    ragged = prefilled(model, 12)
    ragged.truncate([12, 11, 12])
    assert not supports(question(ragged, 4))
    moved = prefilled(model, 12)
    moved.positions(1)[3] += 1
    assert not supports(question(moved, 4))
    for at, change in ((0, {"blend": 2}), (1, {"leave": torch.tensor([1, 3])}), (2, {"write": torch.tensor([0])})):
        changed = question_pass()
        layer_steps = list(changed.steps)
        layer_steps[at] = replace(layer_steps[at], **change)
        assert not supports(replace(changed, steps=layer_steps))


class NoCopy:
    """A pending copy that needs no wait."""

    def wait(self):
        pass


def test_a_long_cache_that_is_still_being_loaded_is_left_to_the_forward():
    """The forward starts with the first layer while the others are loaded."""
    model = tiny.model("llama", layers=2)
    supports, rows = GraphDecoder(model).prefill.supports, (model.shape.kv_heads, model.shape.head_dim)
    for length, taken in ((100, True), (LONG, False)):
        cache = ContextCache(model.shape, length, model.dtype)
        for layer in range(2):
            none = torch.zeros(length, *rows, dtype=model.dtype)
            cache.put(layer, none, none, torch.arange(length))
        question_pass = append(cache, tiny.tokens(4), length)
        assert supports(question_pass)
        cache.record_event(1, NoCopy())
        assert supports(question_pass) == taken


class Counted:
    """Counts the passes that run as a graph."""

    def __init__(self, prefill):
        self.prefill, self.taken = prefill, 0

    def supports(self, p):
        found = self.prefill.supports(p)
        self.taken += found
        return found

    def last_logits(self, p):
        return self.prefill.last_logits(p)


@pytest.mark.parametrize("name", [*METHOD_NAMES, "samkv-fusion:shared=false", "samkv-overwrite:shared=false"])
def test_every_method_gives_the_same_logits(name):
    model, answers = tiny.model("qwen3", profile=HEADS), []
    decoder = GraphDecoder(model)
    decoder.prefill = Counted(decoder.prefill)
    chunks = [tiny.tokens(n, n) for n in (33, 40, 37)]
    for graph_decoder in (None, decoder):
        prefiller = Prefiller(model, tiny.tokens(3, 7), graph_decoder=graph_decoder)
        if name == FULL:
            answers.append(prefiller.prefill_full(chunks, tiny.tokens(6, 6), StepTimer(), PrefillOptions(4)).logits)
            continue
        sources = [InMemoryChunk(prefiller.encode(chunk), 4, exact=not i) for i, chunk in enumerate(chunks)]
        answers.append(
            prefiller.prefill_sparse(
                sources, tiny.tokens(6, 6), make_method(name, model), StepTimer(), PrefillOptions(4)
            ).logits
        )
    torch.testing.assert_close(answers[1], answers[0], rtol=0, atol=1e-9)
    # With these methods layers hold different rows, or grow.
    assert decoder.prefill.taken == (name != "multi-infllm" and "shared=false" not in name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="passes are recorded on a GPU")
def test_a_few_graphs_serve_all_passes():
    model = DecoderModel(tiny.weights("qwen3", max_positions=4096).float().cuda())
    decoder = make_graph_decoder(model)
    for _ in range(2):
        for length, count, question_length in ((9, 1, 1), (40, 30, 4), (42, 28, 9), (600, 500, 30), (1300, 900, 32)):
            check(model, lambda a=length, b=count, c=question_length: repair(prefilled(model, a), b, c), 1e-4, decoder)
            check(model, lambda a=length, b=question_length: question(prefilled(model, a), b), 1e-4, decoder)
    assert 3 <= decoder.recorded <= 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="passes are recorded on a GPU")
def test_logits_of_a_replay_survive_the_next():
    model = DecoderModel(tiny.weights("llama", max_positions=2048).float().cuda())
    decoder = make_graph_decoder(model)
    first = decoder.prefill.last_logits(question(prefilled(model, 20), 5))
    kept = copy.deepcopy(first)
    decoder.prefill.last_logits(question(prefilled(model, 30), 5))
    assert torch.equal(first, kept)
