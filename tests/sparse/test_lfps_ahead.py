"""LFPS marks the candidates of a token before its query exists, from the tables alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ragkv.sparse.lfps import Lfps, LfpsState
from tests.sparse.toy_request import Request, make_request

SOME = Lfps(least=12, share=0.05)
HEADS = ["query", "kv"]


def prefilled(request: Request, params: Lfps) -> LfpsState:
    state = params.start()
    request.prefill(state)
    return state


@pytest.mark.parametrize("heads", HEADS)
def test_a_step_reads_what_was_marked_when_the_step_before_ended(heads: str) -> None:
    request = make_request(steps=12)
    state = prefilled(request, replace(SOME, heads=heads))
    request.step(state, 0)
    for at in range(1, 12):
        ahead = state.ahead[0]
        rows = request.rows + at
        assert (ahead.now, ahead.row) == (int(request.positions[rows]), rows)
        request.step(state, at)
        assert state.key_counts[-1].read.tolist() == (ahead.starts.diff() + len(state.scores[0].sinks)).tolist()
        assert rows in ahead.slots, "its own token is among them"


def test_what_is_marked_does_not_depend_on_the_query() -> None:
    request = make_request(steps=4)
    other = replace(request, q=torch.cat([request.q[: request.question + 3], -7 * request.q[request.question + 3 :]]))
    states = [prefilled(each, SOME) for each in (request, other)]
    for at in range(3):
        for state, each in zip(states, (request, other), strict=True):
            each.step(state, at)
    marked = [state.ahead[0] for state in states]
    outs = [each.step(state, 3) for state, each in zip(states, (request, other), strict=True)]
    assert torch.equal(marked[0].positions, marked[1].positions)
    assert (outs[0] - outs[1]).abs().max() > 1e-3


@pytest.mark.parametrize("heads", HEADS)
def test_a_token_at_another_position_than_the_next_gets_candidates_of_its_own(heads: str) -> None:
    request = make_request(steps=6)
    request.positions[request.rows + 3 :] += 9
    ahead, late = (prefilled(request, replace(SOME, heads=heads)) for _ in range(2))
    for at in range(6):
        outs = request.step(ahead, at), request.step(late, at)
        assert torch.equal(*outs)
        late.scores[0].drop_token(late.ahead.pop(0))  # marks nothing before the token is there
    late.scores[0].append_token(ahead.ahead[0].now, ahead.ahead[0].row)
    assert torch.equal(ahead.scores[0].slot, late.scores[0].slot)
    assert torch.equal(ahead.scores[0].recent, late.scores[0].recent)
    assert ahead.scores[0].scored == late.scores[0].scored == request.rows + 6 + 1 - SOME.sinks
    assert torch.equal(ahead.scores[0].vertical.scores, late.scores[0].vertical.scores)


def test_idle_heads_drop_their_candidates_and_busy_ones_keep_theirs() -> None:
    request = make_request(steps=2)
    state = prefilled(request, replace(SOME, heads="query"))
    request.step(state, 0)
    ahead = state.ahead[0]
    busy = torch.tensor([True, False, True, True, False, True, False, False])
    left, counts = ahead.of_rows(busy), ahead.starts.diff()
    assert left.starts.diff().tolist() == (counts * busy).tolist()
    for row in busy.nonzero()[:, 0].tolist():
        mine, was = (each.positions[each.starts[row] : each.starts[row + 1]] for each in (left, ahead))
        assert torch.equal(mine, was)
    assert len(left.slots) == len(left.positions)
