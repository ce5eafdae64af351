"""The fused layer loop equals the plain loop. Without a GPU it runs with the reference kernels."""

from __future__ import annotations

import copy

import pytest
import torch

from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.registry import FULL, METHOD_NAMES, make_method
from ragkv.kernels import rows as reference
from ragkv.model.execution.fused import Fused
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, Pass, Step, append
from ragkv.model.profile import Profile
from ragkv.timing import StepTimer
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def fused(model):
    """Return the same model with the fused loop."""
    other = copy.copy(model)
    other.fused = Fused(model.body, model.lm_head, model.shape, model.scale, model._cos_sin, reference)
    return other


def cache_of(model, length):
    cache = ContextCache(model.shape, length, model.dtype, model.device)
    model.forward([append(cache, tiny.tokens(length, length), 0, outputs=0)])
    return cache


def check(model, make, tolerance=1e-10):
    """Compare logits, rows and captures of both loops for passes that `make` returns."""
    found = []
    for each in (model, fused(model)):
        passes = make()
        found.append((each.forward(passes), passes))
    (expected, one), (logits, two) = found
    for a, b in zip(logits, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    for a, b in zip(one, two, strict=True):
        for layer in range(model.shape.layers):
            torch.testing.assert_close(a.cache.k(layer), b.cache.k(layer), rtol=0, atol=tolerance)
            torch.testing.assert_close(a.cache.v(layer), b.cache.v(layer), rtol=0, atol=tolerance)
        if a.capture is not None:
            for x, y in zip(
                (*a.capture.q, *a.capture.k, *a.capture.v, a.capture.entered),
                (*b.capture.q, *b.capture.k, *b.capture.v, b.capture.entered),
                strict=True,
            ):
                torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_a_prefill_and_what_follows_it(kind, kv_heads):
    model = tiny.model(kind, kv_heads=kv_heads)
    check(model, lambda: [append(ContextCache(model.shape, 9, model.dtype), tiny.tokens(9, 1), 0, outputs=3)])
    check(model, lambda: [append(cache_of(model, 12), tiny.tokens(5, 2), 12, outputs=2)])


def test_biases_and_norms_are_in_it():
    """Those of tiny models are zeros and ones, which would hide their omission."""
    for kind in ("qwen2", "qwen3"):
        weights = tiny.weights(kind)
        with torch.no_grad():
            for name, each in weights.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    each.uniform_(0.5, 1.5)
        model = tiny.DecoderModel(weights)
        check(model, lambda model=model: [append(cache_of(model, 7), tiny.tokens(4, 2), 7, outputs=4)])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_passes_that_start_and_end_in_different_layers(kind):
    model = tiny.model(kind)

    def make():
        question = append(cache_of(model, 8), tiny.tokens(3, 1), 8, outputs=0, capture=Capture(), depth=2)
        context = append(cache_of(model, 5), tiny.tokens(2, 2), 5, capture=Capture(keys_too=True))
        late = cache_of(model, 6)
        slots = late.reserve(model.shape.layers - 1, torch.tensor([6]))
        torch.manual_seed(0)
        hidden = torch.randn(1, model.config.hidden_size, dtype=model.dtype)
        at = torch.tensor([6])
        last = Pass(at, at, late, [Step(None, slots)], start=model.shape.layers - 1, hidden=hidden)
        return [question, context, last]

    check(model, make)


def test_rows_leave_are_written_to_slots_and_blended():
    model = tiny.model("llama")
    layers = model.shape.layers

    def make(blend):
        cache = cache_of(model, 10)
        at = torch.tensor([2, 3, 5, 9])
        steps = [Step(None, at, blend=4 if blend else 0) for _ in range(layers)]
        steps[1] = Step(torch.tensor([0, 2]), torch.tensor([2, 5]), blend=1 if blend else 0, leave=torch.tensor([1, 2]))
        for layer in range(2, layers):
            steps[layer] = Step(torch.tensor([1]), torch.tensor([5]), blend=1 if blend else 0)
        ids = torch.tensor([40, 41, 42, 43])
        return [Pass(ids, at, cache, steps, blend=(lambda new, old: (new + old) / 2) if blend else None)]

    for blend in (False, True):
        check(model, lambda blend=blend: make(blend))


@pytest.mark.parametrize("name", [name for name in METHOD_NAMES if name != FULL])
def test_every_method_gives_the_same_logits(name):
    answers = []
    plain = tiny.model("qwen3", profile=Profile(block=4, stable_layers=(2, 3), retrieval_heads=((1, 2), (2, 5))))
    for model in (plain, fused(plain)):
        prefiller = Prefiller(model, tiny.tokens(3, 7))
        sources = [
            InMemoryChunk(prefiller.encode(tiny.tokens(n, n)), 4, exact=not i) for i, n in enumerate((33, 40, 37))
        ]
        answers.append(
            prefiller.prefill_sparse(
                sources, tiny.tokens(6, 6), make_method(name, model), StepTimer(), PrefillOptions(4)
            ).logits
        )
    torch.testing.assert_close(answers[1], answers[0], rtol=0, atol=1e-9)


def test_a_model_on_a_cpu_uses_the_plain_loop():
    assert tiny.model("llama").fused is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_both_loops_agree():
    model = tiny.DecoderModel(tiny.weights("qwen3").float().cuda())
    assert model.fused is not None
    plain = copy.copy(model)
    plain.fused = None
    for each in (model, plain):
        each.seen = (
            Prefiller(each, tiny.tokens(3, 7))
            .prefill_full([tiny.tokens(300, 300)], tiny.tokens(9, 9), StepTimer("cuda"), PrefillOptions(4))
            .logits
        )
    torch.testing.assert_close(model.seen, plain.seen, rtol=1e-4, atol=1e-4)
