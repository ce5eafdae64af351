"""Stitched positions of the tokens of chunks, and the way back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.stitch import Stitch
from ragkv.model.rotary import rotate
from ragkv.recompute.base import Piece
from ragkv.recompute.reuse import Reuse
from ragkv.timing import StepTimer
from ragkv.types import Digest
from tests import families, tiny

MODEL = tiny.model()


def pieces(*sizes):
    """Chunks of given sizes. Positions do not depend on their digests."""
    return [Piece(size, 4, Digest(*[torch.empty(0)] * 6)) for size in sizes]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 99), st.sampled_from([0.0, 0.2, 0.6, 1.1]))
def test_tokens_are_the_inverse_of_positions(sizes, seed, share):
    """Some chunks have no token. The last two follow a question and its answer, which belong to no chunk."""
    stitch = Stitch(MODEL, pieces(*sizes), 3, 0)
    stitch.end += 5
    stitch.join(pieces(7, 4))
    generator = torch.Generator().manual_seed(seed)
    chosen = tuple(
        tuple((torch.rand(size, generator=generator) < share).nonzero()[:, 0].tolist()) for size in (*sizes, 7, 4)
    )
    positions = stitch.positions(chosen)
    assert bool((positions[1:] > positions[:-1]).all())
    assert stitch.tokens(positions) == chosen
    between = torch.arange(sum(sizes) + 3, sum(sizes) + 8)
    assert stitch.tokens(torch.cat([torch.arange(3), positions, between]).unique()) == chosen


def test_no_chunks_have_no_tokens():
    assert Stitch(MODEL, [], 3, 0).tokens(torch.arange(3)) == ()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.sets(st.integers(0, 3)).map(sorted), min_size=2, max_size=2), min_size=4, max_size=4))
def test_rows_lie_in_the_slots_of_their_layer_whatever_other_layers_keep(requested):
    """Twice, so that the second call finds layers of different lengths."""
    chunks, layers = pieces(16, 13), [tuple(map(tuple, layer)) for layer in requested]
    stitch = Stitch(MODEL, chunks, 3, 0)
    missing = [tuple(tuple(sorted({0, 1, 2, 3} - set(kept))) for kept in layer) for layer in layers]
    for part in (layers, missing):
        stitch.reserve(chunks, part)
    for layer, blocks in enumerate(layers):
        kept, rest = (
            [
                start + t
                for start, piece, some in zip(stitch.starts, chunks, each, strict=True)
                for t in piece.rows(some)
            ]
            for each in (blocks, missing[layer])
        )
        assert stitch.cache.positions(layer).tolist() == [*kept, *rest]
        slots = stitch._at(layer, torch.tensor([*kept, *rest], dtype=torch.int64))
        assert slots.tolist() == list(range(len(kept) + len(rest)))
    rows = [stitch.cache.positions(layer).tolist() for layer in range(4)]
    assert stitch.cache.alike == all(each == rows[0] for each in rows)


@pytest.mark.parametrize("rows", [1, 50, 10**6])
@pytest.mark.parametrize("sizes", [(18, 9), (4, 3)])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma4_text"])
def test_stored_rows_lie_the_same_however_many_layers_are_filled_at_once(name, sizes, rows, monkeypatch):
    """Gemma's layers have windows or none, and two rotations; those of Gemma 4 differ in heads, too.

    In the short context all layers hold the same rows.
    """
    monkeypatch.setattr("ragkv.engine.pass_runner.FILLED_ROWS", rows)
    made = families.model(name)
    reader = Prefiller(made, families.tokens(3, 1))
    chunks = [reader.encode(families.tokens(size, size)) for size in sizes]
    sources, method = [InMemoryChunk(chunk, 4) for chunk in chunks], Reuse(made.shape.layers)
    cache = reader.prefill_sparse(sources, families.tokens(5, 5), method, StepTimer()).cache
    for layer in range(made.shape.layers):
        kind, at = made.kinds[layer], cache.positions(layer)
        stored = (at >= 3) & (at < 3 + sum(sizes))  # behind S and before the question; a window has lost its first ones
        k, v = (torch.cat([rows[layer] for rows in part]) for part in zip(*((c.k, c.v) for c in chunks), strict=True))
        turned = kind.pack(rotate(kind.unpack(k), made.rotary(torch.arange(3, 3 + sum(sizes)), layer)))
        assert cache.k(layer)[stored].equal(turned[at[stored] - 3])
        assert cache.v(layer)[stored].equal(v[at[stored] - 3])
        assert stored.sum() > 4
