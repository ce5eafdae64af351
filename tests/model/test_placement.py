"""A model on several devices gives the results of one device, and tensors of different devices never meet.

Without two GPUs the devices are simulated (tests/places.py).
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from benchmarks.shapes import SHAPES, random_model, random_tokens
from ragkv.engine.decoding import decode
from ragkv.engine.generation import Sampling
from ragkv.engine.kv_transfer import make_kv_transfer
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.policies import make_decode_policy
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.registry import FULL, METHOD_NAMES, make_method
from ragkv.engine.self_test import self_test
from ragkv.errors import ConfigError, ModelUnsupported
from ragkv.kernels import rows as reference
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.fused import Fused
from ragkv.model.execution.graph_decode import make_graph_decoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, Pass, Step, append
from ragkv.model.placement import SPREAD, assign_layers, check_spreadable, remove_hooks
from ragkv.model.profile import Profile
from ragkv.sparse.critiprefill import CritiPrefill
from ragkv.timing import StepTimer
from tests import families, hybrids, tiny
from tests.places import HOST, PLACES, here, places, spread

pytestmark = pytest.mark.usefixtures("one_thread")
PROFILE = Profile(block=4, stable_layers=(2, 3), retrieval_heads=((1, 2), (2, 5)))
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def both(kind="qwen3", first=2):
    """Return a model on one device, and the same with its layers from `first` on a second one. Use within `places`."""
    weights = tiny.weights(kind)
    return DecoderModel(copy.deepcopy(weights), profile=PROFILE), DecoderModel(spread(weights, first), profile=PROFILE)


def fused(model):
    """Return the same model with the fused loop."""
    other = copy.copy(model)
    other.fused = Fused(model.body, model._logits, model.shape, model.scale, model._cos_sin, reference)
    return other


def cache_of(model, length):
    cache = ContextCache(model.shape, length, model.dtype, model.devices)
    model.forward([append(cache, tiny.tokens(length, length), 0, outputs=0)])
    return cache


def check(models, make, tolerance):
    """Compare logits, rows and captures for passes that `make` returns. Rows and captures stay on their devices."""
    expected, one = None, None
    for model in models:
        passes = make(model)
        logits = model.forward(passes)
        if expected is None or one is None:
            expected, one = logits, passes
            continue
        for found, reference_rows, p, like in zip(logits, expected, passes, one, strict=True):
            assert found.device == model.device
            torch.testing.assert_close(here(found), reference_rows, rtol=0, atol=tolerance)
            for layer, device in enumerate(model.devices):
                for x, y in ((p.cache.k(layer), like.cache.k(layer)), (p.cache.v(layer), like.cache.v(layer))):
                    assert x.device == device
                    torch.testing.assert_close(here(x), y, rtol=0, atol=tolerance)
            if p.capture is not None:
                for layer, (x, y) in enumerate(zip(p.capture.q, like.capture.q, strict=True)):
                    assert x.device == model.devices[layer + p.start]
                    torch.testing.assert_close(here(x), y, rtol=0, atol=tolerance)


def apart(model):
    """Return requests that start and end in different layers on different devices."""
    layers = model.shape.layers
    question_pass = append(cache_of(model, 8), tiny.tokens(3, 1), 8, outputs=0, capture=Capture(), depth=layers - 1)
    context_pass = append(cache_of(model, 5), tiny.tokens(2, 2), 5, capture=Capture(keys_too=True))
    late, at = cache_of(model, 6), torch.tensor([6])
    torch.manual_seed(0)
    hidden = torch.randn(1, model.config.hidden_size, dtype=model.dtype).to(model.devices[1])
    last = Pass(at, at, late, [Step(None, late.reserve(layers - 1, at))], start=layers - 1, hidden=hidden)
    return [question_pass, context_pass, last]


def thinning(model):
    """Return a pass whose rows leave, are between other rows, and are blended with stored rows."""
    cache, at = cache_of(model, 10), torch.tensor([2, 3, 5, 9])
    steps = [Step(None, at, blend=4) for _ in range(model.shape.layers)]
    steps[1] = Step(torch.tensor([0, 2]), torch.tensor([2, 5]), blend=1, leave=torch.tensor([1, 2]))
    for layer in range(2, model.shape.layers):
        steps[layer] = Step(torch.tensor([1]), torch.tensor([5]), blend=1)
    return [Pass(torch.tensor([40, 41, 42, 43]), at, cache, steps, blend=lambda new, old: (new + old) / 2)]


@pytest.mark.parametrize("name", ["glm4", "granite", "smollm3", "gemma3_text", "gemma4_inputs", "phi"])
def test_layers_that_run_by_their_own_forward_may_be_on_several_devices(name):
    with places():
        models = [
            families.model(name),
            DecoderModel(spread(families.weights(name), 2), profile=families.model(name).profile),
        ]
        assert [model.spread for model in models] == [False, True]
        for make in (apart, thinning):
            check(models, make, tolerance=1e-5)


@pytest.mark.parametrize("first", range(5))
def test_the_plain_loop_gives_the_same_bits_wherever_the_second_device_starts(first):
    with places():
        models = both(first=first)
        for make in (apart, thinning):
            check(models, make, tolerance=0)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_the_fused_loop_agrees_up_to_the_order_of_additions(kind):
    with places():
        one, two = both(kind)
        for make in (apart, thinning):
            check((one, fused(two)), make, tolerance=1e-10)


@pytest.mark.parametrize("name", METHOD_NAMES)
@pytest.mark.parametrize("loop", [copy.copy, fused], ids=["plain", "fused"])
def test_every_method_answers_as_on_one_device(name, loop):
    answers = []
    with places():
        one, two = both()
        for model in (one, loop(two)):
            prefiller, question, timer = Prefiller(model, tiny.tokens(3, 7)), tiny.tokens(6, 6), StepTimer(model.device)
            chunks = [tiny.tokens(n, n) for n in (33, 40, 37)]
            if name == FULL:
                context = prefiller.prefill_full(chunks, question, timer, PrefillOptions(4))
            else:
                sources = [InMemoryChunk(prefiller.encode(chunk), 4, exact=not i) for i, chunk in enumerate(chunks)]
                context = prefiller.prefill_sparse(
                    sources, question, make_method(name, model), timer, PrefillOptions(4)
                )
            answers.append((here(context.logits), context.plan))
    torch.testing.assert_close(answers[1][0], answers[0][0], rtol=0, atol=1e-9)
    if name != FULL:
        assert answers[1][1].kept == answers[0][1].kept


@pytest.mark.parametrize("spec", ["psa:block=4", "psa:block=4,reach=all", "topk:count=2,block=4", "lfps", "loopserve"])
def test_every_decode_policy_generates_as_on_one_device(spec):
    outputs = []
    with places():
        for model in both():
            prefiller, timer = Prefiller(model, tiny.tokens(3, 7)), StepTimer(model.device)
            sources = [InMemoryChunk(prefiller.encode(tiny.tokens(n, n)), 4) for n in (33, 40)]
            decoder = make_decode_policy(f"{spec}{',' if ':' in spec else ':'}above=0", PROFILE)
            method = make_method("scout", model)
            context = prefiller.prefill_sparse(
                sources, tiny.tokens(6, 6), method, timer, PrefillOptions(8, decode_policy=decoder)
            )
            tokens = decode(model, context.cache, context.logits, context.position, Sampling(8), context.decoding)
            outputs.append((list(tokens), context.decoding.keys_read))
    assert outputs[1] == outputs[0]


def test_a_prefill_policy_moves_its_state_of_the_previous_layer():
    """LoopServe keeps no state of other layers."""
    found, at = [], torch.arange(64)
    torch.manual_seed(0)
    rows = [(torch.randn(64, 4, 8), torch.randn(64, 2, 8)) for _ in range(3)]
    for devices in ((HOST,) * 3, (PLACES[0], *PLACES)):
        with places():
            state = CritiPrefill(segment=8, block=4, budget=8, skip=0, threshold=8).start()
            for layer, ((q, k), device) in enumerate(zip(rows, devices, strict=True)):
                index = state.select(layer, q.to(device), k.to(device), at, at, end=64, scale=1.0)
                assert index is not None
                assert index.blocks.device == device
                found.append((here(index.blocks), here(index.counts)))
    for one, two in zip(found[:3], found[3:], strict=True):
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])


def test_the_self_test_passes_with_the_models_own_forward():
    with places():
        _, model = both()
        found = self_test(Prefiller(model, tiny.tokens(3, 7)))
    assert found.reason == ""
    assert not any(block._forward_pre_hooks for block in model.body.layers)


def test_graph_decoding_and_kv_transfer_are_for_one_gpu():
    with places():
        _, model = both()
        assert model.spread
        assert model.device_names == "mps:0 and mps:1"
        assert make_graph_decoder(model) is None
        assert make_kv_transfer(model) is None


def test_tensors_of_different_devices_cannot_be_combined():
    """The tests above would notice a missing move between devices."""
    with places():
        one, two = torch.ones(2, 2, device=PLACES[0]), torch.ones(2, 2, device=PLACES[1])
        for wrong in (lambda: one @ two, lambda: one + torch.ones(2), lambda: torch.cat([one, two])):
            with pytest.raises(RuntimeError, match="of tensors on"):
                wrong()
        assert (one.to(two.device) @ two).device == PLACES[1]
        assert one.cpu().device == HOST


def test_layers_are_assigned_in_equal_runs():
    assert assign_layers(5, "ab") == ("a", "a", "a", "b", "b")
    assert assign_layers(80, "abcd") == tuple("a" * 20 + "b" * 20 + "c" * 20 + "d" * 20)
    assert assign_layers(2, "abc") == ("a", "b")


def test_random_weights_are_made_on_their_devices():
    model = random_model("tiny", [HOST, HOST])
    whole = random_model("tiny")
    for (name, one), two in zip(model.body.named_parameters(), whole.body.parameters(), strict=True):
        torch.testing.assert_close(one, two, msg=name)
    assert torch.equal(model.body.rotary_emb.inv_freq, whole.body.rotary_emb.inv_freq)
    cache = ContextCache(model.shape, 8, model.dtype, model.devices)
    assert model.forward([append(cache, random_tokens(model, 8), 0)])[0].isfinite().all()
    assert SHAPES["llama-3.1-70b"].hidden == 64 * SHAPES["llama-3.1-70b"].head_dim


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_or_accelerate_the_error_names_what_is_missing(tiny_folder, monkeypatch):
    with pytest.raises(ConfigError, match=r"no GPU|accelerate"):
        DecoderModel.load(str(tiny_folder), SPREAD)
    with pytest.raises(ConfigError, match="no GPU"):
        random_model("tiny", SPREAD)
    monkeypatch.setattr("ragkv.model.placement.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'accelerate>=1\.15,<2'"):
        check_spreadable()


def test_a_model_that_does_not_fit_on_the_gpus_is_refused():
    pytest.importorskip("accelerate")
    with pytest.raises(ModelUnsupported, match="would be on cpu and disk"):
        remove_hooks(
            SimpleNamespace(hf_device_map={"model.embed_tokens": 0, "model.layers.0": "cpu", "lm_head": "disk"})
        )


def test_hooks_of_accelerate_are_removed():
    hooks = pytest.importorskip("accelerate.hooks")
    weights = tiny.weights()
    weights.hf_device_map = {"": 0}
    hooks.add_hook_to_module(weights.model.layers[1], hooks.AlignDevicesHook(HOST, io_same_device=True))
    remove_hooks(weights)
    assert not [name for name, module in weights.named_modules() if hasattr(module, "_hf_hook")]
    assert weights.model.layers[1].forward.__func__ is type(weights.model.layers[1]).forward


@several
def test_a_model_on_several_gpus_gives_the_logits_of_one(tiny_folder):
    pytest.importorskip("accelerate")
    loaded = [DecoderModel.load(str(tiny_folder), device, "float32") for device in ("cuda:0", SPREAD)]
    assert not loaded[0].spread
    assert loaded[1].spread
    found = [
        Prefiller(model, tiny.tokens(3, 7))
        .prefill_full([tiny.tokens(90, 3)], tiny.tokens(9, 9), StepTimer(model.device), PrefillOptions(4))
        .logits
        for model in loaded
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@several
def test_on_gpus_both_loops_agree():
    model = random_model(SHAPES["tiny"], SPREAD, dtype=torch.float32)
    plain = copy.copy(model)
    plain.fused = None
    assert model.spread
    assert model.fused is not None
    found = [
        Prefiller(each, random_tokens(each, 4))
        .prefill_full([random_tokens(each, 300)], (5, 6, 7), StepTimer("cuda"), PrefillOptions(4))
        .logits
        for each in (model, plain)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3_5_text", "granitemoehybrid", "lfm2"])
def test_layers_with_a_state_may_be_on_several_devices(name):
    with places():
        alone = hybrids.model(name)
        apart_from_it = DecoderModel(spread(hybrids.own.__wrapped__(name), 2), profile=alone.profile)
        assert apart_from_it.spread
        ids, found = families.tokens(20), []
        for model in (alone, apart_from_it):
            cache = ContextCache(model.shape, 24, model.dtype, model.devices)
            parts = [model.forward([append(cache, ids[start:stop], start)])[0] for start, stop in ((0, 12), (12, 20))]
            restored = model.states_of(model.states.flat(cache.states))
            assert [state.tail.device for state in restored] == [state.tail.device for state in cache.states]
            found.append(torch.cat(parts).cpu())
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
