from __future__ import annotations

import pytest
import torch

from ragkv.engine.generation import Sampling, Sequence, sample
from ragkv.engine.logits import StepLogits
from ragkv.model.kv_cache import ContextCache
from ragkv.types import Shape

LOGITS = torch.tensor([[0.3, 2.0, -1.0, 2.0], [5.0, 0.0, 1.0, -2.0], [0.0, 0.0, 0.0, 0.5]])


def test_the_best_token_of_a_row_is_the_first_of_its_largest_logits() -> None:
    assert [row.best for row in StepLogits(LOGITS).rows()] == [1, 0, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("best_first", [True, False])
def test_log_probabilities_are_those_of_a_softmax(dtype: torch.dtype, best_first: bool) -> None:
    step, expected = StepLogits(LOGITS.to(dtype)), LOGITS.to(dtype).float().log_softmax(-1)
    for number, row in enumerate(step.rows()):
        if best_first:
            assert row.best == int(expected[number].argmax())
        found = torch.stack([row.log_probability(token) for token in range(LOGITS.shape[1])])
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected[number])


def test_what_is_computed_of_one_row_is_there_for_the_others() -> None:
    logits = LOGITS.clone()
    rows = StepLogits(logits).rows()
    found = rows[0].best, rows[0].log_probability(1)
    logits.zero_()
    assert [row.best for row in rows] == [1, 0, 3], "all rows were searched at once"
    assert float(found[1]) == pytest.approx(float(LOGITS[0].log_softmax(-1)[1]))
    assert float(rows[1].log_probability(0)) == pytest.approx(float(LOGITS[1].log_softmax(-1)[0]), abs=1e-6)


def test_rows_are_split_in_their_order() -> None:
    parts = StepLogits(LOGITS).split([2, 0, 1])
    assert [[row.best for row in part] for part in parts] == [[1, 0], [], [3]]
    assert torch.equal(parts[2][0].logits, LOGITS[2])


def test_a_temperature_samples_by_the_probabilities_of_the_row() -> None:
    row = StepLogits(torch.tensor([[9.0, 9.0, 9.0], [0.0, 30.0, 0.0]])).rows()[1]
    assert sample(row, [], Sampling(temperature=1.0), torch.Generator().manual_seed(0)) == 1


def test_log_probabilities_are_computed_when_the_next_pass_is_launched() -> None:
    """Nothing else stands between a token and the pass that it begins."""
    first, second = (StepLogits(LOGITS[:1]) for _ in range(2))
    sequence = Sequence(ContextCache(Shape(1, 1, 1, 4), 1, torch.float32), LOGITS[2], 5, Sampling(4))
    sequence.accept(first.rows())
    assert sequence.sample(frozenset()) == 1
    assert "normalisers" not in vars(first)
    sequence.accept(second.rows())
    assert "normalisers" in vars(first)
    assert sequence.sample(frozenset()) == 1
    assert sequence.log_probabilities == pytest.approx([float(LOGITS[0].log_softmax(-1)[1])] * 2)


def test_penalties_take_off_what_the_answer_has_already_and_leave_the_first_token() -> None:
    row, chance = StepLogits(torch.tensor([[3.0, 2.5, 1.0, 0.0]])).rows()[0], torch.Generator()

    def chosen(said: list[int], **more: float) -> int:
        return sample(row, said, Sampling(**more), chance)  # type: ignore[arg-type]

    assert chosen([], presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert chosen([0], presence_penalty=0.4) == 0
    assert chosen([0], presence_penalty=0.6) == 1
    assert chosen([0, 0, 0], presence_penalty=0.4) == 0, "presence counts a token once"
    assert chosen([0, 0, 1], frequency_penalty=0.6) == 1, "frequency counts every time"
    assert chosen([0, 1], frequency_penalty=2.0) == 0
    assert chosen([3, 3], frequency_penalty=-2.0) == 3
    assert chosen([0], presence_penalty=2.0, temperature=0.01) == 1
