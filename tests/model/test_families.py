"""Every family computes what transformers computes, stores what a plain pass has, and answers by every method."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ragkv.engine.decoding import decode
from ragkv.engine.generation import Sampling
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.policies import make_decode_policy, make_prefill_policy
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefilledContext, PrefillOptions
from ragkv.engine.registry import ALONE, COMPARING, METHODS, make_method
from ragkv.engine.self_test import self_test
from ragkv.errors import InputError, ModelUnsupported
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import make_graph_decoder
from ragkv.model.execution.pooled_decode import PooledDecoder
from ragkv.model.families import FAMILIES, MEASURED, describe_family, describe_layers
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, append
from ragkv.model.profile import Profile
from ragkv.sparse.psa import Psa
from ragkv.timing import StepTimer
from ragkv.types import ChunkKV
from tests import families, hybrids, tiny

ROOT = Path(__file__).resolve().parents[2]
NEAR = {"rtol": 0, "atol": 1e-4}
PREFIX, QUESTION = families.tokens(3, 99), families.tokens(5, 50)
CHUNKS = [families.tokens(n, n) for n in (18, 22, 13)]
every_family = pytest.mark.parametrize("name", families.FAMILIES)


def prefill(model: DecoderModel, ids: tuple[int, ...], **options) -> Tensor:
    return model.forward([append(ContextCache(model.shape, 8, model.dtype), ids, 0, **options)])[0]


def own_logits(name: str, ids: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        return families.own(name)(torch.tensor([ids])).logits[0]


@every_family
def test_logits_are_those_of_the_models_own_forward(name):
    ids = families.tokens(40)
    own = own_logits(name, ids)
    assert own.std() > 0.05, "such logits would be near to any others"
    torch.testing.assert_close(prefill(families.model(name), ids, outputs=40), own, **NEAR)
    torch.testing.assert_close(families.model(name).own_logits(ids), own, **NEAR)


@every_family
def test_greedy_answers_are_those_of_the_models_own_forward(name):
    model, said = families.model(name), families.tokens(20)
    cache = ContextCache(model.shape, 40, model.dtype)
    first = model.forward([append(cache, said, 0)])[0][-1]
    answer = list(decode(model, cache, first, len(said), Sampling(6)))
    for token in answer:
        assert token == int(own_logits(name, said)[-1].argmax())
        said = (*said, token)
    assert len(answer) == 6 or int(own_logits(name, said)[-1].argmax()) in model.stop_ids


@every_family
def test_stored_rows_of_the_first_chunk_are_those_of_a_plain_pass(name):
    model, capture = families.model(name), Capture(keys_too=True)
    start, stop = len(PREFIX), len(PREFIX) + len(CHUNKS[0])
    prefill(model, (*PREFIX, *CHUNKS[0], *CHUNKS[1]), capture=capture)
    stored = Prefiller(model, PREFIX).encode(CHUNKS[0])
    for layer in range(model.shape.layers):
        torch.testing.assert_close(stored.k[layer], capture.k[layer][start:stop], rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(stored.v[layer], capture.v[layer][start:stop], rtol=1e-4, atol=2e-5)


@every_family
def test_stored_rows_are_moved_to_where_they_stand_and_can_be_recomputed(name):
    result = self_test(Prefiller(families.model(name), PREFIX))
    assert result.reason == ""
    assert max(result.layer_loop, result.stored_rows, result.recompute) < 1e-4


@every_family
def test_requests_in_one_forward_do_not_change_each_other(name):
    model = families.model(name)
    alone = [prefill(model, families.tokens(n, n)) for n in (5, 17)]
    early = append(ContextCache(model.shape, 8, model.dtype), families.tokens(6, 3), 0, capture=Capture(), depth=2)
    passes = [append(ContextCache(model.shape, 8, model.dtype), families.tokens(n, n), 0) for n in (5, 17)]
    first, none, second = model.forward([passes[0], early, passes[1]])
    assert none.shape[0] == 0
    torch.testing.assert_close((first, second), tuple(alone), **NEAR)


@cache
def encoded(name: str) -> list[ChunkKV]:
    return Prefiller(families.model(name), PREFIX).encode_many(CHUNKS)


PREFILLS = ("critiprefill:segment=4,block=4,budget=8", "loopserve:tile=4,sample=4")
DECODES = (
    "psa:block=4,least=1,part=0,threshold=0.2",
    "lfps:least=2,share=0.05",
    "loopserve:budget=8,first=0",
    "topk:block=4,count=2",
)


def turns(name: str, method: str, prefill_policy: str, decode_policy: str) -> list[PrefilledContext]:
    """Two turns, each with its answer; the second has a chunk more."""
    model = families.model(name)
    reader = Prefiller(model, PREFIX)
    options = PrefillOptions(
        4, make_prefill_policy(prefill_policy, model.profile), make_decode_policy(decode_policy, model.profile)
    )
    state, found = reader.new_state(), []
    sources = [InMemoryChunk(kv, 4, exact=i == 0) for i, kv in enumerate(encoded(name))]
    for count in (2,) if method in ALONE else (2, 3):
        context = reader.prefill_sparse(
            sources[:count], QUESTION, make_method(method, model), StepTimer(), options, state=state
        )
        found.append(context)
        answer = decode(model, context.cache, context.logits, context.position, Sampling(3), context.decoding)
        state.append_answer(list(answer), (5,))
    return found


@every_family
def test_every_method_answers_two_turns(name):
    model = families.model(name)
    for method in METHODS:
        if method in COMPARING and not model.compares_heads:
            with pytest.raises(InputError, match="differ in heads"):
                make_method(method, model)
            continue
        for context in turns(name, method, "dense", "dense"):
            assert context.logits.isfinite().all()


@every_family
def test_every_policy_answers_two_turns(name):
    model = families.model(name)
    plain = [layer for layer, kind in enumerate(model.kinds) if kind.plain]
    for prefill_policy, decode_policy in zip_longest(PREFILLS, DECODES, fillvalue="dense"):
        for context in turns(name, "epic:link=8", prefill_policy, decode_policy):
            assert context.logits.isfinite().all()
            if not plain:
                assert (context.sparse, context.decoding) == (None, None)
                assert "the model has none" in context.dense.decode
                continue
            assert {count.layer for count in context.decoding.key_counts} == {*plain}
            assert context.decoding.keys_read < context.decoding.keys_present
            assert prefill_policy == "dense" or context.sparse.dense_pairs > 0


def test_models_in_several_threads_attend_by_their_own_requests():
    names, ids = ("glm4", "granite", "olmo2", "smollm3"), families.tokens(30)
    expected = [prefill(families.model(name), ids) for name in names]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            found = threads.map(lambda name: prefill(families.model(name), ids), names)
            torch.testing.assert_close(list(found), expected, **NEAR)


def test_layers_without_rotation_and_partly_rotated_heads_are_read_from_the_model():
    assert families.model("smollm3").turns_alike is False
    still = families.model("smollm3").rotary(torch.arange(9), 2)
    assert still.cos.eq(1).all()
    assert still.sin.eq(0).all()
    partly = families.model("stablelm").rotary(torch.arange(9))
    assert [int(column) for column in partly.sin.eq(0).all(0)] == 2 * [0, 0, 1, 1, 1, 1, 1, 1]


def test_only_layers_made_as_llamas_run_by_recorded_graphs_and_the_pool():
    model = families.model("granite")
    assert not model.wired
    assert model.fused is None
    assert make_graph_decoder(model) is None
    with pytest.raises(ValueError, match="as Llama"):
        PooledDecoder(model, Psa(), 1 << 20)
    assert tiny.model("qwen3").wired


@pytest.mark.parametrize(
    ("name", "fields", "word"),
    [
        ("hunyuan_v1_dense", {}, "pairs"),
        ("opt", {"word_embed_proj_dim": 64}, "no rotary embeddings"),
        ("gpt_neox", {}, "GPTNeoXForCausalLM"),
        ("diffllama", {}, "attends twice"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("bamba", {"attn_layer_indices": [1, 3]}, "cannot be called one by one"),
        ("gemma3n_text", {"num_kv_shared_layers": 0}, "several streams"),
        ("gemma4_text", {"global_head_dim": 24}, "2 KV heads of 16 and 1 KV heads of 24"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(name, fields, word):
    with pytest.raises(ModelUnsupported, match=word) as refusal:
        DecoderModel(families.weights(name, **fields))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("dead", [(13,), (3, 11), (2, 5, 10, 13)])
def test_dimensions_that_are_0_for_every_token_do_not_hide_how_a_layer_turns(dead):
    """Trained models have such dimensions; where a whole pair is 0, any turning of it is true."""
    made = families.weights("qwen3_moe")
    for number in (0, 2):
        attention = made.model.layers[number].self_attn
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.data[list(dead)] = 0
    model = DecoderModel(made, profile=Profile(block=4))
    ids = families.tokens(30)
    torch.testing.assert_close(prefill(model, ids, outputs=30), model.own_logits(ids), **NEAR)
    assert model.turns_alike or len(dead) > 1
    assert self_test(Prefiller(model, PREFIX)).reason == ""


def test_layers_of_any_width_are_read():
    """Products of equal rows differ in their last bits by where they stand in a wide matrix."""
    made = families.weights("granite", hidden_size=640, intermediate_size=64, num_attention_heads=10, head_dim=64)
    assert DecoderModel(made, profile=Profile(block=4)).turns_alike


def test_the_list_of_families_is_that_of_the_tests_and_of_the_page():
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in (ROOT / "docs" / "models.md").read_text("utf-8").splitlines()
        if " | `" in line
    ]
    assert {name.strip("`"): title for title, name, *_ in rows[1:]} == FAMILIES
    assert {name.strip("`") for _, name, _, answers in rows[1:] if answers == "measured"} == MEASURED
    covered = {fields.get("model_type", name) for name, fields in families.FAMILIES.items()}
    assert {*covered, *tiny.ARCHITECTURES, *hybrids.HYBRIDS, *hybrids.RELATED} == {*FAMILIES}


def test_a_family_and_its_layers_are_told_in_a_line():
    assert describe_family("qwen2") == "Qwen 2, 2.5: tested; answers are measured"
    assert describe_family("gpt_oss") == "gpt-oss: tested; answers are not measured"
    assert describe_family("arcee").startswith("arcee: the tests do not cover it")
    assert describe_layers(tiny.model().kinds, True) == "run by ragkv's own code"
    assert "3 of 4 have a state" in describe_layers(tiny.model().kinds[:1], False, 3)
    small = families.model("gemma4_small")
    assert "; 4 more read the KV of 4, densely; 2 of 4 see" in describe_layers(small.kinds, False, 0, small.readers)
    told = describe_layers(families.model("gpt_oss").kinds, False)
    assert told.endswith("2 of 4 see the last 8 tokens; sparse policies act in no layer")
