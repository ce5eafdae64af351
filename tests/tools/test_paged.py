"""The measurement of blocks in place runs on a CPU, too, as far as it needs no GPU."""

from __future__ import annotations

import pytest

from tools.paged import compare_needles

pytestmark = pytest.mark.usefixtures("one_thread")


def test_needles_are_answered_alike_in_place_and_with_own_caches(capsys, tiny_folder):
    compare_needles(str(tiny_folder), "cpu", "exact", sets=1, questions=1, documents=2, methods=("reuse",))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("reuse")
    assert "same 1 of 1" in line
    assert "keys in place 0" not in line
