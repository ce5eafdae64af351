"""A split context: sinks and newest keys on the device that computes, all rows in host memory, one answer."""

from __future__ import annotations

import math
from collections.abc import Sequence as AbcSequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ragkv.engine.decoding import decode_step, generate
from ragkv.engine.generation import Sampling, Sequence
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.split_context import SplitContext, split_context
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.sparse.lfps import Lfps, LfpsState
from tests import tiny

STEPS = 16

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Answer:
    tokens: list[int]
    logits: Tensor
    state: LfpsState | None
    sequence: Sequence


def start(model: DecoderModel, params: Lfps | None, *, lengths: AbcSequence[int] = (), gap: int = 0) -> Sequence:
    """Prefill a context, whose layers may hold fewer rows, and a question behind a gap."""
    cache, state = ContextCache(model.shape, 8, model.dtype), None if params is None else params.start()
    model.forward([append(cache, tiny.tokens(150, 1), 0, outputs=0)])
    if lengths:
        cache.truncate(lengths)
    logits = model.forward([append(cache, tiny.tokens(22, 2), 150 + gap, attention=state)])[0][-1]
    attention = split_context(model, cache, state, STEPS) or state
    return Sequence(cache, logits, 172 + gap, Sampling(STEPS), attention)


@torch.inference_mode()
def answer(model: DecoderModel, params: Lfps | None, **context: object) -> Answer:
    sequence = start(model, params, **context)  # type: ignore[arg-type]
    attention = sequence.attention
    state = attention.state if isinstance(attention, SplitContext) else attention
    tokens = list(generate(model, sequence))
    return Answer(tokens, sequence._logits.logits, state, sequence)


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.tokens == expected.tokens
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-9)
    for layer in range(found.sequence.cache.shape.layers):
        ours, theirs = found.sequence.cache, expected.sequence.cache
        assert torch.equal(ours.positions(layer), theirs.positions(layer))
        torch.testing.assert_close(ours.k(layer), theirs.k(layer), rtol=0, atol=1e-9)
        torch.testing.assert_close(ours.v(layer), theirs.v(layer), rtol=0, atol=1e-9)


@pytest.mark.parametrize("heads", ["kv", "query"])
@pytest.mark.parametrize(("kind", "context"), [("llama", {"gap": 31}), ("qwen3", {"lengths": (150, 3, 6, 90)})])
def test_an_answer_split_at_the_last_tokens_is_that_of_one_memory(heads: str, kind: str, context: dict) -> None:
    model = tiny.model(kind)
    whole, split = (answer(model, Lfps(least=8, heads=heads, split=n), **context) for n in (0, 5))
    assert isinstance(split.sequence.attention, SplitContext)
    assert_same(split, whole)
    assert (split.state.keys_read, split.state.keys_present) == (whole.state.keys_read, whole.state.keys_present)
    assert split.state.keys_read < split.state.keys_present


@pytest.mark.parametrize(("size", "lengths"), [(5, ()), (40, (150, 3, 6, 90)), (160, ())])
def test_a_split_that_reads_everything_is_dense_decoding(size: int, lengths: tuple[int, ...]) -> None:
    model = tiny.model()
    everything = Lfps(beta=-math.inf, share=1.0, split=size)
    found = answer(model, everything, lengths=lengths)
    assert isinstance(found.sequence.attention, SplitContext)
    assert_same(found, answer(model, None, lengths=lengths))
    assert found.state.keys_read == found.state.keys_present


@pytest.mark.parametrize("size", [172 - 4, 10_000])
def test_a_context_that_stays_on_the_device_is_not_split(size: int) -> None:
    model = tiny.model()
    found = answer(model, Lfps(least=8, split=size))
    assert isinstance(found.sequence.attention, LfpsState)
    assert_same(found, answer(model, Lfps(least=8)))


@pytest.mark.parametrize("params", [None, Lfps()])
def test_nothing_is_split_unasked(params: Lfps | None) -> None:
    assert not isinstance(start(tiny.model(), params).attention, SplitContext)


def test_layers_with_a_window_are_not_split() -> None:
    model = tiny.model(layers=2)
    sequence = start(model, Lfps(split=5))
    assert isinstance(sequence.attention, SplitContext)
    model.kinds = tuple(replace(kind, window=16) for kind in model.kinds)
    assert isinstance(start(model, Lfps(split=5)).attention, LfpsState)


@torch.inference_mode()
def test_the_device_holds_the_sinks_and_the_newest_keys_after_every_token() -> None:
    model = tiny.model()
    sequence = start(model, Lfps(split=7), lengths=(150, 3, 6, 90), gap=5)
    split = sequence.attention
    assert isinstance(split, SplitContext)
    for step in range(STEPS - 1):
        sequence.sample(frozenset())
        decode_step(model, [sequence])
        assert sequence.fault is None
        for layer in range(model.shape.layers):
            near, cache = split.near.positions(layer), split.cache.positions(layer)
            order = cache.argsort()
            rows = torch.cat([order[:4], order[4:][-7:]])
            assert near.sort().values.tolist() == cache[rows].tolist()
            for ours, theirs in ((split.near.k, split.cache.k), (split.near.v, split.cache.v)):
                assert torch.equal(ours(layer)[near.argsort()], theirs(layer)[rows])
        assert split.in_host == sum(split.cache.lengths) - 4 * 11
        token = 8 * (8 + 2 * 2) * 8 + 8 * (8 + 1) * 8  # query and new row; output and log-sum-exp; float64
        assert split.crossed == (step + 1) * model.shape.layers * token


@torch.inference_mode()
def test_split_requests_decode_beside_others() -> None:
    model = tiny.model()
    params = [Lfps(least=8, split=5), None, Lfps(least=8, split=9), Lfps(least=8)]
    alone = [answer(model, each, gap=gap).tokens for gap, each in enumerate(params)]
    sequences = [start(model, each, gap=gap) for gap, each in enumerate(params)]
    for _ in range(STEPS):
        for sequence in sequences:
            sequence.sample(frozenset())
        decode_step(model, sequences)
    assert [sequence.tokens for sequence in sequences] == alone


@torch.inference_mode()
def test_the_next_tokens_candidates_are_marked_before_its_query_exists() -> None:
    model = tiny.model()
    sequence = start(model, Lfps(split=5))
    split = sequence.attention
    assert isinstance(split, SplitContext)
    for step in range(6):
        sequence.sample(frozenset())
        decode_step(model, [sequence])
        marked = split.state.ahead
        assert sorted(marked) == [0, 1, 2], "that of the last layer is marked while the next query travels"
        assert {each.now for each in marked.values()} == {172 + step + 1}
