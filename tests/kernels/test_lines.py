"""Which lines cover an attention matrix: W2, W6 with its golden example, and the Triton twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.kernels import lines as ours
from ragkv.kernels.lines import Prices, prices
from ragkv.sparse.loopserve import sample_rows

triton_lines = pytest.importorskip("ragkv.kernels.triton_lines")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TWINS = {"reference": ours.reference, "triton": triton_lines.cover}


def free(width):
    """Nothing costs anything."""
    return Prices(4, torch.zeros(width // 4 + 2), torch.zeros(width), 1.0)


def cover(cells, at, present, alpha, price=None, name="reference"):
    """Lines, on the CPU."""
    price = price or free(cells.shape[2])
    device = DEVICE if name == "triton" else "cpu"
    price = Prices(price.tile, price.diagonal.to(device), price.column.to(device), price.most)
    found = TWINS[name](cells.to(device), at.to(device), present.to(device), alpha, price)
    return ours.LineSelection(*(each.cpu() for each in vars(found).values()))


GOLDEN = [[1], [0.6, 0.4], [0.5, 0.1, 0.4], [0.5, 0.1, 0.1, 0.3]]


def golden():
    cells = torch.zeros(1, 4, 4, dtype=torch.float64)
    for i, row in enumerate(GOLDEN):
        cells[0, i, : len(row)] = torch.tensor(row)
    return cells, torch.arange(4), torch.ones(4, dtype=torch.bool)


def chosen(mask):
    return mask.nonzero()[:, 1].tolist()


def pattern(count, heads, seed, sharp=3.0):
    """Causal attention rows of a sample, and their positions."""
    generator = torch.Generator().manual_seed(seed)
    at = sample_rows(count, 12)
    scores = sharp * torch.randn(heads, 12, count, generator=generator, dtype=torch.float64)
    hidden = torch.arange(count) > at[:, None]
    return scores.masked_fill(hidden, float("-inf")).softmax(-1), at, torch.ones(count, dtype=torch.bool)


def mass(cells, at, lines):
    """Sampled attention on the lines, counted cell by cell."""
    column = at[:, None] - torch.arange(cells.shape[2])
    on = lines.vertical[:, None, :] | (lines.slash[:, column.clamp(min=0)] & (column >= 0))
    return (cells * on).sum((1, 2)), (on & (column >= 0)).sum((1, 2))


@pytest.mark.parametrize("name", TWINS)
def test_golden_lines(name):
    cells, at, present = golden()
    first = cover(cells, at, present, 0.8, name=name)
    assert (chosen(first.vertical), chosen(first.slash), int(first.cells)) == ([0], [0], 7)
    assert float(first.covered) == pytest.approx(3.7)
    more = cover(cells, at, present, 0.95, name=name)
    assert (chosen(more.vertical), chosen(more.slash), int(more.cells)) == ([0], [0, 1], 9)
    assert float(more.covered) == pytest.approx(3.9)


def test_the_papers_overlap_terms_take_every_line_of_the_golden_example():
    weight = {("v", c): w for c, w in enumerate([2.6, 0.6, 0.5, 0.3])}
    weight |= {("s", o): w for o, w in enumerate([2.1, 0.8, 0.6, 0.5])}
    length = {line: 4 - line[1] for line in weight}
    cells = golden()[0][0]
    largest = {("v", c): float(cells[:, c].max()) for c in range(4)}
    largest |= {("s", o): float(cells.diagonal(-o).max()) for o in range(4)}
    overlap, covered, taken = {"v": 0.0, "s": 0.0}, 0.0, {"v": 0, "s": 0}
    left = dict(weight)

    def worth(line):
        other = "s" if line[0] == "v" else "v"
        return (weight[line] - overlap[other]) / max(1, length[line] - taken[other])

    while left and covered < 0.95 * 4:
        line = max(left, key=lambda each: (worth(each), each[0] == "s"))
        covered += weight[line] - overlap["s" if line[0] == "v" else "v"]
        overlap[line[0]] += largest[line]
        taken[line[0]] += 1
        del left[line]
    assert not left
    assert covered < 0


@settings(deadline=None, max_examples=30)
@given(st.integers(13, 80), st.floats(0.1, 0.99), st.integers(0, 99))
def test_lines_cover_what_was_asked_and_nothing_is_counted_twice(count, alpha, seed):
    cells, at, present = pattern(count, 2, seed)
    lines = cover(cells, at, present, alpha)
    held, number = mass(cells, at, lines)
    torch.testing.assert_close(held, lines.covered, rtol=0, atol=1e-9)
    assert number.tolist() == lines.cells.tolist()
    assert bool((lines.covered >= alpha * 12 - 1e-9).all())


def test_positions_without_a_key_count_neither_as_cells_nor_as_attention():
    cells, at, present = pattern(60, 2, 1)
    present[10:40] = False
    cells = torch.where(present, cells, 0.0)
    lines = cover(cells, at, present, 0.9)
    column = at[:, None] - torch.arange(60)
    on = lines.vertical[:, None, :] | (lines.slash[:, column.clamp(min=0)] & (column >= 0))
    assert (on & (column >= 0) & present).sum((1, 2)).tolist() == lines.cells.tolist()


@pytest.mark.parametrize("name", TWINS)
def test_a_head_that_would_read_too_much_stops_early(name):
    cells, at, present = pattern(64, 1, 1, sharp=0.0)
    price = prices(0, 63, 4, 0.5)
    found = cover(cells, at, present, 0.99, price, name)
    assert 0.5 < float(found.spent) < 0.5 + 2 * float(price.diagonal[0])
    assert float(found.covered) < 0.99 * 12


@pytest.mark.parametrize(("first", "last", "tile"), [(0, 63, 4), (0, 20, 4), (37, 63, 8)])
def test_prices_are_shares_of_all_tiles(first, last, tile):
    price = prices(first, last, tile, 1.0)
    assert float(price.diagonal.sum()) == pytest.approx(1)
    pairs = [(r, c) for r in range(first // tile, last // tile + 1) for c in range(r + 1)]
    for apart in range(last // tile + 1):
        assert float(price.diagonal[apart]) == pytest.approx(sum(r - c == apart for r, c in pairs) / len(pairs))
    for c in range((last + 1) // tile):
        columns = price.column[c * tile : (c + 1) * tile]
        assert float(columns.sum()) == pytest.approx(sum(b == c for _, b in pairs) / len(pairs))


def test_a_tile_diagonal_is_paid_for_once():
    cells = torch.zeros(1, 1, 16)
    cells[0, 0, [5, 6, 7]] = torch.tensor([0.5, 0.3, 0.2])
    at, present, price = torch.tensor([15]), torch.ones(16, dtype=torch.bool), prices(12, 15, 4, 1.0)
    found = cover(cells, at, present, 1.0, price)
    assert found.slash.nonzero()[:, 1].tolist() == [8, 9, 10]
    assert float(found.spent) == pytest.approx(float(price.diagonal[[2, 3]].sum()))


def test_the_twin_takes_the_same_lines():
    for seed in range(3):
        cells, at, present = pattern(70, 3, seed)
        present[20:30] = False
        cells = torch.where(present, cells, 0.0)
        price = prices(0, 69, 4, 0.7)
        one, other = (cover(cells, at, present, 0.9, price, name) for name in TWINS)
        assert torch.equal(one.vertical, other.vertical)
        assert torch.equal(one.slash, other.slash)
        assert torch.equal(one.cells, other.cells)
        torch.testing.assert_close(one.covered.float(), other.covered, rtol=0, atol=1e-5)
        torch.testing.assert_close(one.spent, other.spent, rtol=0, atol=1e-5)
