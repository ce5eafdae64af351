"""LoopServe's prefill against a naive reference: lines by exact residuals, their tiles, and the values of every row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ragkv.sparse.base import SparsePrefill
from ragkv.sparse.loopserve import LoopServe
from tests.sparse.test_critiprefill import random_rows

SCALE, TILE, SAMPLE = 0.3, 4, 8
Line = tuple[str, int]


def cells_of(q: Tensor, k: Tensor, head: int, rows: list[int], start: int) -> dict[tuple[int, int], float]:
    """Compute the attention of sampled rows, by (position of the row, position of the key)."""
    cells = {}
    for row in rows:
        exps = [math.exp(float(q[row, head] @ k[key, head // 2]) * SCALE) for key in range(start + row + 1)]
        cells.update({(start + row, key): value / sum(exps) for key, value in enumerate(exps)})
    return cells


def select_lines(cells: dict[tuple[int, int], float], alpha: float) -> set[Line]:
    """Select the line with the most weight per free cell, slash lines first, until alpha is covered (algorithm 2)."""
    left, total, covered, lines = dict(cells), sum(cells.values()), 0.0, set[Line]()
    while covered < alpha * total and left:
        weights: dict[Line, list[float]] = {}
        for (row, key), value in left.items():
            weights.setdefault(("slash", row - key), []).append(value)
            weights.setdefault(("vertical", key), []).append(value)
        best = max(weights, key=lambda line: (sum(weights[line]) / len(weights[line]), line[0] == "slash", -line[1]))
        lines.add(best)
        covered += sum(weights[best])
        left = {cell: value for cell, value in left.items() if best not in lines_through(*cell)}
    return lines


def lines_through(row: int, key: int) -> tuple[Line, Line]:
    return ("slash", row - key), ("vertical", key)


def keys_read(lines: set[Line], tile: int, last: int) -> set[int]:
    """Return the keys that a tile of rows reads: tiles that a slash line crosses, and vertical lines."""
    rows = range(tile * TILE, min(last, tile * TILE + TILE - 1) + 1)
    blocks = {(row - o) // TILE for row in rows for kind, o in lines if kind == "slash" and row >= o}
    columns = {key for kind, key in lines if kind == "vertical"}
    keys = {key for block in blocks for key in range(block * TILE, block * TILE + TILE)} | columns
    return {key for key in keys if key <= rows[-1]}


@pytest.mark.parametrize(("start", "count"), [(0, 46), (19, 27)])
@pytest.mark.parametrize("alpha", [0.3, 0.5])
def test_tiles_and_values_of_every_row_are_those_of_the_reference(start, count, alpha):
    n, last = start + count, start + count - 1
    q, k, v = 2 * random_rows(count, 4, 1), random_rows(n, 2, 2), random_rows(n, 2, 3)
    q_pos, k_pos = torch.arange(start, n), torch.arange(n)
    params = LoopServe(alpha=alpha, sample=SAMPLE, tile=TILE, dense=1.0, threshold=0)
    index = params.start().select(0, q, k, q_pos, k_pos, end=n, scale=SCALE)
    assert index is not None
    rows = [(i + 1) * count // SAMPLE - 1 for i in range(SAMPLE)]
    wanted, partial = torch.zeros_like(q), 0
    for head in range(4):
        lines = select_lines(cells_of(q, k, head, rows, start), alpha) | {("slash", 0), ("vertical", 0)}
        for row in range(count):
            tile = (start + row) // TILE
            keys = keys_read(lines, tile, last)
            found = index.keys(head, tile - start // TILE, n).tolist()
            assert len(found) == len(set(found))
            assert {key for key in found if key <= min(last, tile * TILE + TILE - 1)} == keys
            seen = [key for key in sorted(keys) if key <= start + row]
            weights = [math.exp(float(q[row, head] @ k[key, head // 2]) * SCALE) for key in seen]
            wanted[row, head] = sum(w * v[key, head // 2] for w, key in zip(weights, seen, strict=True)) / sum(weights)
            partial += len(seen) < start + row + 1
    assert partial > count, "most rows read less than everything"
    out = SparsePrefill(params.start(), n)(0, q, k, v, q_pos, k_pos, scale=SCALE)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
