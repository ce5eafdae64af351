"""Reuse, in both readings of the paper."""

import torch

from ragkv.model.rotary import rotate
from ragkv.recompute.reuse import Reuse, ReuseEncoded
from tests.engine.test_prefill import CHUNKS, EXACT, PREFIX, reader, sparse


def rows(context, layer, chunk):
    start = len(PREFIX) + sum(map(len, CHUNKS[:chunk]))
    positions = context.cache.positions(layer)
    return torch.stack([context.cache.k(layer)[positions == start + t][0] for t in range(len(CHUNKS[chunk]))])


def test_keys_are_rotated_to_the_positions_of_their_chunk():
    r = reader()
    start = len(PREFIX) + len(CHUNKS[0])
    expected = rotate(r.encode(CHUNKS[1]).k[2], r.model.rotary(torch.arange(start, start + len(CHUNKS[1]))))
    torch.testing.assert_close(rows(sparse(r, Reuse(4)), 2, 1), expected, **EXACT)


def test_with_encoded_positions_all_chunks_overlap():
    r = reader()
    context = sparse(r, ReuseEncoded(4))
    for chunk in range(3):
        at = r.model.rotary(torch.arange(len(PREFIX), len(PREFIX) + len(CHUNKS[chunk])))
        torch.testing.assert_close(rows(context, 2, chunk), rotate(r.encode(CHUNKS[chunk]).k[2], at), **EXACT)
    assert (context.logits - sparse(r, Reuse(4)).logits).abs().max() > 1e-3
