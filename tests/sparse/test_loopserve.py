"""LoopServe's prefill against its oracles W1, W3, W7 and O10; W2 and W6 are in tests/kernels/test_lines.py."""

from __future__ import annotations

import pytest
import torch

from ragkv.kernels.attention import attend
from ragkv.kernels.line_types import prices
from ragkv.kernels.lines import cover
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.sparse.loopserve import LoopServe, attention_by_position, index_lines, sample_rows
from ragkv.sparse.prefill import SparsePrefill
from tests.sparse.test_critiprefill import dense, prefill, random_rows
from tests.tiny import model, tokens


def test_sampled_rows_are_spread_and_the_last_is_among_them():
    assert sample_rows(10, 5).tolist() == [1, 3, 5, 7, 9]
    assert sample_rows(3, 64).tolist() == [0, 1, 2]
    assert sample_rows(1000, 64)[-1] == 999


def small(**given):
    return LoopServe(**{"alpha": 0.9, "sample": 8, "tile": 4, "dense": 1.0, "threshold": 0, **given})


def test_covering_everything_is_dense():
    q, k, v = random_rows(50, 8, 1), random_rows(50, 2, 2), random_rows(50, 2, 3)
    out, sparse = prefill(small(alpha=1.0), q, k, v)
    assert torch.equal(out, dense(q, k, v))
    assert sparse.computed_pairs == sparse.dense_pairs
    assert small(alpha=1.0).why_dense(10**6, 10**6)


def test_attention_to_neighbours_is_found_and_little_is_read():
    k = torch.nn.functional.normalize(random_rows(96, 4, 1, d=64), dim=-1)
    q, v = 30 * k + 25 * k.roll(1, 0), random_rows(96, 4, 3, d=64)
    out, sparse = prefill(small(dense=0.8), q, k, v)
    assert sparse.computed_pairs < 0.4 * sparse.dense_pairs
    assert (out - dense(q, k, v)).norm() < 0.2 * dense(q, k, v).norm()


@pytest.mark.parametrize(("start", "count"), [(0, 60), (21, 39)])
def test_what_is_computed_is_attention_over_the_tiles_of_the_lines(start, count):
    q, k, v = random_rows(count, 4, 1), random_rows(60, 2, 2), random_rows(60, 2, 3)
    q_pos, k_pos = torch.arange(start, 60), torch.arange(60)
    params = small(alpha=0.6)
    at = sample_rows(count, 8)
    cells, every = attention_by_position(q[at], k, q_pos[at], k_pos, scale=0.3), torch.ones(60, dtype=torch.bool)
    lines = cover(cells, q_pos[at], every, 0.6, prices(start, 59, 4, 2.0))
    lines.vertical[:, 0] = lines.slash[:, 0] = True
    index, _ = index_lines(lines, q_pos, k_pos, 4, 1.0)
    assert index is not None
    offsets = q_pos[:, None] - k_pos
    for head in range(4):
        requested = (lines.vertical[head] | lines.slash[head][offsets.clamp(min=0)]) & (offsets >= 0)
        for row in range(count):
            keys = index.keys(head, (row + index.offset) // 4, 60)
            got = torch.zeros(60, dtype=torch.bool)
            assert keys.unique().numel() == keys.numel()
            got[keys] = True
            assert bool((got | ~requested[row]).all())
    out, _ = prefill(params, q, k, v, start)
    assert bool(out.isfinite().all())


def test_lines_are_found_over_a_cache_with_gaps_in_any_order():
    order = torch.cat([torch.arange(40, 60), torch.arange(10), torch.arange(25, 40)])
    q, k, v = random_rows(20, 4, 1), random_rows(45, 2, 2), random_rows(45, 2, 3)
    q_pos = torch.arange(40, 60)
    everything = SparsePrefill(small(alpha=0.999999, sample=19).start(), 60)
    out = everything(0, q, k, v, q_pos, order, scale=0.3)
    torch.testing.assert_close(out, attend(q, k, v, q_pos, order, scale=0.3), rtol=0, atol=1e-3)


def test_no_row_is_left_empty():
    q, k, v = random_rows(64, 4, 1), random_rows(64, 2, 2), random_rows(64, 2, 3)
    every = torch.ones(64, dtype=torch.bool)
    lines = cover(torch.zeros(4, 8, 64), sample_rows(64, 8), every, 0.5, prices(0, 63, 4, 1.0))
    assert not lines.vertical.any()
    lines.slash[:, 0] = True
    index, _ = index_lines(lines, torch.arange(64), torch.arange(64), 4, 1.0)
    assert index is not None
    assert bool((index.counts >= 1).all())
    out, _ = prefill(small(alpha=0.01), q, k, v)
    assert bool(out.isfinite().all())


def test_too_many_cells_are_read_densely():
    q, k, v = random_rows(64, 4, 1) * 0, random_rows(64, 2, 2), random_rows(64, 2, 3)
    out, sparse = prefill(small(alpha=0.95, dense=0.6), q, k, v)
    assert sparse.computed_pairs == sparse.dense_pairs
    assert torch.equal(out, dense(q, k, v))


def test_a_later_turn_keeps_the_lines_of_an_earlier_turn():
    k, v = random_rows(60, 2, 2), random_rows(60, 2, 3)
    state = small().start()
    sparse = SparsePrefill(state, 30)
    sparse(0, random_rows(30, 4, 1), k[:30], v[:30], torch.arange(30), torch.arange(30), scale=0.3)
    first = state.lines[0][0]
    kept, held = [part.clone() for part in (first.vertical, first.slash, first.unlimited)], state.bytes
    sparse.end = 60
    sparse(0, random_rows(30, 4, 4), k, v, torch.arange(30, 60), torch.arange(60), scale=0.3)
    assert [each.last for each in state.lines[0]] == [29, 59]
    assert state.lines[0][0] is first
    assert all(torch.equal(a, b) for a, b in zip(kept, (first.vertical, first.slash, first.unlimited), strict=True))
    assert state.bytes > held > 0


def test_later_turns_do_not_change_an_earlier_one():
    q, k, v = random_rows(60, 4, 1), random_rows(60, 2, 2), random_rows(60, 2, 3)
    out = []
    for factor in (1, 9):
        later = torch.cat([k[:30], factor * k[30:]]), torch.cat([v[:30], factor * v[30:]])
        positions = torch.arange(60)
        out.append(SparsePrefill(small().start(), 30)(0, q[:30], *later, positions[:30], positions, scale=0.3))
    assert torch.equal(out[0], out[1])


def test_a_model_that_covers_nearly_everything_gives_nearly_its_dense_logits():
    tiny, ids = model(), tokens(60)
    logits = []
    for attending in (None, SparsePrefill(small(alpha=0.9999, sample=30).start(), 60)):
        cache = ContextCache(tiny.shape, 60, tiny.dtype)
        logits.append(tiny.forward([append(cache, ids, 0, outputs=60, attention=attending)])[0])
    assert (logits[0] - logits[1]).norm() < 1e-2 * logits[0].norm()


def test_a_turn_no_longer_than_the_sample_samples_half_of_its_rows(monkeypatch):
    sampled = []
    monkeypatch.setattr(
        "ragkv.sparse.loopserve.sample_rows", lambda *sizes: sampled.append(sizes) or sample_rows(*sizes)
    )
    k = torch.nn.functional.normalize(random_rows(96, 4, 1, d=64), dim=-1)
    q, v = 30 * k[88:] + 25 * k.roll(1, 0)[88:], random_rows(96, 4, 3, d=64)
    out, sparse = prefill(small(dense=0.8), q, k, v, start=88)
    assert sparse.selected
    assert sparse.pairs_read < sparse.dense_pairs
    assert (out - dense(q, k, v, 88)).norm() < 0.2 * out.norm()
    assert sampled == [(8, 4)]


@pytest.mark.parametrize("wrong", [{"alpha": 0}, {"alpha": 1.1}, {"sample": 0}, {"tile": 0}, {"dense": 0}])
def test_invalid_values_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        LoopServe(**wrong)


def test_heads_that_read_everything_keep_no_lines():
    k = torch.nn.functional.normalize(random_rows(96, 4, 1, d=64), dim=-1)
    q = 30 * k + 25 * k.roll(1, 0)
    q[:, 1] = 0  # this head attends evenly, so it needs nearly all lines
    state = small(dense=0.8).start()
    assert state.select(0, q, k, torch.arange(96), torch.arange(96), end=96, scale=0.3) is not None
    (lines,) = state.lines[0]
    assert lines.unlimited.tolist() == [False, True, False, False]
    for part in (lines.vertical, lines.slash):
        assert set(part[0].tolist()) == {0, 2, 3}


@pytest.mark.parametrize("params", [{"alpha": 1.0}, {"threshold": 1000}, {"alpha": 0.95}])
def test_a_pass_that_is_dense_is_kept_as_one_without_lines(params):
    q, k = random_rows(64, 4, 1) * 0, random_rows(64, 2, 2)
    state = small(dense=0.6, **params).start()
    assert state.select(0, q, k, torch.arange(64), torch.arange(64), end=64, scale=0.3) is None
    (lines,) = state.lines[0]
    assert lines.unlimited.all()
    assert lines.vertical.shape == lines.slash.shape == (2, 0)


def test_positions_without_rows_are_no_part_of_a_line(monkeypatch):
    """Rows of a stitched context are missing, so a line through the gap costs and covers less than its length."""
    order = torch.cat([torch.arange(10), torch.arange(25, 60)])
    q, k, v = random_rows(20, 4, 1), random_rows(45, 2, 2), random_rows(45, 2, 3)
    counted = []

    def recorded(cells, at, present, *rest):
        counted.append(present.nonzero()[:, 0].tolist())
        return cover(cells, at, present, *rest)

    monkeypatch.setattr("ragkv.sparse.loopserve.cover", recorded)
    SparsePrefill(small().start(), 60)(0, q, k, v, torch.arange(40, 60), order, scale=0.3)
    assert counted == [[*range(10), *range(25, 60)]]


def test_the_first_key_and_the_row_itself_are_lines_of_every_head():
    """Whatever the sampled rows attend to: the first key here has a tenth of nothing."""
    q, k, v = random_rows(20, 4, 1), random_rows(60, 2, 2), random_rows(60, 2, 3)
    k[0] = -40 * q.mean((0, 1))
    state = small(alpha=0.3, dense=1.0).start()
    SparsePrefill(state, 60)(0, q, k, v, torch.arange(40, 60), torch.arange(60), scale=0.3)
    (lines,) = state.lines[0]
    limited = (~lines.unlimited).nonzero()[:, 0].tolist()
    assert limited
    for part, line in ((lines.vertical, 0), (lines.slash, 0)):
        assert {head for head, at in part.T.tolist() if at == line} >= set(limited)
