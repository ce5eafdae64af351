"""LoopServe's decoding: when it selects, what it selects, and that it reads nothing else. Oracles W4 and W5."""

import pytest
import torch

from ragkv.sparse.reselect import LoopServeDecode, attention_sums
from tests.sparse.toy_request import GROUPINGS, assert_matches_dense, make_request


def over_rows(at, request, rows):
    """Compute the attention of step `at` over rows, a list per kv head."""
    _, q, k, v, _, _ = request.call_args(at)
    heads = k.shape[1]
    out = []
    for head, asks in enumerate(q[0].unflatten(0, (heads, -1))):
        shares = (asks @ k[rows[head], head].T * request.scale).softmax(-1)
        out.append(shares @ v[rows[head], head])
    return torch.cat(out)


def best_by_hand(at, request, every, budget, among):
    """Select rows at step `at` out of `among`, per kv head, naively: one observed row at a time."""
    rows, heads = request.rows + at + 1, request.k.shape[1]
    group = request.q.shape[1] // heads
    kept = []
    for head in range(heads):
        candidates = [row for row in among[head] if row < rows - every]
        seen = [*candidates, *range(rows - every, rows)]
        total = torch.zeros(len(seen), dtype=torch.float64)
        for n in range(rows - every, rows):
            ask = n - request.rows + request.question
            visible = torch.tensor([request.positions[row] <= request.positions[n] for row in seen])
            for h in range(head * group, (head + 1) * group):
                cells = (request.k[seen, head] @ request.q[ask, h] * request.scale).masked_fill(~visible, -torch.inf)
                total += cells.softmax(-1)
        order = total[: len(candidates)].argsort(descending=True)[:budget].tolist()
        kept.append(sorted(candidates[i] for i in order) + list(range(rows - every, rows)))
    return kept


@pytest.mark.parametrize("evict", ["view", "evict"])
@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
def test_a_selection_keeps_the_keys_that_the_last_tokens_attend_to_and_a_step_reads_those(q_heads, kv_heads, evict):
    request = make_request(q_heads=q_heads, kv_heads=kv_heads, rows=60, steps=14)
    state = LoopServeDecode(first=4, every=4, budget=10, evict=evict).start()
    request.prefill(state)
    kept = [list(range(60 + 4 + 1))] * kv_heads
    for at in range(request.steps):
        out = request.step(state, at)
        rows = request.rows + at + 1
        if at < 4:
            expected = request.dense(at)
        else:
            if (at - 4) % 4 == 0:
                everything = [list(range(rows))] * kv_heads
                kept = best_by_hand(at, request, 4, 10, everything if evict == "view" or at == 4 else kept)
            expected = over_rows(at, request, kept)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
        kept = [[*mine, rows] for mine in kept]  # what comes next is read


def test_selections_are_made_after_the_dense_steps_and_then_at_equal_distances():
    request = make_request(rows=60, steps=60)
    for params, expected in [
        (LoopServeDecode(budget=10), [16, 32, 48]),
        (LoopServeDecode(first=16, every=10, budget=10), [16, 26, 36, 46, 56]),
        (LoopServeDecode(first=3, every=20, budget=10), [3, 23, 43]),
        (LoopServeDecode(first=0, every=50, budget=10), [0, 50]),
    ]:
        state = params.start()
        request.prefill(state)
        for at in range(request.steps):
            request.step(state, at)
        assert state.selection_steps[0] == expected


def test_nothing_is_selected_at_the_first_token_although_the_remainder_is_zero():
    request = make_request(rows=60, steps=17)
    state = LoopServeDecode(budget=0).start()
    request.prefill(state)
    for at in range(16):
        torch.testing.assert_close(request.step(state, at), request.dense(at), rtol=0, atol=1e-10)
    assert state.keys_read == state.keys_present
    assert (request.step(state, 16) - request.dense(16)).abs().max() > 1e-3


def test_the_question_selects_too_if_few_tokens_were_decoded():
    request = make_request(rows=60, question=7, steps=2)
    state = LoopServeDecode(first=1, every=6, budget=10).start()
    request.prefill(state)
    request.step(state, 0)
    request.step(state, 1)
    expected = best_by_hand(1, request, 6, 10, [list(range(62))] * 2)
    assert state.selected[0].slots.tolist() == expected


@pytest.mark.parametrize("evict", ["view", "evict"])
@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
def test_a_budget_for_all_keys_is_dense(q_heads, kv_heads, evict):
    request = make_request(q_heads=q_heads, kv_heads=kv_heads)
    state = LoopServeDecode(first=2, every=5, budget=190, evict=evict).start()
    request.prefill(state)
    for at in range(request.steps):
        torch.testing.assert_close(request.step(state, at), request.dense(at), rtol=0, atol=1e-10)
    assert state.keys_read == state.keys_present


def test_dropped_keys_can_return_with_view_and_never_with_evict():
    request = make_request(rows=200, steps=60)
    back = {}
    for evict in ("view", "evict"):
        state = LoopServeDecode(first=4, every=4, budget=10, evict=evict).start()
        request.prefill(state)
        dropped, back[evict] = [set(), set()], 0
        for at in range(request.steps):
            request.step(state, at)
            if at >= 4 and (at - 4) % 4 == 0:
                for head, kept in enumerate(state.selected[0].slots.tolist()):
                    back[evict] += len(dropped[head] & set(kept))
                    dropped[head] |= set(range(request.rows + at + 1)) - set(kept)
    assert back["view"] > 0
    assert back["evict"] == 0


def test_key_counts_include_the_candidates_of_a_selection():
    request = make_request(rows=60, steps=9)
    for evict, second in (("view", 69), ("evict", 10 + 4 + 4)):
        state = LoopServeDecode(first=4, every=4, budget=10, evict=evict).start()
        request.prefill(state)
        for at in range(request.steps):
            request.step(state, at)
        read = [int(each.read[0]) for each in state.key_counts]
        assert read == [61, 62, 63, 64, 65, 15, 16, 17, second]


def test_a_row_does_not_attend_to_later_keys():
    q = torch.ones(2, 1, 1, dtype=torch.float64)
    keys = torch.zeros(1, 3, 1, dtype=torch.float64)
    found = attention_sums(q, keys, torch.tensor([4, 5]), torch.tensor([[5, 0, 4]]), scale=1.0)
    torch.testing.assert_close(found, torch.tensor([[1 / 3, 1 / 2 + 1 / 3, 1 / 2 + 1 / 3]], dtype=torch.float64))


@pytest.mark.parametrize("evict", ["view", "evict"])
def test_a_budget_for_all_keys_gives_the_tokens_of_dense_attention(evict):
    assert_matches_dense(LoopServeDecode(first=2, every=3, budget=99, evict=evict))


@pytest.mark.parametrize("wrong", [{"first": -1}, {"every": 0}, {"budget": -1}, {"evict": "drop"}])
def test_invalid_values_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LoopServeDecode(**wrong)


@pytest.mark.parametrize(("most", "selected"), [(0.5, 31), (0.1, 7), (1.0, 61)])
def test_most_is_a_share_of_what_is_not_selected_for_certain(most, selected):
    """Of 65 keys at the first selection the last four are observed, and read in any case."""
    request = make_request(rows=60, steps=5)
    state = LoopServeDecode(first=4, every=4, budget=1000, most=most).start()
    request.prefill(state)
    for at in range(request.steps):
        request.step(state, at)
    assert state.selected[0].slots.shape[1] == selected + 4
