"""LFPS: the identity setting is dense attention, tables keep their sum, and keys with high scores are found again."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.sparse.indexing import true_indices
from ragkv.sparse.lfps import Lfps, prompt_tables
from ragkv.sparse.lfps_candidates import sink_ratio, thresholds
from ragkv.sparse.lfps_tables import RUN, SMALLEST, KeyScores, ScoreTable
from tests.sparse.toy_request import GROUPINGS, assert_matches_dense, greedy, make_request, normal
from tests.tiny import model, tokens

ALL = Lfps(beta=-math.inf, share=1.0, bypass=1.0, heads="query")
SOME = Lfps(least=12, share=0.05, bypass=1.0, heads="query")
HEADS = ["query", "kv"]


def run(params, request, steps=None):
    state = params.start()
    request.prefill(state)
    return state, [request.step(state, at) for at in range(request.steps if steps is None else steps)]


def sums(scores):
    return torch.cat([scores.vertical.scores.sum(1), scores.slash.scores.sum(1)])


def by_offset(scores):
    return scores.slash.scores.flip(-1)


def marked(scores, now, reach=(), beta=0.2):
    """Return the candidates bool [H, now + 1] without the recent ones."""
    moments = scores.vertical.moments(scores.scored), scores.slash.moments(scores.scored)
    scores.mark_above(*thresholds(*moments, beta), now)
    scores.mark_neighbours(reach, moments[0].mean, moments[1].mean, now)
    found = torch.zeros(scores.vertical.raw.shape[0], now + 1, dtype=torch.bool)
    places, _, starts = scores.pop_marked()
    for row, (start, stop) in enumerate(pairwise(starts.tolist())):
        found[row, places[start:stop]] = True
    return found


def scores_of(vertical, slash, local=1):
    """Return tables without sinks, with rows at positions 0..count - 1."""
    count = vertical.shape[1]
    return KeyScores(vertical, slash, torch.arange(count), torch.empty(0, dtype=torch.int64), local, None)


# The worked example: 6 keys, 2 prompt rows, decay .5.


def example():
    a = torch.tensor([[0.4, 0.1, 0.1, 0.3, 0.1, 0.0], [0.5, 0.0, 0.1, 0.1, 0.2, 0.1]], dtype=torch.float64)
    k = torch.eye(6, dtype=torch.float64)[:, None]
    positions, outside = torch.arange(6), torch.ones(6, dtype=torch.bool)
    params = Lfps(decay=0.5, rows=2, sinks=0)
    return prompt_tables(
        a.clamp(min=1e-200).log()[:, None], k, torch.tensor([4, 5]), positions, outside, params, scale=1.0
    )


def test_tables_of_the_worked_example():
    vertical, slash = example()
    expected = [0.45, 0.05, 0.1, 0.2, 0.15, 0.05], [0.1, 0.25, 0.1, 0.1, 0.2, 0.25]
    torch.testing.assert_close(vertical[0], torch.tensor(expected[0], dtype=torch.float64))
    torch.testing.assert_close(slash[0], torch.tensor(expected[1], dtype=torch.float64))


def test_threshold_and_update_of_the_worked_example():
    scores = scores_of(*example())
    moments = scores.vertical.moments(scores.scored)
    bar = moments.mean + 0.2 * moments.deviation
    assert bar.item() == pytest.approx(0.1942, abs=5e-5)
    assert (scores.vertical.scores[0] > bar).nonzero()[:, 0].tolist() == [0, 3]
    scores.append_token(6, 6)
    scores.decay(torch.tensor([0.5], dtype=torch.float64))
    scores.add_scores(torch.tensor([[0, 4]]), 0.5 * torch.tensor([[0.6, 0.4]], dtype=torch.float64), 6)
    expected = [0.525, 0.025, 0.05, 0.1, 0.275, 0.025, 0.0], [0.05, 0.125, 0.25, 0.05, 0.1, 0.125, 0.3]
    torch.testing.assert_close(scores.vertical.scores[0, :7], torch.tensor(expected[0], dtype=torch.float64))
    torch.testing.assert_close(by_offset(scores)[0, :7], torch.tensor(expected[1], dtype=torch.float64))
    torch.testing.assert_close(sums(scores), torch.ones(2, dtype=torch.float64))


def test_the_share_of_the_sinks_of_the_worked_example():
    sink, whole, local = (torch.tensor(x, dtype=torch.float64) for x in (5.0, math.log(100) + 0.5, math.log(5) + 1))
    assert [round(x.exp().item(), 3) for x in (sink, whole, local)] == [148.413, 164.872, 13.591]
    assert sink_ratio(sink, whole, local).item() == pytest.approx(0.47373, abs=5e-6)


@given(*[st.floats(-2e3, 2e3)] * 3)
def test_the_sink_share_is_between_0_and_1_whatever_the_scores(sink, whole, local):
    share = sink_ratio(*(torch.tensor(x) for x in (sink, whole, local)))
    assert 0 <= share.item() <= 1


def test_without_sinks_the_share_is_0():
    assert sink_ratio(torch.tensor(-math.inf), torch.tensor(1.0), torch.tensor(2.0)).item() == 0


# Tables.


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_a_table_is_what_plain_arithmetic_says(seed):
    """Decay, add, widen on both sides and rescale; compare scores, moments and values above a bar."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.rand(3, 4 * RUN, generator=generator, dtype=torch.float64) ** 4
    table = ScoreTable(plain.clone())
    for step in range(60):
        decay = torch.tensor([0.7, 1.0, 0.95], dtype=torch.float64)
        table.decay(decay)
        plain = plain * decay[:, None]
        if step % 20 == 7:
            front = bool(step % 40 == 7)
            table.widen(RUN, front)
            plain = torch.nn.functional.pad(plain, (RUN, 0) if front else (0, RUN))
        at = torch.stack([torch.randperm(plain.shape[1], generator=generator)[:5] for _ in range(3)])
        extra = torch.rand(3, 5, generator=generator, dtype=torch.float64)
        table.add(at, extra)
        plain = plain.scatter_add(1, at, extra)
    torch.testing.assert_close(table.scores, plain)
    assert (table.scale >= SMALLEST).all()
    found = table.moments(plain.shape[1])
    mean, deviation = plain.mean(1), plain.std(1, correction=0)
    torch.testing.assert_close(found.mean * table.scale, mean)
    torch.testing.assert_close(found.deviation * table.scale, deviation)
    kurtosis = ((plain - mean[:, None]) ** 4).mean(1) / deviation**4
    torch.testing.assert_close(found.kurtosis, kurtosis)
    runs, high = table.runs_above(mean / table.scale)
    above = torch.zeros_like(plain, dtype=torch.bool)
    above.view(-1, RUN)[runs] = high
    assert torch.equal(above, plain > mean[:, None])


def test_a_flat_table_has_a_finite_threshold():
    flat = scores_of(torch.full((1, 32), 0.1, dtype=torch.float64), torch.zeros(1, 32, dtype=torch.float64))
    moments = flat.vertical.moments(32), flat.slash.moments(32)
    assert all(math.isfinite(tau.item()) for tau in thresholds(*moments, 0.2))


def test_a_table_with_sharper_peaks_gets_the_lower_bar():
    peaked, broad = torch.zeros(1, 64, dtype=torch.float64), torch.zeros(1, 64, dtype=torch.float64)
    peaked[0, 3], broad[0, :8] = 1.0, 0.125
    scores = scores_of(peaked, broad)
    vertical, slash = scores.vertical.moments(64), scores.slash.moments(64)
    alone = [m.mean + 0.2 * m.deviation for m in (vertical, slash)]
    tau_v, tau_s = thresholds(vertical, slash, 0.2)
    assert tau_v < alone[0]
    assert tau_s > alone[1]


@given(st.integers(0, 10**6), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_candidates_are_those_of_the_formula(seed, later):
    """Check every position and offset one by one, some tokens after the tables were filled. Covers L6 and L7."""
    vertical, slash = (normal(2, 90, seed=seed + i).abs() ** 3 for i in range(2))
    scores = scores_of(vertical, slash)
    for now in range(90, 90 + later):
        scores.append_token(now, now)
    n, before, reach = 90 + later, None, (-1, 1, 2)
    v, s = scores.vertical.scores[:, :n], by_offset(scores)[:, :n].flip(-1)
    means = v.sum(1, keepdim=True) / n, s.sum(1, keepdim=True) / n
    for beta in (0.0, 0.2, 0.4, 2.0):
        tau = thresholds(scores.vertical.moments(n), scores.slash.moments(n), beta)
        first = (v > tau[0][:, None]) | (s > tau[1][:, None])
        liked, expected = (v > means[0]) | (s > means[1]), first.clone()
        for row, place in first.nonzero().tolist():
            for near in (place + offset for offset in reach):
                if 0 <= near < n:
                    expected[row, near] |= liked[row, near]
        found = marked(scores, n - 1, reach, beta)
        assert torch.equal(found, expected)
        assert not (marked(scores, n - 1, (), beta) & ~found).any()
        assert before is None or not (marked(scores, n - 1, (), beta) & ~before).any()
        before = marked(scores, n - 1, (), beta)


def test_true_flags_are_found_at_any_length():
    for count in (0, 8, 13, 64):
        flags = torch.arange(count) % 3 == 0
        assert torch.equal(true_indices(flags), flags.nonzero()[:, 0])


# Steps of a request.


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
@pytest.mark.parametrize("gapped", [True, False])
def test_the_identity_setting_equals_dense_attention(heads, q_heads, kv_heads, gapped):
    request = make_request(q_heads=q_heads, kv_heads=kv_heads, gapped=gapped, steps=90)
    state, outs = run(replace(ALL, heads=heads), request)
    for at, out in enumerate(outs):
        torch.testing.assert_close(out, request.dense(at), rtol=0, atol=1e-10)
    assert state.keys_read == state.keys_present > 0


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
def test_with_every_candidate_the_keys_read_are_the_exact_top_k(heads, q_heads, kv_heads):
    request = make_request(q_heads=q_heads, kv_heads=kv_heads, steps=5)
    params = replace(ALL, heads=heads, share=0.0, least=20)
    _, outs = run(params, request)
    for at, out in enumerate(outs):
        torch.testing.assert_close(out, best(request, at, 20), rtol=0, atol=1e-10)


def best(request, at, keep, sinks=4, local=5):
    """Compute the attention over the sinks, the last tokens and the `keep` best of the others."""
    _, q, k, v, _, positions = request.call_args(at)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,nhd->hn", q[0], k) * request.scale
    order = positions.argsort()
    always = torch.cat([order[:sinks], order[-local:]])
    top = scores.index_fill(1, always, -math.inf).topk(keep).indices
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, top, True)
    kept[:, always] = True
    return torch.einsum("hn,nhd->hd", scores.masked_fill(~kept, -math.inf).softmax(-1), v)


def test_rows_whose_best_keys_are_candidates_equal_exact_top_k():
    """The peaks are at fixed positions: the tables name them, and no other key is needed."""
    request = vertical_request()
    params = replace(SOME, least=6, share=0.0)
    state, outs = run(params, request)
    for at, out in enumerate(outs):
        torch.testing.assert_close(out, best(request, at, 6), rtol=0, atol=1e-10)
    assert state.keys_read < 0.5 * state.keys_present


PEAKS = (30, 31, 57, 90, 104, 120)


def vertical_request(steps=30):
    """Return a request whose queries all attend to the keys at PEAKS."""
    request = make_request(rows=150, question=20, steps=steps, gapped=False)
    request.k *= 0.05
    request.k[..., 0] = 0.0
    request.q[..., 0] = 12.0
    for rank, place in enumerate(PEAKS):
        request.k[place, :, 0] = 2.0 + 0.1 * rank
    return request


def slash_request(distance=37, steps=30):
    """Return a request whose queries attend to the key `distance` before them: keys rotate with their position."""
    request = make_request(rows=150, question=20, steps=steps, gapped=False, d=8)
    angle = torch.tensor([2.3, 1.1, 0.7, 0.3], dtype=torch.float64)

    def turned(at):
        return torch.cat([(at[:, None] * angle).cos(), (at[:, None] * angle).sin()], dim=-1)[:, None]

    request.k = turned(request.positions.double()).repeat(1, 2, 1)
    request.q = 12 * turned(request.positions[130:].double() - distance).repeat(1, 8, 1)
    return request


def test_keys_at_fixed_positions_are_candidates_of_the_next_step():
    request = vertical_request()
    state = SOME.start()
    request.prefill(state)
    for at in range(10):
        request.step(state, at)
        now = request.rows + at
        assert bool(marked(state.scores[0], now)[:, PEAKS].all())


def test_keys_at_a_fixed_distance_are_candidates_where_they_are_now():
    request = slash_request()
    state = SOME.start()
    request.prefill(state)
    for at in range(10):
        request.step(state, at)
        scores = state.scores[0]
        scores.append_token(request.rows + at + 1, request.rows + at + 1)  # as the next token would
        assert bool(marked(scores, request.rows + at + 1)[:, request.rows + at + 1 - 37].all())
        scores.recent, scores.scored = scores.recent[:-1], scores.scored - 1
        scores.slot[request.rows + at + 1] = -1


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("params", [ALL, SOME, replace(SOME, decay=0.6)])
def test_tables_keep_their_sum(heads, params):
    request = make_request(steps=80)
    state = replace(params, heads=heads).start()
    request.prefill(state)
    rows = 8 if heads == "query" else 2
    expected = torch.full((2 * rows,), 0.5 / (1 - params.decay), dtype=torch.float64)
    for at in range(request.steps):
        torch.testing.assert_close(sums(state.scores[0]), expected, rtol=0, atol=1e-10)
        request.step(state, at)
    torch.testing.assert_close(sums(state.scores[0]), expected, rtol=0, atol=1e-10)


def sunk(steps=6, quiet=0):
    """Return a request whose heads all attend to the sinks, except in the first step after `quiet` ones."""
    request = make_request(steps=steps, gapped=False)
    request.k[:4] = 0.0
    request.k[:4, :, 0], request.q[..., 0] = 12.0, 6.0
    request.q[request.question + quiet] = normal(8, 8, seed=9)
    return request


@pytest.mark.parametrize("heads", HEADS)
def test_a_bypassed_step_leaves_the_tables_as_they_are(heads):
    request = sunk()
    state = Lfps(bypass=0.85, heads=heads, least=12).start()
    request.prefill(state)
    request.step(state, 0)
    assert not bool(state.bypassed[0].all())
    scores = state.scores[0]
    before = scores.vertical.raw.clone(), scores.slash.raw.clone(), scores.vertical.scale, scores.slash.scale
    for at in range(1, 6):
        out = request.step(state, at)
        assert bool(state.bypassed[0].all())
        after = scores.vertical.raw, scores.slash.raw, scores.vertical.scale, scores.slash.scale
        assert all(torch.equal(one, same) for one, same in zip(before, after, strict=True))
        dense = request.dense(at)
        assert (out - dense).norm() < 0.2 * dense.norm()
    assert state.key_counts[-1].read.tolist() == [4] * (8 if heads == "query" else 2)


def test_positions_stay_right_after_bypassed_steps():
    """After five tokens without an update of the tables, a fixed distance is still found at its current position."""
    request = slash_request(steps=12)
    lone = slash_request(steps=12)
    state, reference = Lfps(least=12, bypass=0.85).start(), Lfps(least=12).start()
    request.prefill(state)
    lone.prefill(reference)
    scores = state.scores[0]
    for at in range(5):
        scores.append_token(request.rows + at, request.rows + at)
    now = request.rows + 4
    assert bool(marked(scores, now)[:, now - 37].all())


@pytest.mark.parametrize("heads", HEADS)
def test_a_bypassed_head_returns_the_sinks_and_the_mean(heads):
    request = sunk()
    state = Lfps(bypass=0.85, heads=heads, least=12).start()
    request.prefill(state)
    request.step(state, 0)
    out = request.step(state, 1)
    rho, n = state.rho[0][:, None], request.rows
    scores = (
        torch.einsum("hgd,nhd->hgn", request.q[request.question + 1].unflatten(0, (2, 4)), request.k[:4])
        * request.scale
    )
    sink = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), request.v[:4]).flatten(0, 1)
    mean = request.v[4:n].mean(0).repeat_interleave(4, dim=0)
    torch.testing.assert_close(out, rho * sink + (1 - rho) * mean, rtol=0, atol=1e-12)


def test_heads_are_bypassed_one_by_one():
    request = sunk()
    request.q[request.question + 1 :, :3] = normal(5, 3, 8, seed=4)
    for heads in HEADS:
        state = replace(ALL, bypass=0.85, heads=heads).start()
        request.prefill(state)
        for at in range(6):
            out = request.step(state, at)
            busy = ~state.bypassed[0]
            torch.testing.assert_close(out[busy], request.dense(at)[busy], rtol=0, atol=1e-10)
            torch.testing.assert_close(
                sums(state.scores[0]), torch.full_like(sums(state.scores[0]), 10.0), atol=1e-10, rtol=0
            )
        assert state.bypassed[0].tolist() == [False] * 3 + [True] * 5


def test_at_bypass_1_no_head_is_bypassed():
    request = sunk()
    request.k[4:] = 0.0
    request.q *= 1e3
    state = ALL.start()
    request.prefill(state)
    for at in range(6):
        out = request.step(state, at)
        assert not bool(state.bypassed[0].any())
        torch.testing.assert_close(out, request.dense(at), rtol=0, atol=1e-8)
    assert state.rho[0].min() == 1.0


def test_room_grows_and_positions_stay_aligned():
    """Long after the tables were filled, sums and peaks are still right."""
    request = vertical_request(steps=400)
    request.positions[request.rows :] += torch.arange(400) * 3  # positions need not be next to each other
    state = SOME.start()
    request.prefill(state)
    rooms = set()
    for at in range(request.steps):
        request.step(state, at)
        scores = state.scores[0]
        rooms.add(scores.room)
        assert scores.vertical.raw.shape == scores.slash.raw.shape == (8, scores.room)
    assert len(rooms) > 2
    assert bool(marked(scores, int(request.positions[-1]))[:, PEAKS].all())
    torch.testing.assert_close(sums(scores), torch.full((16,), 10.0, dtype=torch.float64), rtol=0, atol=1e-9)


def test_gaps_change_nothing_where_only_positions_count():
    """Move the context of a request apart: positions shift, but the keys found by position do not change."""
    request = vertical_request()
    apart = replace(request, positions=request.positions + 1000 * (request.positions >= 40))
    for one, same in zip(run(SOME, request)[1], run(SOME, apart)[1], strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=1e-3)


@pytest.mark.parametrize("heads", HEADS)
def test_every_step_sees_its_own_token(heads):
    request = make_request(steps=10)
    state = Lfps(bypass=1.0, least=0, share=0.0, heads=heads).start()
    request.prefill(state)
    for at in range(10):
        own, q = request.rows + at, request.q[request.question + at].unflatten(0, (2, 4))
        q[:] = q[:, :1].clone()
        request.k[own], request.v[own] = 40 * q[:, 0], 1e6
        assert (request.step(state, at) > 0.9e6).all()


def test_keys_are_counted_per_list_and_step():
    request = make_request()
    state, _ = run(SOME, request)
    assert all(0 < int(r.read.max()) <= r.present and r.read.shape == (8,) for r in state.key_counts)
    assert state.keys_read < state.keys_present
    assert [r.present for r in state.key_counts] == list(range(request.rows + 1, request.rows + 41))


def test_later_rows_do_not_change_earlier_outputs():
    request = make_request()
    _, outs = run(SOME, request)
    request.k[request.rows + 10 :] = 7.0
    request.v[request.rows + 10 :] = -9.0
    for one, same in zip(outs[:10], run(SOME, request, steps=10)[1], strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=0)


def test_prompt_rows_score_no_key_behind_them():
    request = make_request(gapped=False)
    t, n = request.question, request.rows

    def filled():
        state = SOME.start()
        state(
            0,
            request.q[:3],
            request.k[:n],
            request.v[:n],
            request.positions[n - t : n - t + 3],
            request.positions[:n],
            scale=0.35,
        )
        return state.scores[0].vertical.scores

    before = filled()
    request.k[n - t + 3 : n] = 50.0
    assert torch.equal(before, filled())
    assert not before[:, n - t + 3 :].any()


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 9])
def test_contexts_of_a_few_tokens_are_read_whole(rows):
    request = make_request(rows=rows, question=1, steps=12, gapped=False)
    _, outs = run(replace(ALL, beta=-math.inf), request)
    for at, out in enumerate(outs):
        torch.testing.assert_close(out, request.dense(at), rtol=0, atol=1e-10)
    assert all(bool(out.isfinite().all()) for out in run(Lfps(), request)[1])


def test_two_rows_at_one_position_are_refused():
    request = make_request()
    request.positions[3] = request.positions[4]
    with pytest.raises(ValueError, match="one position"):
        request.prefill(SOME.start())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
def test_lower_precision_stays_close(dtype, heads):
    request = make_request(steps=4)
    expected = [request.dense(at) for at in range(4)]
    request.q, request.k, request.v = (x.to(dtype) for x in (request.q, request.k, request.v))
    _, outs = run(replace(ALL, heads=heads), request)
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    for out, requested in zip(outs, expected, strict=True):
        assert out.dtype == dtype
        assert (out.double() - requested).norm() < tolerance * requested.norm() + tolerance


# Through the model.


@pytest.mark.parametrize("heads", HEADS)
def test_the_identity_setting_gives_the_tokens_of_dense_attention(heads):
    assert_matches_dense(replace(ALL, heads=heads))


def test_a_request_alone_gives_the_same_tokens_as_in_a_batch():
    params, tiny = Lfps(least=6), model()
    contexts, questions = [tokens(61, 1), tokens(24, 2)], [tokens(9, 3), tokens(5, 4)]
    together = greedy(tiny, [params.start(), params.start()], contexts, questions)
    state = params.start()
    alone = greedy(tiny, [state], contexts[:1], questions[:1])
    assert together[0][0] == alone[0][0]
    torch.testing.assert_close(together[0][1], alone[0][1], rtol=0, atol=1e-10)
    assert state.keys_read < state.keys_present


@pytest.mark.parametrize(
    "wrong",
    [
        *({"sinks": -1}, {"rows": 0}, {"local": 0}, {"least": -1}, {"decay": 1.0}, {"decay": 0.0}, {"bypass": 1.5}),
        *({"share": -0.1}, {"beta": -1.0}, {"beta": math.inf}, {"beta": math.nan}, {"reach": (9,)}, {"heads": "all"}),
    ],
)
def test_invalid_values_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Lfps(**wrong)


def test_tables_are_filled_from_the_last_rows_alone():
    request = make_request(rows=60, question=40, steps=1)
    tables = []
    for rows in (slice(0, 0), slice(0, 20), slice(20, 40)):
        state, asked = Lfps(rows=20).start(), request.q.clone()
        asked[rows] += 1
        replace(request, q=asked).prefill(state)
        tables.append(state.scores[0].vertical.scores)
    assert torch.equal(tables[0], tables[1])
    assert not torch.allclose(tables[0], tables[2])
