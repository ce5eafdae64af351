"""The layer loop equals the model's own forward. Oracles O1, O8, O9, O10, O11; refusals."""

import pytest
import torch
import transformers

from ragkv.errors import ModelNotFound, ModelUnsupported
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, Pass, Step, append
from ragkv.model.supported import check_supported
from tests import tiny

EXACT = {"rtol": 0, "atol": 1e-10}


def cache(model, rows=8):
    return ContextCache(model.shape, rows, model.dtype)


def prefill(model, ids, **options):
    return model.forward([append(cache(model), ids, 0, **options)])[0]


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_logits_are_those_of_the_models_own_forward(kind, kv_heads):
    ids = tiny.tokens(33)
    own = tiny.weights(kind, kv_heads=kv_heads)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(prefill(tiny.model(kind, kv_heads=kv_heads), ids, outputs=33), own, **EXACT)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_static_rope_types_are_the_models_own(rope):
    ids = tiny.tokens(40)
    own = tiny.weights(rope_parameters=rope)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(prefill(tiny.model(rope_parameters=rope), ids, outputs=40), own, **EXACT)


def test_kept_angles_are_those_of_the_rotary_module_however_they_grow():
    model = tiny.model()
    for end in (3, 40, 7, 64):
        (table,) = model.rotary_tables(end).values()
        fresh = model.rotary(torch.arange(end))
        assert torch.equal(table.cos, fresh.cos)
        assert torch.equal(table.sin, fresh.sin)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_a_continuation_over_a_cache_equals_one_prefill(kind):
    model, ids = tiny.model(kind), tiny.tokens(40)
    context = cache(model)
    model.forward([append(context, ids[:30], 0, outputs=0)])
    torch.testing.assert_close(
        model.forward([append(context, ids[30:], 30, outputs=10)])[0], prefill(model, ids, outputs=10), **EXACT
    )


@pytest.mark.parametrize("count", [1, 5])
def test_layers_may_hold_their_rows_in_different_orders(count):
    """O9: a ragged cache in which every position is kept, in another order per layer, gives full attention."""
    model, ids = tiny.model(), tiny.tokens(30)
    whole, shuffled = cache(model), cache(model)
    model.forward([append(whole, ids, 0, outputs=0)])
    for layer in range(model.shape.layers):
        order = torch.randperm(30, generator=torch.Generator().manual_seed(layer))
        shuffled.put(layer, whole.k(layer)[order], whole.v(layer)[order], whole.positions(layer)[order])
    question = tiny.tokens(count, 1)
    torch.testing.assert_close(
        model.forward([append(shuffled, question, 30, outputs=count)])[0],
        model.forward([append(whole, question, 30, outputs=count)])[0],
        **EXACT,
    )


def test_layers_may_hold_different_tokens():
    """A row that is dropped in one layer only is still used by the other layers."""
    model, ids, question = tiny.model(), tiny.tokens(20), tiny.tokens(3, 1)

    def answer(dropped):
        whole, ragged = cache(model), cache(model)
        model.forward([append(whole, ids, 0, outputs=0)])
        for layer in range(model.shape.layers):
            live = torch.tensor([i for i in range(20) if (layer, i) not in dropped])
            ragged.put(layer, whole.k(layer)[live], whole.v(layer)[live], whole.positions(layer)[live])
        return model.forward([append(ragged, question, 20)])[0]

    assert (answer({(2, 7)}) - answer(set())).abs().max() > 1e-6
    assert (answer({(2, 7)}) - answer({(1, 7)})).abs().max() > 1e-6


def test_later_tokens_are_never_visible():
    """O10: changing tokens after p changes no output, query or key at or before p."""
    model, ids = tiny.model(), tiny.tokens(24)
    other = (*ids[:15], *tiny.tokens(9, 7))
    first, second = Capture(keys_too=True), Capture(keys_too=True)
    a = prefill(model, ids, outputs=24, capture=first)
    b = prefill(model, other, outputs=24, capture=second)
    torch.testing.assert_close(a[:15], b[:15], **EXACT)
    assert (a[15:] - b[15:]).abs().max() > 1e-3
    for layer in range(model.shape.layers):
        torch.testing.assert_close(first.q[layer][:15], second.q[layer][:15], **EXACT)
        torch.testing.assert_close(first.k[layer][:15], second.k[layer][:15], **EXACT)


def test_scattered_rows_recomputed_over_garbage_equal_a_full_prefill():
    """O6: rows {0, 1, 5, 17, 18, 30, 47} of 48 hold garbage; recomputing them in place restores everything."""
    model, ids = tiny.model(), tiny.tokens(48)
    idx = torch.tensor([0, 1, 5, 17, 18, 30, 47])
    whole, broken = cache(model), cache(model)
    expected = model.forward([append(whole, ids, 0, outputs=48)])[0][idx]
    model.forward([append(broken, ids, 0, outputs=0)])
    for layer in range(model.shape.layers):
        broken.write(layer, idx, torch.randn(7, 2, 8).double(), torch.randn(7, 2, 8).double())
    steps = [Step(write=None, slots=idx)] * model.shape.layers
    repaired = model.forward([Pass(torch.tensor(ids)[idx], idx, broken, steps)])[0]
    torch.testing.assert_close(repaired, expected, **EXACT)
    for layer in range(model.shape.layers):
        torch.testing.assert_close(broken.k(layer), whole.k(layer), **EXACT)


def test_a_request_alone_equals_the_same_request_in_a_batch():
    """O11, in a batch with different lengths, a continuation and an early stop."""
    model = tiny.model()
    lengths = (5, 17, 31)
    alone = [prefill(model, tiny.tokens(n, n)) for n in lengths]
    started = cache(model)
    model.forward([append(started, tiny.tokens(9, 1), 0, outputs=0)])
    passes = [append(cache(model), tiny.tokens(n, n), 0) for n in lengths]
    passes.insert(1, append(started, tiny.tokens(4, 2), 9))
    passes.append(append(cache(model), tiny.tokens(6, 3), 0, outputs=0, capture=Capture(), depth=2))
    together = model.forward(passes)
    for expected, got in zip(alone, [together[0], together[2], together[3]], strict=True):
        torch.testing.assert_close(got, expected, **EXACT)


def test_a_pass_that_stops_early_captures_the_same_queries_and_gives_no_logits():
    model, ids = tiny.model(), tiny.tokens(12)
    whole, early = Capture(), Capture()
    prefill(model, ids, capture=whole)
    logits = model.forward([append(cache(model), ids, 0, outputs=0, capture=early, depth=3)])[0]
    assert logits.shape[0] == 0
    assert len(early.q) == 3
    for a, b in zip(early.q, whole.q[:3], strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "t5"}, "no causal language model"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"rope_parameters": None}, "no rotary embeddings"),
        ({"altup_num_inputs": 4}, "several streams"),
        ({"kv_lora_rank": 8}, "latent"),
        ({"attention_chunk_size": 64}, "chunks"),
    ],
)
def test_unsupported_models_are_refused_in_one_line(change, word):
    config = transformers.LlamaConfig(num_hidden_layers=2)
    config.architectures = ["LlamaForCausalLM"]
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ModelUnsupported, match=word) as refusal:
        check_supported(config)
    assert "\n" not in str(refusal.value)


def test_a_missing_model_folder_is_named(tmp_path):
    with pytest.raises(ModelNotFound, match="no-such-folder"):
        DecoderModel.load(str(tmp_path / "no-such-folder"))


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path):
    with pytest.raises(ModelNotFound) as refusal:
        DecoderModel.load(str(tmp_path))
    assert "\n" not in str(refusal.value)
