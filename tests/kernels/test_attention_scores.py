"""Windows, soft caps and sinks against a plain loop over queries, heads and keys."""

from __future__ import annotations

import math

import pytest
import torch

from ragkv.kernels import attention_scores
from ragkv.kernels.attention import attend_planned, plan_mask

GENERATOR = torch.Generator().manual_seed(3)
Q_HEADS, KV_HEADS, SIZE = 4, 2, 8


def drawn(*sizes):
    return torch.randn(*sizes, generator=GENERATOR, dtype=torch.float64)


def plainly(q, k, v, q_pos, k_pos, *, scale, window, softcap, sinks):
    out = torch.zeros_like(q)
    for row, at in enumerate(q_pos.tolist()):
        for head in range(Q_HEADS):
            kv = head // (Q_HEADS // KV_HEADS)
            weights = {}
            for key, position in enumerate(k_pos.tolist()):
                if position <= at and (window is None or position > at - window):
                    score = float(q[row, head] @ k[key, kv]) * scale
                    weights[key] = math.exp(score if softcap is None else softcap * math.tanh(score / softcap))
            total = sum(weights.values()) + (0.0 if sinks is None else math.exp(float(sinks[head])))
            for key, weight in weights.items():
                out[row, head] += weight / total * v[key, kv]
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("tile", [2, 128])
def test_attention_is_that_of_the_plain_loop(monkeypatch, window, softcap, sunk, tile):
    """Rows are scattered and keys are in any order, as in a repaired context."""
    monkeypatch.setattr(attention_scores, "TILE", tile)
    k_pos = torch.tensor([9, 0, 1, 2, 30, 5, 6, 7, 8, 11, 12, 4, 3, 31, 32])
    q_pos = torch.tensor([4, 7, 12, 31, 32])
    q, k, v = drawn(5, Q_HEADS, SIZE), drawn(15, KV_HEADS, SIZE), drawn(15, KV_HEADS, SIZE)
    options = {"scale": 0.4, "softcap": softcap, "sinks": drawn(Q_HEADS) if sunk else None}
    plan = plan_mask(q_pos, k_pos, q.device, Q_HEADS // KV_HEADS, window)
    expected = plainly(q, k, v, q_pos, k_pos, window=window, **options)
    torch.testing.assert_close(attend_planned(q, k, v, plan, **options), expected, rtol=0, atol=1e-12)


def test_a_window_reads_no_key_outside_of_it():
    tiles = attention_scores.score_tiles(torch.tensor([50]), torch.arange(51), 6, torch.device("cpu"))
    assert [(tile.keys, tile.hidden) for tile in tiles] == [(slice(45, 51), None)]
    k, v = drawn(51, KV_HEADS, SIZE), drawn(51, KV_HEADS, SIZE)
    k[:45], v[:45] = math.nan, math.nan
    assert attention_scores.attend_scores(drawn(1, Q_HEADS, SIZE), k, v, tiles, scale=1.0).isfinite().all()


def test_a_window_that_hides_nothing_takes_the_same_kernels_as_none():
    positions = torch.arange(9)
    assert plan_mask(positions, positions, torch.device("cpu"), 2, 9).kind == "square"
    assert plan_mask(positions, positions, torch.device("cpu"), 2, 8).window == 8
