"""Models whose layers mostly have a state: they compute what transformers computes, and questions begin from the stored
state behind the last chunk."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ragkv.engine.decoding import decode
from ragkv.engine.generation import Sampling
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.policies import DECODE_NAMES, PREFILL_NAMES, make_decode_policy, make_prefill_policy
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.registry import METHODS, REPAIRING, make_method
from ragkv.engine.self_test import self_test
from ragkv.errors import EntryCorrupt, InputError
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, append
from ragkv.model.profile import Profile
from ragkv.recompute.reuse import Reuse
from ragkv.store.format.codec import pack
from ragkv.store.format.head import chunk_key, unpack_head
from ragkv.store.tier import fetch_states
from ragkv.timing import StepTimer
from ragkv.types import ChunkKV
from tests import families
from tests.hybrids import HYBRIDS, RELATED, model, own

NEAR: dict[str, Any] = {"rtol": 2e-4, "atol": 1e-4}
PREFIX, QUESTION = families.tokens(3, 99), families.tokens(5, 50)
CHUNKS = [families.tokens(n, n) for n in (18, 22, 13)]
every_hybrid = pytest.mark.parametrize("name", HYBRIDS)


def own_logits(name: str, ids: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        return own(name)(torch.tensor([ids])).logits[0]


def empty(made: DecoderModel) -> ContextCache:
    return ContextCache(made.shape, 8, made.dtype)


@every_hybrid
def test_only_layers_with_attention_have_keys(name):
    kinds = own(name).config.layer_types
    assert model(name).shape.layers == sum(kind == "full_attention" for kind in kinds) < len(kinds)
    assert model(name).states.bytes > 0


@every_hybrid
def test_logits_are_those_of_the_models_own_forward(name):
    ids, made = families.tokens(40), model(name)
    expected = own_logits(name, ids)
    assert expected.std() > 0.05, "such logits would be near to any others"
    (whole,) = made.forward([append(empty(made), ids, 0, outputs=40)])
    torch.testing.assert_close(whole, expected, **NEAR)
    parts, filled = [], empty(made)
    for start, stop in ((0, 17), (17, 18), (18, 20), (20, 40)):
        parts += made.forward([append(filled, ids[start:stop], start, outputs=stop - start)])
    torch.testing.assert_close(torch.cat(parts), expected, **NEAR)


@every_hybrid
def test_greedy_answers_are_those_of_the_models_own_forward(name):
    made, said = model(name), families.tokens(20)
    filled = empty(made)
    first = made.forward([append(filled, said, 0)])[0][-1]
    answer = list(decode(made, filled, first, len(said), Sampling(6)))
    for token in answer:
        assert token == int(own_logits(name, said)[-1].argmax())
        said = (*said, token)
    assert len(answer) == 6 or int(own_logits(name, said)[-1].argmax()) in made.stop_ids


@every_hybrid
def test_requests_in_one_forward_do_not_change_each_other(name):
    made = model(name)
    alone = [made.forward([append(empty(made), families.tokens(n, n), 0)])[0] for n in (5, 17)]
    early = append(empty(made), families.tokens(6, 3), 0, capture=Capture(), depth=1)
    passes = [append(empty(made), families.tokens(n, n), 0) for n in (5, 17)]
    first, none, second = made.forward([passes[0], early, passes[1]])
    assert none.shape[0] == 0
    torch.testing.assert_close((first, second), tuple(alone), **NEAR)


@every_hybrid
def test_a_pass_that_only_asks_or_fails_leaves_the_states_as_they_were(name, monkeypatch):
    made, filled = model(name), empty(model(name))
    made.forward([append(filled, families.tokens(9), 0)])
    before = filled.states
    made.forward([append(filled, families.tokens(4, 1), 9, outputs=0, capture=Capture(), depth=made.shape.layers)])
    assert filled.states is before
    monkeypatch.setattr(made, "_norm", lambda rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.forward([append(filled, families.tokens(4, 1), 13)])
    assert all(
        (new.tail is None or torch.equal(new.tail, old.tail))
        and (new.recurrent is None or torch.equal(new.recurrent, old.recurrent))
        for new, old in zip(filled.states, before, strict=True)
    )


@cache
def encoded(name: str) -> list[ChunkKV]:
    return Prefiller(model(name), PREFIX).encode_many(CHUNKS)


def sources(name: str, count: int = 3) -> list[InMemoryChunk]:
    return [InMemoryChunk(kv, 4, exact=i == 0) for i, kv in enumerate(encoded(name)[:count])]


def turned(name: str, keys: Tensor, by: int) -> Tensor:
    """Turn keys [1, Hkv, n, d], which are turned to their positions, by some positions more."""
    compute = own(name).model.rotary_emb
    if compute is None:  # Granite's keys do not turn
        return keys
    # Qwen 3.5 has three positions a token, for images; text has the same one thrice.
    positions = torch.tensor([[by]]) if name != "qwen3_5_text" else torch.tensor([[[by]]] * 3)
    cos, sin = (each[0] for each in compute(keys, positions))
    first, rest = keys[..., : cos.shape[-1]], keys[..., cos.shape[-1] :]
    left, right = first.chunk(2, -1)
    return torch.cat([first * cos + torch.cat([-right, left], -1) * sin, rest], -1)


def naive(name: str, chunks: list[tuple[int, ...]], question: tuple[int, ...]) -> Tensor:
    """Stitching as it is defined, with transformers' own model and cache.

    Each chunk runs behind S. Layers with attention get the keys and values of all chunks, each key turned to where it
    stands; the others get the states behind the last chunk. Then the question runs.
    """
    plain, start = own(name), len(PREFIX)
    joined: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for chunk in chunks:
        with torch.inference_mode():
            made = plain(torch.tensor([[*PREFIX, *chunk]]), use_cache=True).past_key_values
        for number, layer in enumerate(made.layers):
            if getattr(layer, "keys", None) is not None:
                keys = turned(name, layer.keys, start - len(PREFIX))
                if joined.get(number):
                    joined[number].append((keys[:, :, len(PREFIX) :], layer.values[:, :, len(PREFIX) :]))
                else:
                    joined[number] = [(keys, layer.values)]
        start += len(chunk)
    for number, parts in joined.items():
        made.layers[number].keys = torch.cat([k for k, _ in parts], 2)
        made.layers[number].values = torch.cat([v for _, v in parts], 2)
    for position, token in enumerate(question, start):
        with torch.inference_mode():
            out = plain(
                torch.tensor([[token]]), position_ids=torch.tensor([[position]]), past_key_values=made, use_cache=True
            )
    return out.logits[0, -1]


@every_hybrid
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_question_begins_from_the_states_behind_the_last_chunk(name, count):
    made = model(name)
    found = Prefiller(made, PREFIX).prefill_sparse(
        sources(name, count), QUESTION, Reuse(made.shape.layers), StepTimer()
    )
    torch.testing.assert_close(found.logits, naive(name, CHUNKS[:count], QUESTION), **NEAR)


@every_hybrid
def test_behind_one_chunk_stored_rows_and_states_are_exact(name):
    made = model(name)
    result = self_test(Prefiller(made, PREFIX))
    assert result.reason == ""
    assert max(result.layer_loop, result.stored_rows, result.recompute) < 1e-4


@pytest.mark.parametrize("name", RELATED)
def test_related_families_pass_the_same_test(name):
    made = DecoderModel(families.weights(name, **RELATED[name]), profile=Profile(block=4))
    assert made.states.bytes > 0
    assert self_test(Prefiller(made, PREFIX)).reason == ""


def options(made: DecoderModel, prefill: str = "dense", chosen: str = "dense") -> PrefillOptions:
    return PrefillOptions(4, make_prefill_policy(prefill, made.profile), make_decode_policy(chosen, made.profile))


@every_hybrid
@pytest.mark.parametrize("method", METHODS)
def test_every_method_answers_two_turns_or_says_why_not(name, method):
    made = model(name)
    if method in REPAIRING:
        with pytest.raises(InputError, match="layers with a state cannot do; ask with one of full, reuse"):
            make_method(method, made)
        return
    reader = Prefiller(made, PREFIX)
    state, chosen = reader.new_state(), make_method(method, made)
    for count in (2, 3):
        context = reader.prefill_sparse(sources(name, count), QUESTION, chosen, StepTimer(), options(made), state=state)
        assert context.plan is not None
        assert not any(any(layer) for layer in context.plan.recompute)
        answer = list(decode(made, context.cache, context.logits, context.position, Sampling(4)))
        assert context.logits.isfinite().all()
        state.append_answer(answer, (7,))


@every_hybrid
def test_repair_is_refused_where_it_is_asked_for(name):
    for spec in ("scout:repair=kept", "samkv-overwrite:repair=rules", "random:repair=kept"):
        with pytest.raises(InputError, match="without `repair`"):
            make_method(spec, model(name))
    assert make_method("scout:repair=none", model(name)) == make_method("scout", model(name))


@every_hybrid
@pytest.mark.parametrize(
    "policy", [f"prefill {each}" for each in PREFILL_NAMES] + [f"decode {each}" for each in DECODE_NAMES]
)
def test_every_policy_runs(name, policy):
    made = model(name)
    kind, chosen = policy.split()
    given = options(made, chosen) if kind == "prefill" else options(made, chosen=chosen)
    context = Prefiller(made, PREFIX).prefill_full(CHUNKS, QUESTION, StepTimer(), given)
    answer = list(decode(made, context.cache, context.logits, context.position, Sampling(3), context.decoding))
    assert answer
    assert context.logits.isfinite().all()


@every_hybrid
@pytest.mark.parametrize("kept", [4, 2, 0])
def test_a_second_turn_goes_on_behind_the_part_of_the_answer_that_counts(name, kept):
    made = model(name)
    reader = Prefiller(made, PREFIX)
    state = reader.new_state()
    context = reader.prefill_full(CHUNKS[:2], QUESTION, StepTimer(), options(made), state=state)
    answer = list(decode(made, context.cache, context.logits, context.position, Sampling(5)))
    state.append_answer(answer[:kept], (7, 8))
    second = reader.prefill_full([], QUESTION, StepTimer(), options(made), state=state)
    whole = (*PREFIX, *CHUNKS[0], *CHUNKS[1], *QUESTION, *answer[:kept], 7, 8, *QUESTION)
    torch.testing.assert_close(second.logits, own_logits(name, whole)[-1], **NEAR)


@every_hybrid
def test_a_turn_without_new_chunks_keeps_the_states(name):
    made = model(name)
    reader, chosen = Prefiller(made, PREFIX), Reuse(made.shape.layers)
    state = reader.new_state()
    reader.prefill_sparse(sources(name, 2), QUESTION, chosen, StepTimer(), options(made), state=state)
    state.append_answer((), (7, 8))
    second = reader.prefill_sparse(sources(name, 2), QUESTION, chosen, StepTimer(), options(made), state=state)
    torch.testing.assert_close(second.logits, naive(name, CHUNKS[:2], (*QUESTION, 7, 8, *QUESTION)), **NEAR)


class OneEntry:
    """A store of one entry, in memory."""

    def __init__(self, body):
        self.body = [bytes(part) for part in body]

    def read(self, key, ranges, out, arrived=lambda number: None):
        at = 0
        for number, part in enumerate(ranges):
            out[at : at + part.size] = self.body[part.layer][part.offset : part.offset + part.size]
            at += part.size
            arrived(number)


@pytest.mark.parametrize("form", ["exact", "int8"])
@every_hybrid
def test_states_come_back_from_the_store_bit_by_bit_and_damage_is_found(name, form):
    kv = encoded(name)[0]
    head, body = pack(kv, 4, "f", form)
    key = chunk_key("f", "s", kv.tokens)
    read = unpack_head(head, key, "f", "s")
    assert len(body) == model(name).shape.layers + 1
    assert read.layout.state_bytes == model(name).states.bytes == body[-1].nbytes
    store = OneEntry(body)
    found = model(name).states.unpacked(fetch_states(store, key, read))
    assert all(torch.equal(one, other) for one, other in zip(found, kv.states, strict=True))
    store.body[-1] = store.body[-1][:-1] + bytes([store.body[-1][-1] ^ 1])
    with pytest.raises(EntryCorrupt, match="states are damaged"):
        fetch_states(store, key, read)


def test_entries_of_models_without_states_are_the_bytes_that_they_were():
    kv = encoded("lfm2")[0]
    head, body = pack(replace(kv, states=()), 4, "f")
    assert b"state" not in head
    assert len(body) == model("lfm2").shape.layers


def test_states_are_rounded_to_the_dtype_of_the_model_once():
    weights = own("qwen3_5_text")
    made = DecoderModel(type(weights)(weights.config).bfloat16().eval(), profile=Profile(block=4))
    kv = Prefiller(made, PREFIX).encode(CHUNKS[0])
    assert {each.dtype for each in kv.states} == {torch.bfloat16}
    assert sum(each.nbytes for each in kv.states) == made.states.bytes
