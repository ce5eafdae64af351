"""Graph decoding equals the model's forward. Without a GPU the references run the same step."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from ragkv.engine.batch import Batch
from ragkv.engine.decoding import generate
from ragkv.engine.generation import Sampling, Sequence
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import WIDEST, GraphDecoder, make_graph_decoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, append
from ragkv.sparse.psa import Psa
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def prefilled(model, lengths):
    """Prefill a cache for each request, without capacity for more rows."""
    caches = [ContextCache(model.shape, length, model.dtype, model.device) for length in lengths]
    model.forward([append(c, tiny.tokens(n, n), 0, outputs=0) for c, n in zip(caches, lengths, strict=True)])
    return caches


def check_steps(model, lengths, tolerance, count=3, decoder=None):
    """Compare some decode steps of all requests together with the forward of each."""
    caches = prefilled(model, lengths)
    expected = copy.deepcopy(caches)
    decoder = decoder or GraphDecoder(model)
    for step in range(count):
        tokens = [11 + 3 * step + i % 80 for i in range(len(lengths))]
        positions = [length + step for length in lengths]
        own = model.forward([append(c, [t], p) for c, t, p in zip(expected, tokens, positions, strict=True)])
        logits = decoder.decode(caches, tokens, positions)
        torch.testing.assert_close(logits, torch.cat(own), rtol=0, atol=tolerance)
    for cache, other in zip(caches, expected, strict=True):
        assert cache.lengths == other.lengths
        assert cache.bytes == other.bytes
        for layer in range(model.shape.layers):
            assert torch.equal(cache.positions(layer), other.positions(layer))
            torch.testing.assert_close(cache.k(layer), other.k(layer), rtol=0, atol=tolerance)
            torch.testing.assert_close(cache.v(layer), other.v(layer), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_a_step_is_the_models_forward(kind, kv_heads):
    check_steps(tiny.model(kind, kv_heads=kv_heads), (9, 1, 30), 1e-10)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_a_step_in_single_precision_is_near_the_forward(kind):
    check_steps(DecoderModel(tiny.weights(kind).float()), (12, 40), 1e-4)


def test_biases_and_norms_are_in_it():
    """Those of tiny models are zeros and ones, which would hide their omission."""
    for kind in ("qwen2", "qwen3"):
        weights = tiny.weights(kind)
        with torch.no_grad():
            for name, each in weights.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    each.uniform_(0.5, 1.5)
        check_steps(DecoderModel(weights), (5, 17), 1e-10)


def test_tied_embeddings():
    config = transformers.LlamaConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    check_steps(DecoderModel(transformers.AutoModelForCausalLM.from_config(config).double().eval()), (7,), 1e-10)


def test_layers_that_hold_different_rows():
    model = tiny.model()
    (cache,) = prefilled(model, [20])
    ragged = ContextCache(model.shape, 4, model.dtype)
    for layer in range(model.shape.layers):
        live = torch.randperm(20, generator=torch.Generator().manual_seed(layer))[: 20 - 3 * layer]
        ragged.put(layer, cache.k(layer)[live], cache.v(layer)[live], cache.positions(layer)[live])
    own = model.forward([append(copy.deepcopy(ragged), [5], 20)])[0]
    torch.testing.assert_close(GraphDecoder(model).decode([ragged], [5], [20]), own, rtol=0, atol=1e-10)


def test_more_requests_than_the_widest_graph():
    check_steps(tiny.model(layers=2), [1 + n % 7 for n in range(WIDEST + 3)], 1e-10, count=2)
    assert GraphDecoder(tiny.model(layers=2)).decode([], [], []).shape == (0, tiny.VOCABULARY)


def test_merged_weights_take_no_memory_and_change_nothing():
    model, ids = tiny.model("qwen2"), tiny.tokens(20)
    before = model.forward([append(ContextCache(model.shape, 20, model.dtype), ids, 0, outputs=20)])[0]
    GraphDecoder(model)
    after = model.forward([append(ContextCache(model.shape, 20, model.dtype), ids, 0, outputs=20)])[0]
    assert torch.equal(before, after)
    attention, mlp = model.body.layers[0].self_attn, model.body.layers[0].mlp
    merged = [each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert len({each.untyped_storage().data_ptr() for each in merged}) == 1
    assert merged[0].untyped_storage().nbytes() == sum(each.nbytes for each in merged)
    assert mlp.gate_proj.weight.untyped_storage().data_ptr() == mlp.up_proj.weight.untyped_storage().data_ptr()
    at = merged[0].data_ptr()
    GraphDecoder(model)
    assert attention.q_proj.weight.data_ptr() == at  # merged weights are not moved again


@pytest.mark.parametrize("counts", [(3, 1, 5), (1, WIDEST + 9), (WIDEST,), (20, 20, 1)])
def test_several_tokens_of_a_request_are_a_pass_of_as_many_rows(counts):
    """Also where they do not fit into one graph."""
    model, starts = tiny.model(layers=2), [7 + 5 * i for i in range(len(counts))]
    caches = prefilled(model, starts)
    expected = copy.deepcopy(caches)
    tokens = [tiny.tokens(count, 50 + count) for count in counts]
    passes = zip(expected, tokens, starts, strict=True)
    own = model.forward([append(cache, new, start, outputs=len(new)) for cache, new, start in passes])
    rows = [(c, t, start + i) for c, new, start in zip(caches, tokens, starts, strict=True) for i, t in enumerate(new)]
    logits = GraphDecoder(model).decode(*(list(each) for each in zip(*rows, strict=True)))
    torch.testing.assert_close(logits, torch.cat(own), rtol=0, atol=1e-10)
    for cache, other in zip(caches, expected, strict=True):
        assert cache.lengths == other.lengths
        for layer in range(model.shape.layers):
            assert torch.equal(cache.positions(layer), other.positions(layer))
            torch.testing.assert_close(cache.k(layer), other.k(layer), rtol=0, atol=1e-10)
            torch.testing.assert_close(cache.v(layer), other.v(layer), rtol=0, atol=1e-10)


def new_sequence(model, seed, policy=None, longest=8):
    tokens = tiny.tokens(6 + seed, seed)
    cache, attention = ContextCache(model.shape, len(tokens), model.dtype), policy.start() if policy else None
    logits = model.forward([append(cache, tokens, 0, attention=attention)])[0][-1]
    return Sequence(cache, logits, len(tokens), Sampling(longest), attention)


class Counted(GraphDecoder):
    """A decoder that records the number of requests of each step."""

    def __init__(self, model):
        super().__init__(model)
        self.widths = []

    def decode(self, caches, tokens, positions, paged=()):
        self.widths.append(len(caches))
        return super().decode(caches, tokens, positions, paged)


def test_requests_with_and_without_a_policy_generate_the_same_tokens_as_alone():
    model = tiny.model(layers=2)
    decoder = Counted(model)
    policies = [None, Psa(block=8), None, None, Psa(block=8)]
    alone = [list(generate(model, new_sequence(model, seed, policy))) for seed, policy in enumerate(policies)]
    batch = Batch(model, graph_decoder=decoder)
    sequences = [new_sequence(model, seed, policy) for seed, policy in enumerate(policies)]
    for sequence in sequences:
        batch.join(sequence)
    while batch.busy:
        batch.step()
    assert [sequence.tokens for sequence in sequences] == alone
    assert set(decoder.widths) == {3}
    decoder.widths.clear()
    assert list(generate(model, new_sequence(model, 2), decoder)) == alone[2]
    assert set(decoder.widths) == {1}


def test_a_step_that_fails_leaves_the_caches_as_they_were():
    model = tiny.model(layers=2)
    (cache,) = prefilled(model, [5])
    with pytest.raises(IndexError):
        GraphDecoder(model).decode([cache], [10**6], [5])
    assert cache.lengths == [5, 5]


def test_without_a_gpu_nothing_is_recorded():
    assert make_graph_decoder(tiny.model()) is None
    assert GraphDecoder(tiny.model(layers=2)).recorded == 0


def check_question(model, count, length, tolerance, decoder=None):
    """Compare a question's queries with those that a pass captures."""
    (cache,), tokens = prefilled(model, [length]), tiny.tokens(count, count)
    decoder, before, capture = decoder or GraphDecoder(model), copy.deepcopy(cache), Capture()
    queries = [q.clone() for q in decoder.queries(cache, tokens, length + 4, 3)]
    model.forward([append(before, tokens, length + 4, outputs=0, capture=capture, depth=3)])
    assert len(queries) == 3
    for a, b in zip(queries, capture.q, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    assert cache.lengths == [length] * model.shape.layers
    for layer in range(model.shape.layers):
        assert torch.equal(cache.k(layer), before.k(layer)[:length])


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("count", [1, 5, 8])
def test_queries_of_a_question_equal_those_of_its_pass(kind, count):
    check_question(tiny.model(kind), count, 9, 1e-10)


def test_a_cache_that_grew_for_a_question_accepts_rows_as_before():
    model = tiny.model(layers=2)
    (cache,) = prefilled(model, [6])
    GraphDecoder(model).queries(cache, tiny.tokens(5), 6, 2)
    row = torch.ones(1, model.shape.kv_heads, model.shape.head_dim, dtype=model.dtype)
    cache.put(0, row, row, torch.tensor([6]))
    assert cache.lengths == [7, 6]
    assert torch.equal(cache.k(0)[6:], row)


def test_a_long_question_and_a_large_cache_are_not_run_as_a_graph():
    model = tiny.model(layers=2)
    decoder, (small, large) = GraphDecoder(model), prefilled(model, [5, 90])
    assert decoder.supports_queries(small, tiny.tokens(64))
    assert not decoder.supports_queries(small, tiny.tokens(65))
    assert not decoder.supports_queries(small, ())
    large.lengths = [2**20] * 2
    assert not decoder.supports_queries(large, tiny.tokens(9))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="steps are recorded on a GPU")
def test_questions_of_any_length_run_as_a_graph():
    model = DecoderModel(tiny.weights("qwen3", max_positions=2048).float().cuda())
    decoder = make_graph_decoder(model)
    for count, length in ((5, 9), (7, 900), (33, 500), (64, 20), (5, 1000)):
        check_question(model, count, length, 1e-4, decoder)
    assert decoder.recorded >= 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="steps are recorded on a GPU")
def test_a_few_graphs_serve_any_caches(monkeypatch):
    monkeypatch.setattr("ragkv.model.execution.cuda_graphs.GRAPHS", 2)
    model = DecoderModel(tiny.weights("qwen3", max_positions=2048).float().cuda())
    decoder = make_graph_decoder(model)
    for lengths in ((5,), (40,), (9, 700, 1), (1000, 3, 200, 17), (5,), (2, 900)):
        check_steps(model, lengths, 1e-4, decoder=decoder)
        assert 1 <= decoder.recorded <= 2
