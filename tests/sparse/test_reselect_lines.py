"""LoopServe's decoding reads the lines of the prefills (algorithm 3, line 8), against a naive reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ragkv.sparse.base import QueryObserver, decode_state
from ragkv.sparse.loopserve import LoopServe, LoopServeState, PassLines
from ragkv.sparse.prefill import SparsePrefill
from ragkv.sparse.reselect import LoopServeDecode
from tests.sparse.test_reselect import best_by_hand, over_rows
from tests.sparse.toy_request import GROUPINGS, make_request

Lines = tuple[set[tuple[int, int]], set[tuple[int, int]]]
"""Pairs (query head, position) of vertical lines, and (query head, distance) of slash lines."""


def pass_lines(lines: Lines, last: int, heads: int, unlimited: tuple[int, ...] = ()) -> PassLines:
    """Make the record of a pass."""
    pairs = (torch.tensor(sorted(each), dtype=torch.int32).view(-1, 2).T for each in lines)
    return PassLines(*pairs, torch.tensor([head in unlimited for head in range(heads)]), last)


def on_lines(request, at: int, turns: list[Lines]) -> list[list[int]]:
    """Return, per kv head, the rows that are on a line of a query head of its group, one row at a time."""
    heads = request.k.shape[1]
    group, rows = request.q.shape[1] // heads, request.rows + at + 1
    now = int(request.positions[rows - 1])
    found: list[list[int]] = [[] for _ in range(heads)]
    for row in range(rows):
        position = int(request.positions[row])
        for vertical, slash in turns:
            for head in {h // group for h, c in vertical if c == position}:
                found[head].append(row)
            for head in {h // group for h, o in slash if o == now - position}:
                found[head].append(row)
    return found


def random_lines(request, q_heads: int, seed: int) -> Lines:
    """Draw lines for every query head among positions and distances that occur."""
    generator = torch.Generator().manual_seed(seed)
    last = int(request.positions[request.rows - 1])
    drawn = torch.randint(last + 1, (2, q_heads, 12), generator=generator)
    near = torch.randint(1, 9, (q_heads, 2), generator=generator)
    vertical = {(head, int(request.positions[row % request.rows])) for head in range(q_heads) for row in drawn[0, head]}
    slash = {(head, int(o)) for head in range(q_heads) for o in (*drawn[1, head], *near[head])}
    return vertical, slash


def with_lines(policy: LoopServeDecode, passes: list[PassLines]):
    """Start a decode state whose turn had these passes in layer 0."""
    prefill = LoopServeState(LoopServe(), {0: passes})
    return decode_state(policy, 100, SparsePrefill(prefill, None))


def union(*parts: list[list[int]]) -> list[list[int]]:
    return [sorted({row for part in parts for row in part[head]}) for head in range(len(parts[0]))]


@pytest.mark.parametrize("evict", ["view", "evict"])
@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
def test_a_step_reads_the_lines_of_all_turns_the_selected_keys_and_later_ones(q_heads, kv_heads, evict):
    request = make_request(q_heads=q_heads, kv_heads=kv_heads, rows=60, steps=14)
    turns = [random_lines(request, q_heads, 1), random_lines(request, q_heads, 2)]
    last = int(request.positions[59])
    passes = [pass_lines(turns[0], last - 20, q_heads), pass_lines(turns[1], last, q_heads)]
    # Lines of the first pass lie within it.
    turns[0] = tuple({(h, x) for h, x in part if x <= last - 20} for part in turns[0])
    passes[0] = pass_lines(turns[0], last - 20, q_heads)
    state = with_lines(LoopServeDecode(first=4, every=4, budget=10, evict=evict), passes)
    request.prefill(state)
    kept: list[list[int]] = [[] for _ in range(kv_heads)]
    less = 0
    for at in range(request.steps):
        out, rows = request.step(state, at), request.rows + at + 1
        if at >= 4 and (at - 4) % 4 == 0:
            everything = [list(range(rows))] * kv_heads
            kept = best_by_hand(at, request, 4, 10, everything if evict == "view" or at == 4 else kept)
        else:
            kept = [[*mine, rows - 1] for mine in kept]
        wanted = union(kept, on_lines(request, at, turns))
        torch.testing.assert_close(out, over_rows(at, request, wanted), rtol=0, atol=1e-10)
        selecting = {4: rows, 8: rows if evict == "view" else 18, 12: rows if evict == "view" else 18}
        reads = [max(len(mine), selecting.get(at, 0)) for mine in wanted]
        assert state.key_counts[-1].read.tolist() == reads
        less += max(reads) < rows
    assert less >= 4
    assert state.has_selected
    assert state.keys_read < state.keys_present


def test_a_slash_line_moves_with_the_token_and_a_vertical_line_stays():
    request = make_request(q_heads=1, kv_heads=1, rows=60, steps=4, gapped=False)
    state = with_lines(LoopServeDecode(), [pass_lines(({(0, 7)}, {(0, 30)}), 59, 1)])
    request.prefill(state)
    for at in range(4):
        rows = [7, 60 + at - 30, *range(60, 61 + at)]
        torch.testing.assert_close(request.step(state, at), over_rows(at, request, [rows]), rtol=0, atol=1e-10)


def test_heads_without_lines_are_dense_until_the_first_selection():
    request = make_request(q_heads=4, kv_heads=2, rows=60, steps=6)
    vertical = {(0, int(request.positions[5]))}
    lines = pass_lines((vertical, set()), int(request.positions[59]), 4, unlimited=(3,))
    state = with_lines(LoopServeDecode(first=3, every=3, budget=8), [lines])
    request.prefill(state)
    for at in range(6):
        out, rows = request.step(state, at), request.rows + at + 1
        if at < 3:
            kept = [[5, *range(60, rows)], list(range(rows))]
        elif at == 3:
            kept = best_by_hand(at, request, 3, 8, [list(range(rows))] * 2)
            kept = union(kept, [[5], []])
        else:
            kept = [[*mine, rows - 1] for mine in kept]
        torch.testing.assert_close(out, over_rows(at, request, kept), rtol=0, atol=1e-10)


def test_lines_of_earlier_turns_alone_are_read_from_the_first_selection_on():
    request = make_request(q_heads=2, kv_heads=1, rows=60, steps=5)
    last = int(request.positions[59])
    earlier = pass_lines(({(1, int(request.positions[5]))}, set()), last - 10, 2)
    for passes in ([earlier], [earlier, pass_lines((set(), set()), last, 2, unlimited=(0, 1))]):
        state = with_lines(LoopServeDecode(first=2, every=2, budget=4), passes)
        request.prefill(state)
        for at in range(2):
            torch.testing.assert_close(request.step(state, at), request.dense(at), rtol=0, atol=1e-10)
        assert not state.has_selected
        (kept,) = best_by_hand(2, request, 2, 4, [list(range(63))])
        expected = over_rows(2, request, [sorted({5, *kept})])
        torch.testing.assert_close(request.step(state, 2), expected, rtol=0, atol=1e-10)


def test_without_lines_or_where_they_are_not_wanted_decoding_is_as_before():
    request = make_request(q_heads=4, kv_heads=2, rows=60, steps=8)
    lines = pass_lines(random_lines(request, 4, 1), int(request.positions[59]), 4)
    policy = LoopServeDecode(first=3, every=3, budget=8)
    plain = policy.start()
    unwanted = with_lines(LoopServeDecode(first=3, every=3, budget=8, lines=False), [lines])
    empty = with_lines(policy, [])
    for state in (plain, unwanted, empty):
        request.prefill(state)
    for at in range(8):
        outs = [request.step(state, at) for state in (plain, unwanted, empty)]
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("turns", [1, 2])
def test_lines_that_a_prefill_selects_are_the_lines_that_decoding_reads(turns):
    """A prefill under LoopServe, in one or two turns, then steps; values by the lines that its state shows."""
    request = make_request(q_heads=4, kv_heads=2, rows=80, question=80, steps=6, gapped=False)
    prefill = SparsePrefill(LoopServe(alpha=0.5, sample=8, tile=4, dense=1.0).start(), 80)
    state = decode_state(LoopServeDecode(first=3, every=3, budget=8), 80, prefill)
    asked = QueryObserver(state, prefill, 50 if turns == 2 else 0)
    starts = [0, 50, 80] if turns == 2 else [0, 80]
    for start, stop in pairwise(starts):
        rows, end = slice(start, stop), slice(0, stop)
        attention = asked if stop == 80 else prefill
        given = request.q[rows], request.k[end], request.v[end], request.positions[rows], request.positions[end]
        attention(0, *given, scale=request.scale)
    assert [each.last for each in prefill.state.lines[0]] == [stop - 1 for stop in starts[1:]]
    shown = [
        tuple({(int(h), int(x)) for h, x in part.T} for part in (p.vertical, p.slash)) for p in prefill.state.lines[0]
    ]
    assert all(vertical and slash for vertical, slash in shown)
    kept: list[list[int]] = [[], []]
    for at in range(6):
        out, rows = request.step(state, at), request.rows + at + 1
        if at == 3:
            kept = best_by_hand(at, request, 3, 8, [list(range(rows))] * 2)
        else:
            kept = [[*mine, rows - 1] for mine in kept]
        wanted = union(kept, on_lines(request, at, shown))
        torch.testing.assert_close(out, over_rows(at, request, wanted), rtol=0, atol=1e-10)
