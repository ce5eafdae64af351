"""Rows of layers with different heads lie in stored rows of one form, and come out as they went in."""

from __future__ import annotations

import pytest
import torch

from ragkv.engine.calibration import CalibrationSet, calibrate
from ragkv.errors import InputError
from ragkv.model.packed_heads import PackedHeads, stored_heads
from tests import families


def test_the_form_has_the_smallest_head_and_the_widest_row():
    assert stored_heads([(16, 256), (4, 512)], 32) == (16, 256)
    assert stored_heads([(2, 256), (2, 512)], 8) == (4, 256)
    assert stored_heads([(2, 256), (2, 384)], 8) is None


def test_heads_that_are_no_part_of_the_query_heads_are_joined():
    assert stored_heads([(2, 16), (2, 512)], 4) == (4, 256)
    assert stored_heads([(3, 16), (3, 32)], 6) == (6, 16)
    assert stored_heads([(1, 16), (1, 48)], 4) == (1, 48)


@pytest.mark.parametrize(("heads", "size"), [(4, 8), (1, 16), (2, 16), (8, 4)])
def test_rows_come_out_as_they_went_in(heads, size):
    packed, rows = PackedHeads(heads, size, (8, 4)), torch.randn(5, heads, size)
    stored = packed.pack(rows)
    assert stored.shape == (5, 8, 4)
    assert torch.equal(packed.unpack(stored), rows)
    assert stored.flatten(1)[:, heads * size :].eq(0).all()


def test_gemma_4_keeps_the_heads_of_each_layer():
    model = families.model("gemma4_text")
    assert (model.shape.kv_heads, model.shape.head_dim) == (2, 16)
    assert {kind.packed for kind in model.kinds} == {PackedHeads(2, 16, (2, 16)), PackedHeads(1, 32, (2, 16))}


def test_calibration_of_such_a_model_is_refused():
    with pytest.raises(InputError, match="no retrieval heads to find"):
        calibrate(families.model("gemma4_text"), [CalibrationSet((), ())], lambda *far: None)
