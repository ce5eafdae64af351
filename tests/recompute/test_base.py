"""Pieces: which tokens their blocks have."""

from __future__ import annotations

import pytest

from ragkv.recompute.base import Piece


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 40])
def test_blocks_have_as_many_rows_as_they_list(tokens):
    piece = Piece(tokens, 16, digest=None)
    for blocks in ((), (0,), tuple(range(piece.blocks)), (piece.blocks - 1,)):
        assert piece.row_count(blocks) == len(piece.rows(blocks))
    assert piece.row_count(range(piece.blocks)) == tokens
