"""LFPS over a split context: what is read in both parts is one attention, and the split changes no candidate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ragkv.kernels.attention import merge
from ragkv.sparse.attention import attend_heads
from ragkv.sparse.lfps import Lfps, LfpsState
from tests.sparse.toy_request import GROUPINGS, Request, make_request

HEADS = ["kv", "query"]
pytestmark = pytest.mark.usefixtures("one_thread")


def prefilled(request: Request, params: Lfps) -> LfpsState:
    state = params.start()
    request.prefill(state)
    return state


def near_rows(state: LfpsState, positions: Tensor, first: int) -> Tensor:
    """Return which rows [n] the device holds: sinks, and all from position `first` on."""
    held = positions >= first
    held[state.scores[0].sinks] = True
    return held


def step_in_parts(request: Request, state: LfpsState, at: int, split: int) -> Tensor:
    """Return the output [Hq, d] of a step whose newest keys and sinks are read by themselves."""
    layer, q, k, v, _, k_pos = request.call_args(at)
    first = int(k_pos.sort().values[-split])
    out = state.attend_before(layer, q[0], k, v, k_pos, first=first, scale=request.scale)
    state.mark_ahead()
    held = near_rows(state, k_pos, first)
    queries = q[0].unflatten(0, (k.shape[1], -1))
    near = attend_heads(queries, k[held].transpose(0, 1), v[held].transpose(0, 1), scale=request.scale)
    return merge([near, out])[0].flatten(0, 1)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
def test_a_split_at_the_last_tokens_is_the_step_without_one(heads: str, q_heads: int, kv_heads: int) -> None:
    request = make_request(steps=12, q_heads=q_heads, kv_heads=kv_heads)
    whole, split = (prefilled(request, Lfps(least=6, share=0.03, heads=heads, split=n)) for n in (0, 5))
    for at in range(12):
        expected = request.step(whole, at)
        torch.testing.assert_close(step_in_parts(request, split, at, 5), expected, rtol=0, atol=1e-12)
        assert split.key_counts[-1].read.tolist() == whole.key_counts[-1].read.tolist()
        assert split.key_counts[-1].present == whole.key_counts[-1].present


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", [5, 17, 60])
def test_both_parts_are_attention_over_the_union_of_what_they_read(heads: str, size: int) -> None:
    request = make_request(steps=8)
    state = prefilled(request, Lfps(share=1.0, heads=heads, split=size))
    for at in range(8):
        marked = [] if at == 0 else slots_by_list(state)
        out, (_, q, k, v, _, k_pos) = step_in_parts(request, state, at, size), request.call_args(at)
        held = near_rows(state, k_pos, int(k_pos.sort().values[-size]))
        for head in range(q.shape[1]) if marked else ():
            union = held.clone()
            union[marked[head * len(marked) // q.shape[1]]] = True
            weights = (k[union, head // 4] @ q[0, head] * request.scale).softmax(0)
            torch.testing.assert_close(out[head], weights @ v[union, head // 4], rtol=0, atol=1e-12)
            assert int(state.key_counts[-1].read[head * len(marked) // q.shape[1]]) == int(union.sum())


def slots_by_list(state: LfpsState) -> list[Tensor]:
    """Return the rows that are marked for the next token, list after list."""
    ahead = state.ahead[0]
    return list(ahead.slots.split(ahead.counts.tolist()))


@pytest.mark.parametrize("heads", HEADS)
def test_what_is_marked_does_not_depend_on_the_split(heads: str) -> None:
    request = make_request(steps=10)
    states = {n: prefilled(request, Lfps(least=6, share=0.03, heads=heads, split=n)) for n in (0, 5, 40, 1000)}
    for at in range(10):
        for size, state in states.items():
            step_in_parts(request, state, at, min(size, request.rows)) if size else request.step(state, at)
        for state in states.values():
            torch.testing.assert_close(state.ahead[0].positions, states[0].ahead[0].positions, rtol=0, atol=0)
            torch.testing.assert_close(state.ahead[0].starts, states[0].ahead[0].starts, rtol=0, atol=0)
            for table in ("vertical", "slash"):
                found, expected = (getattr(each.scores[0], table).scores for each in (state, states[0]))
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_where_the_device_holds_everything_the_cpu_reads_nothing() -> None:
    request = make_request(steps=3)
    state = prefilled(request, Lfps(split=1000))
    for at in range(3):
        rows = request.rows + at + 1
        out = step_in_parts(request, state, at, rows - state.params.sinks)
        torch.testing.assert_close(out, request.dense(at), rtol=0, atol=1e-12)
        assert state.key_counts[-1].read.tolist() == [rows] * 2


@pytest.mark.parametrize("fields", [{"split": 4}, {"split": -1}, {"split": 64, "bypass": 0.85}])
def test_a_split_holds_the_last_tokens_and_bypasses_no_head(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="split"):
        Lfps(**fields)
