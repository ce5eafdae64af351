"""Static attention analysis (appendix A.1, A.2). Oracle S13, PauTa golden values."""

import math

import numpy as np
import pytest
import torch

from ragkv.recompute.analysis import analyse, fit_exponents, low_outliers, outlier_tokens, stability


def fitted(column, start):
    """Return the exponent of one column."""
    return float(fit_exponents(column[:, None], torch.tensor([start]))[0])


def by_hand(column, start, before):
    """Fit the exponent with plain least squares over the rows from `start` on."""
    y = column[start:].double().clamp(min=1e-12).log()
    if len(y) < 8:
        return math.inf
    x = torch.arange(start + before + 1, len(column) + before + 1).double().log()
    x = x - x.mean()
    return -float((x * y).sum() / (x * x).sum())


def test_columns_fitted_together_equal_columns_fitted_alone():
    columns, starts = torch.rand(60, 5), torch.tensor([0, 7, 30, 52, 53])
    for b, alpha in enumerate(fit_exponents(columns, starts, 4).tolist()):
        assert alpha == pytest.approx(by_hand(columns[:, b], int(starts[b]), 4), rel=1e-12)


def test_the_axis_of_the_power_law_is_the_row_or_the_distance():
    """A column that falls with the distance to token 30, and one that falls with the row."""
    row = torch.arange(100, dtype=torch.float64)
    by_distance, by_row = (row - 30).clamp(min=1) ** -0.7, (row + 1) ** -0.4
    columns, starts = torch.stack([by_distance, by_row], dim=1), torch.tensor([31, 31])
    distance, rows = (fit_exponents(columns, starts, axis=axis) for axis in ("distance", "row"))
    assert float(distance[0]) == pytest.approx(0.7, abs=1e-9)
    assert float(rows[1]) == pytest.approx(0.4, abs=1e-9)
    assert abs(float(distance[1]) - 0.4) > 0.1


@pytest.mark.parametrize("axis", ["row", "distance"])
def test_with_a_common_constant_exponents_are_those_of_one_least_squares_fit(axis):
    """Against numpy: one column of the design for the constant, one for each block that has enough rows."""
    generator = torch.Generator().manual_seed(4)
    columns, starts = torch.rand(2, 60, 5, generator=generator), torch.tensor([[1, 7, 30, 51, 54]] * 2)
    for layer, alphas in enumerate(fit_exponents(columns, starts, 4, axis=axis, constant="common")):
        rows = [(i, b) for b in range(5) if 60 - int(starts[layer, b]) >= 8 for i in range(int(starts[layer, b]), 60)]
        x = [math.log(i + 5 if axis == "row" else max(1, i - int(starts[layer, b]) + 1)) for i, b in rows]
        design = np.zeros((len(rows), 6))
        design[:, 5] = 1
        design[np.arange(len(rows)), [b for _, b in rows]] = [-value for value in x]
        y = np.log([float(columns[layer, i, b]) for i, b in rows])
        solved = np.linalg.lstsq(design, y, rcond=None)[0]
        assert alphas[:4].tolist() == pytest.approx(solved[:4].tolist(), rel=1e-6)
        assert float(alphas[4]) == math.inf


def test_through_the_origin_a_larger_exponent_means_less_attention():
    row = torch.arange(1, 101, dtype=torch.float64)
    columns = torch.stack([row**-0.5, 0.5 * row**-0.5], dim=1)
    alphas = fit_exponents(columns, torch.tensor([0, 0]), constant="origin").tolist()
    assert alphas[0] == pytest.approx(0.5)
    assert alphas[1] == pytest.approx(0.5 + math.log(2) * float(row.log().sum() / (row.log() ** 2).sum()))
    free = fit_exponents(columns, torch.tensor([0, 0])).tolist()
    assert free == pytest.approx([0.5, 0.5]), "a free constant hides that the second has half of the attention"


def test_by_distance_uniform_attention_makes_late_blocks_important():
    q, k = torch.zeros(96, 4, 8), torch.randn(96, 2, 8)
    alpha = analyse(q[None], k[None], block=16, before=0, scale=1.0, axis="distance").alpha[0]
    assert alpha.tolist() == sorted(alpha.tolist(), reverse=True)
    assert float(alpha[4]) < 0.5 < float(alpha[0])


@pytest.mark.parametrize("alpha", [0.3, 0.9])
def test_the_exponent_of_a_power_law_is_recovered(alpha):
    column = 0.2 * torch.arange(1, 400, dtype=torch.float64) ** -alpha
    assert fitted(column, 40) == pytest.approx(alpha, abs=1e-9)


def test_uniform_attention_makes_every_block_equally_important():
    """The axis is the row index. By distance, late blocks would always look important."""
    n = 256
    saliences = analyse(torch.zeros(1, n, 4, 8), torch.randn(1, n + 3, 2, 8), block=16, before=3, scale=1.0)
    fitted = saliences.alpha[saliences.alpha.isfinite()]
    assert fitted.shape[0] == 16
    torch.testing.assert_close(fitted, torch.ones(16), rtol=0, atol=1e-4)


def test_blocks_with_too_few_rows_are_never_important():
    assert math.isinf(fitted(torch.rand(20), 13))
    assert math.isfinite(fitted(torch.rand(20), 12))


def test_analysis_in_slabs_equals_the_whole_attention_matrix():
    g = torch.Generator().manual_seed(0)
    n, before, block = 290, 5, 16  # the last block has 2 tokens
    q, k = torch.randn(n, 4, 8, generator=g), torch.randn(n + before, 2, 8, generator=g)
    scores = torch.einsum("thd,nhd->htn", q, k.repeat_interleave(2, dim=1)) * 0.7
    hidden = torch.arange(n + before) > before + torch.arange(n)[:, None]
    attention = scores.masked_fill(hidden, -math.inf).softmax(-1).mean(0)[:, before:].double()
    later = torch.ones(n, n).tril(-1).bool()
    salience = attention.masked_fill(~later, 0).sum(0) / torch.arange(n - 1, -1, -1).clamp(min=1)
    got = analyse(q[None], k[None], block=block, before=before, scale=0.7)
    for b in range(19):
        span = slice(b * block, (b + 1) * block)
        best = (salience[span].argsort(descending=True)[:4] + b * block).tolist()
        assert got.landmarks[0, b].tolist() == best + best[:1] * (4 - len(best))
        rep = best[0]
        assert float(got.unimportance[0, b]) == pytest.approx(float(salience[rep]), rel=1e-4)
        expected = by_hand(attention[:, rep], rep + 1, before)
        assert float(got.alpha[0, b]) == pytest.approx(expected, rel=1e-3)


def z(count, ddof):
    values = [0.0] * (count - 1) + [1.0]
    mean = sum(values) / count
    return (1 - mean) / math.sqrt(sum((v - mean) ** 2 for v in values) / (count - ddof))


@pytest.mark.parametrize(
    ("count", "most"), [(5, 1.789), (8, 2.475), (10, 2.846), (11, 3.015), (12, 3.175), (20, 4.249)]
)
def test_the_largest_possible_deviation_of_few_values(count, most):
    assert z(count, 1) == pytest.approx(most, abs=1e-3)
    spike = [1.0] * (count - 1) + [0.0]
    assert low_outliers(spike) == ([count - 1] if most > 3 else [])


def test_high_values_are_not_low_outliers():
    assert low_outliers([1.0] * 30 + [9.0]) == []


def test_exponents_are_pooled_over_layers_and_few_fall_back_to_the_smallest():
    alpha = torch.full((3, 8), 1.0)
    alpha[1, 4] = 0.1
    representative = (torch.arange(8) * 16).expand(3, -1)
    assert outlier_tokens(alpha, representative, range(1, 6), layers=(0, 1, 2)) == (64,)
    assert outlier_tokens(alpha, representative, range(1, 6), layers=(1,)) == (64,)  # 5 values: the smallest
    alpha[1, 4] = 1.0
    alpha[0, 3] = 0.9999
    assert outlier_tokens(alpha, representative, range(1, 6), layers=(1, 2)) == (16,)  # 10 values: still the smallest
    assert outlier_tokens(alpha, representative, range(1, 1), layers=(1,)) == ()


def test_layers_where_the_best_block_stands_out_score():
    alpha = torch.rand(4, 30) + 1
    alpha[:, 7] = 0.9  # the best block everywhere, but it stands out only above layer 1
    alpha[2:, 7] = -5.0
    assert stability([alpha, alpha.clone()]) == [0, 0, 2, 2]
