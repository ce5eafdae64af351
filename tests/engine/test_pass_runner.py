"""States that are composed of all chunks are those of the recurrences themselves, run token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.engine.decoding import decode
from ragkv.engine.generation import Sampling
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.passes import run_alone
from ragkv.engine.prefill import Prefiller
from ragkv.engine.stitch import Stitch
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.model.profile import Profile
from ragkv.model.recurrence import Composition, RecurrentState, States, state_form
from ragkv.recompute.reuse import Reuse
from ragkv.timing import StepTimer
from tests import families
from tests.hybrids import HYBRIDS

NEAR: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
PREFIX, QUESTION = families.tokens(3, 99), families.tokens(5, 50)
CHUNKS = [families.tokens(n, n) for n in (18, 2, 22, 13)]  # one is shorter than a convolution
MIXERS = ("linear_attn", "mamba", "conv")
every_hybrid = pytest.mark.parametrize("name", HYBRIDS)
with_recurrence = pytest.mark.parametrize("name", [name for name in HYBRIDS if name != "lfm2"])


@cache
def own(name: str) -> Any:
    """Weights whose states keep what they have read: those of random weights forget it within some ten tokens."""
    weights = families.weights(name, **HYBRIDS[name])
    for parameter in (each for each_name, each in weights.named_parameters() if each_name.endswith("A_log")):
        torch.nn.init.constant_(parameter, -4.0)
    return weights


@cache
def model(name: str) -> DecoderModel:
    """A DecoderModel of the same weights."""
    return DecoderModel(own.__wrapped__(name), profile=Profile(block=4, initial=1, local=2, stable_layers=(0, 1)))


def mixers(weights: Any) -> list[Any]:
    """The parts of layers that have a state, in their order."""
    named = [[getattr(block, name, None) for name in MIXERS] for block in weights.model.layers]
    return [part for parts in named for part in parts if part is not None]


def inputs(name: str, tokens: tuple[int, ...]) -> list[Tensor]:
    """What enters each layer with a state [T, hidden], in a forward of transformers over tokens."""
    weights, seen = own(name), list[Tensor]()
    handles = [
        mixer.register_forward_pre_hook(
            lambda _, args, given: seen.append((args[0] if args else given["hidden_states"])[0]), with_kwargs=True
        )
        for mixer in mixers(weights)
    ]
    with torch.inference_mode():
        weights(torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def convolved(rows: Tensor, convolution: Any) -> Tensor:
    """A causal convolution of rows [T, channels], from the weights, token by token."""
    size, found = convolution.weight.shape[-1], []
    padded = torch.cat([rows.new_zeros(size - 1, rows.shape[1]), rows])
    for token in range(len(rows)):
        row = sum(padded[token + tap] * convolution.weight[:, 0, tap] for tap in range(size))
        found.append(row if convolution.bias is None else row + convolution.bias)
    return torch.stack(found)


def tail(rows: Tensor, convolution: Any) -> Tensor:
    size = convolution.weight.shape[-1]
    return F.pad(rows.T, (size, 0))[:, -size:]


def unit(rows: Tensor) -> Tensor:
    return rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def delta_rule(mixer: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet: S <- a S + b k (v - (a S)^T k)^T, token by token."""
    if hasattr(mixer, "in_proj_qkvz"):
        given = mixer.in_proj_qkvz(rows[None]), mixer.in_proj_ba(rows[None])
        q, k, v, _, b, a = (each[0] for each in mixer.fix_query_key_value_ordering(*given))
        mixed = torch.cat([each.flatten(1) for each in (q, k, v)], 1)
    else:
        mixed, b, a = mixer.in_proj_qkv(rows), mixer.in_proj_b(rows), mixer.in_proj_a(rows)
    _, keys, values = F.silu(convolved(mixed, mixer.conv1d)).split([mixer.key_dim, mixer.key_dim, mixer.value_dim], 1)
    keys = unit(keys.view(len(rows), -1, mixer.head_k_dim))
    values = values.view(len(rows), -1, mixer.head_v_dim)
    group = values.shape[1] // keys.shape[1]
    decay, rate = torch.exp(-mixer.A_log.exp() * F.softplus(a + mixer.dt_bias)), b.sigmoid()
    state = torch.zeros(values.shape[1], mixer.head_k_dim, mixer.head_v_dim)
    for token in range(len(rows)):
        for head in range(values.shape[1]):
            k, decayed = keys[token, head // group], decay[token, head] * state[head]
            state[head] = decayed + rate[token, head] * torch.outer(k, values[token, head] - decayed.T @ k)
    return state, tail(mixed, mixer.conv1d)


def mamba(mixer: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mamba-2: S <- exp(dt A) S + dt x B^T, token by token."""
    _, mixed, steps = mixer.in_proj(rows).split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], -1)
    width = mixer.n_groups * mixer.ssm_state_size
    x, given, _ = F.silu(convolved(mixed, mixer.conv1d)).split([mixer.intermediate_size, width, width], -1)
    x, given = x.view(len(rows), mixer.num_heads, -1), given.view(len(rows), mixer.n_groups, -1)
    steps = F.softplus(steps + mixer.dt_bias).clamp(*mixer.time_step_limit)
    state = torch.zeros(mixer.num_heads, x.shape[-1], mixer.ssm_state_size)
    for token in range(len(rows)):
        for head in range(mixer.num_heads):
            step, group = steps[token, head], head * mixer.n_groups // mixer.num_heads
            decay = torch.exp(-step * mixer.A_log[head].exp())
            state[head] = decay * state[head] + step * torch.outer(x[token, head], given[token, group])
    return state, tail(mixed, mixer.conv1d)


def convolution(mixer: Any, rows: Tensor) -> tuple[None, Tensor]:
    before, _, x = mixer.in_proj(rows).chunk(3, -1)
    return None, tail(before * x, mixer.conv)


RECURRENCES: dict[str, Callable[[Any, Tensor], tuple[Tensor | None, Tensor]]] = {
    "qwen3_next": delta_rule,
    "qwen3_5_text": delta_rule,
    "granitemoehybrid": mamba,
    "lfm2": convolution,
}


def naive(name: str, parts: list[list[Tensor]]) -> States:
    """The states behind what entered each layer in several forwards [part][layer], one after another."""
    found = []
    with torch.inference_mode():
        for mixer, rows in zip(mixers(own(name)), zip(*parts, strict=True), strict=True):
            state, last = RECURRENCES[name](mixer, torch.cat(rows))
            found.append(RecurrentState(last[None], None if state is None else state[None]))
    return tuple(found)


@cache
def expected(name: str, count: int) -> States:
    """The recurrences over S and some chunks, each with what entered the layers when it ran behind S alone."""
    behind = [[rows[len(PREFIX) :] for rows in inputs(name, (*PREFIX, *chunk))] for chunk in CHUNKS[:count]]
    return naive(name, [inputs(name, PREFIX), *behind])


def near(found: States | None, expected: States) -> None:
    assert found is not None
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.tail, other.tail, **NEAR)
        torch.testing.assert_close(one.recurrent, other.recurrent, **NEAR)


def sources(reader: Prefiller, count: int) -> list[InMemoryChunk]:
    return [InMemoryChunk(kv, 4, exact=i == 0) for i, kv in enumerate(reader.encode_many(CHUNKS[:count]))]


def composed(reader: Prefiller, count: int) -> States | None:
    stitch = Stitch(reader.model, [], len(reader.prefix_tokens), 0)
    stitch.cache.extend(reader.prefix)
    run_alone(reader.model, reader.runner.compose_states(stitch, sources(reader, count)))
    return stitch.cache.states


def full(name: str, tokens: tuple[int, ...]) -> States:
    """The states behind tokens, as a prefill of all of them leaves them."""
    made = model(name)
    filled = ContextCache(made.shape, len(tokens), made.dtype)
    made.forward([append(filled, tokens, 0)])
    return filled.states


@every_hybrid
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_composed_states_are_those_of_the_recurrence_over_all_chunks(name, count):
    near(composed(Prefiller(model(name), PREFIX), count), expected(name, count))


@every_hybrid
def test_composed_of_one_chunk_they_are_the_stored_ones(name):
    made, reader = model(name), Prefiller(model(name), PREFIX)
    near(composed(reader, 1), made.states_of(reader.encode(CHUNKS[0]).states))


@every_hybrid
def test_in_the_first_layer_they_are_those_of_a_full_prefill(name):
    whole = full(name, sum(CHUNKS, PREFIX))
    found = composed(Prefiller(model(name), PREFIX), len(CHUNKS))
    assert found is not None
    near(found[:1], whole[:1])


@with_recurrence
def test_they_are_not_those_behind_the_last_chunk(name):
    made, reader = model(name), Prefiller(model(name), PREFIX)
    last, found = made.states_of(reader.encode(CHUNKS[3]).states), composed(reader, 4)
    assert found is not None
    for one, other in zip(found, last, strict=True):
        assert (one.recurrent - other.recurrent).norm() > 0.02 * other.recurrent.norm()


def differences(ones: States, others: States) -> States:
    pairs = zip(ones, others, strict=True)
    return tuple(replace(one, recurrent=one.recurrent - other.recurrent) for one, other in pairs)


@with_recurrence
def test_each_chunk_adds_what_its_transition_makes_of_what_the_chunks_before_it_changed(name):
    """C = S + T(C' - P): S the states that it leaves of those behind the prefix P, C' those of the chunks before it."""
    reader = Prefiller(model(name), PREFIX)
    before, after, prefix = composed(reader, 2), composed(reader, 3), reader.prefix.states

    def behind(states: States) -> States:
        """The states behind the third chunk, from some; convolutions begin as behind the second."""
        pairs = zip(states, before, strict=True)
        composition = Composition(tuple(replace(state, tail=at.tail) for state, at in pairs))
        model(name).forward([replace(reader.encoding_pass(CHUNKS[2]), composition=composition)])
        return composition.states

    changed = differences(before, prefix)
    transition = differences(behind(changed), behind(differences(changed, changed)))
    total = zip(behind(prefix), transition, strict=True)
    near(after, tuple(replace(one, recurrent=one.recurrent + more.recurrent) for one, more in total))


@every_hybrid
def test_a_question_begins_from_composed_states_where_its_method_says_so(name):
    made, reader = model(name), Prefiller(model(name), PREFIX)
    chunks = sources(reader, 3)
    found = reader.prefill_sparse(chunks, QUESTION, Reuse(made.shape.layers, states="composed"), StepTimer())
    last = replace(reader.encode(CHUNKS[2]), states=made.states.flat(expected(name, 3)))
    given = [*chunks[:2], InMemoryChunk(last, 4)]
    wanted = reader.prefill_sparse(given, QUESTION, Reuse(made.shape.layers), StepTimer())
    torch.testing.assert_close(found.logits, wanted.logits, rtol=2e-4, atol=2e-4)
    assert found.prefilled_tokens == wanted.prefilled_tokens + sum(map(len, CHUNKS[:3]))


@every_hybrid
def test_a_later_turn_composes_its_chunks_behind_the_turn_before(name):
    made, reader = model(name), Prefiller(model(name), PREFIX)
    state, method = reader.new_state(), Reuse(made.shape.layers, states="composed")
    chunks = sources(reader, 3)
    first = reader.prefill_sparse(chunks[:2], QUESTION, method, StepTimer(), state=state)
    answer = tuple(decode(made, first.cache, first.logits, first.position, Sampling(3)))
    state.append_answer(answer, (7,))
    second = reader.prefill_sparse(chunks, QUESTION, method, StepTimer(), state=state)
    said = (*PREFIX, *CHUNKS[0], *CHUNKS[1], *QUESTION, *answer, 7, *CHUNKS[2], *QUESTION)
    near(second.cache.states[:1], full(name, said)[:1])


@every_hybrid
def test_chunks_that_were_encoded_alone_are_composed_behind_the_prefix(name):
    reader = Prefiller(model(name), PREFIX, mode="isolated")
    alone = naive(name, [inputs(name, PREFIX), inputs(name, CHUNKS[0]), inputs(name, CHUNKS[1])])
    near(composed(reader, 2), alone)


@every_hybrid
def test_passes_beside_it_do_not_change_a_composition_and_one_that_fails_leaves_it(name, monkeypatch):
    made, reader = model(name), Prefiller(model(name), PREFIX)
    assert reader.prefix.states is not None
    given = Composition(reader.prefix.states)
    monkeypatch.setattr(made, "_norm", lambda rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.forward([replace(reader.encoding_pass(CHUNKS[0]), composition=given)])
    assert given.states is reader.prefix.states
    monkeypatch.undo()
    other, composing = reader.encoding_pass(CHUNKS[1]), replace(reader.encoding_pass(CHUNKS[0]), composition=given)
    made.forward([other, composing])
    near(given.states, expected(name, 1))
    near(other.cache.states, made.states_of(reader.encode(CHUNKS[1]).states))


def test_without_a_prefix_states_are_composed_from_nothing():
    reader = Prefiller(model("qwen3_5_text"), ())
    near(composed(reader, 2), naive("qwen3_5_text", [inputs("qwen3_5_text", chunk) for chunk in CHUNKS[:2]]))


def test_states_of_a_model_in_bfloat16_are_composed_in_the_form_of_its_stored_ones():
    weights = families.weights("qwen3_5_text", **HYBRIDS["qwen3_5_text"])
    reader = Prefiller(DecoderModel(weights.bfloat16()), PREFIX)
    found = composed(reader, 2)
    assert found is not None
    assert state_form(found, torch.bfloat16) == reader.model.states
