"""Steps that read blocks in place give the logits of steps that have the same rows in their own caches."""

from __future__ import annotations

import pytest
import torch

from ragkv.kernels import decode_step as reference
from ragkv.kernels import paged_attention
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution import block_tables
from ragkv.model.execution.block_tables import BlockTables
from ragkv.model.execution.graph_decode import GraphDecoder
from tests import tiny
from tests.paged import PagedChunks

pytestmark = pytest.mark.usefixtures("one_thread")
NEAR = 2e-5
"""Difference of logits. Models compute cos and sin in float32, so distances are exact to so many digits."""


def steps(decoder, requests, count=2, first=0):
    """Decode some tokens of all requests both ways; return the largest difference of their logits."""
    worst = 0.0
    for step in range(first, first + count):
        tokens, positions = [11 + 3 * step + i for i in range(len(requests))], [each.end + step for each in requests]
        paged = decoder.decode([r.cache for r in requests], tokens, positions, [r.context for r in requests])
        plain = decoder.decode([r.whole for r in requests], tokens, positions)
        worst = max(worst, float((paged - plain).abs().max()))
    return worst


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_requests_that_share_chunks_read_them_in_place(kind):
    chunks = PagedChunks(model := tiny.model(kind), (13, 8, 21))
    requests = [chunks.request(each) for each in ((0, 1, 2), (2, 0), (1,), ())]
    assert steps(GraphDecoder(model, memory=chunks.memory), requests) < NEAR


def test_a_chunk_may_occur_twice_in_one_context():
    chunks = PagedChunks(model := tiny.model(), (13, 8))
    assert steps(GraphDecoder(model, memory=chunks.memory), [chunks.request((0, 1, 0))]) < NEAR


def test_requests_come_and_go_and_others_stay_as_they_are():
    chunks = PagedChunks(model := tiny.model(), (13, 8, 21))
    decoder, requests = GraphDecoder(model, memory=chunks.memory), [chunks.request((0, 1)), chunks.request((1, 2))]
    assert steps(decoder, requests) < NEAR
    requests = [chunks.request((2, 1)), *requests]
    fresh = [requests[0]]
    assert steps(decoder, fresh) < NEAR
    for each in requests[1:]:
        each.end += 2
    requests[0].end += 2
    assert steps(decoder, requests) < NEAR
    requests[0].end += 2
    assert steps(decoder, [requests[0]]) < NEAR
    assert steps(decoder, [chunks.request((0, 2))]) < NEAR


def test_other_requests_of_the_same_number_are_read_at_once():
    """Nothing runs between the two steps: a step without contexts would empty the tables."""
    chunks = PagedChunks(model := tiny.model(), (13, 8, 21))
    decoder, before, after = GraphDecoder(model, memory=chunks.memory), chunks.request((2, 1)), chunks.request((0, 2))
    plain = GraphDecoder(model).decode([after.whole], [11], [after.end])
    decoder.decode([before.cache], [11], [before.end], [before.context])
    paged = decoder.decode([after.cache], [11], [after.end], [after.context])
    assert float((paged - plain).abs().max()) < NEAR


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_more_requests_than_a_unit_serves(kv_heads):
    """Also where each query head has its own kv head, and a mask would have room for fewer requests than a unit."""
    chunks = PagedChunks(model := tiny.model(kv_heads=kv_heads, layers=2), (9, 5))
    lanes = paged_attention.lanes_of(model.shape)
    requests = [chunks.request((i % 2, 1 - i % 2)) for i in range(2 * lanes + 3)]
    assert steps(GraphDecoder(model, memory=chunks.memory), requests) < NEAR


def test_a_step_in_parts_has_tables_for_each_part(monkeypatch):
    monkeypatch.setattr("ragkv.model.execution.graph_decode.WIDEST", 2)
    chunks = PagedChunks(model := tiny.model(), (9, 5))
    decoder = GraphDecoder(model, memory=chunks.memory)
    requests = [chunks.request(each) for each in ((0, 1), (1,), (0,), (), (1, 0))]
    assert steps(decoder, requests) < NEAR
    written = list[int]()
    for step in (2, 3):
        tokens, positions = [3, 4, 5, 6, 7], [each.end + step for each in requests]
        decoder.decode([r.cache for r in requests], tokens, positions, [r.context for r in requests])
        monkeypatch.setattr(BlockTables, "_write_units", lambda *given: written.append(1))
    assert not written, "tables are built once for the same rows"


def test_drafted_tokens_are_further_rows_of_their_request():
    chunks = PagedChunks(model := tiny.model(), (13, 8))
    decoder = GraphDecoder(model, memory=chunks.memory)
    one, other = chunks.request((0, 1)), chunks.request((1,))
    rows, tokens = [one, one, one, other, other], [3, 4, 5, 6, 7]
    positions = [one.end, one.end + 1, one.end + 2, other.end, other.end + 1]
    paged = decoder.decode([r.cache for r in rows], tokens, positions, [r.context for r in rows])
    plain = decoder.decode([r.whole for r in rows], tokens, positions)
    torch.testing.assert_close(paged, plain, rtol=0, atol=NEAR)


def test_a_context_with_more_keys_than_a_segment(monkeypatch):
    monkeypatch.setattr(paged_attention, "SEGMENT", 8)
    chunks = PagedChunks(model := tiny.model(), (29, 50))
    assert steps(GraphDecoder(model, memory=chunks.memory), [chunks.request((0, 1), 1.0), chunks.request((1,))]) < NEAR


def test_tables_grow_where_units_or_parts_or_positions_need_more_room(monkeypatch):
    monkeypatch.setattr(block_tables, "LEAST", 2)
    monkeypatch.setattr(block_tables, "ANGLES", 8)
    chunks = PagedChunks(model := tiny.model(), (6,) * 20)
    decoder = GraphDecoder(model, memory=chunks.memory)
    assert steps(decoder, [chunks.request((0,))]) < NEAR
    assert steps(decoder, [chunks.request(tuple(range(20))), chunks.request((3, 1))]) < NEAR


def test_a_request_alone_and_among_others_gets_the_same_logits():
    """Only the order of additions differs between batches, and the reference adds in one order."""
    chunks = PagedChunks(model := DecoderModel(tiny.weights().float()), (13, 8, 21))
    decoder = GraphDecoder(model, memory=chunks.memory)
    requests = [chunks.request(each) for each in ((0, 1), (1, 2), (2,))]
    logits = decoder.decode(
        [r.cache for r in requests], [5, 6, 7], [r.end for r in requests], [r.context for r in requests]
    )
    for i, each in enumerate(requests):
        each.cache.truncate([length - 1 for length in each.cache.lengths])
        alone = decoder.decode([each.cache], [5 + i], [each.end], [each.context])
        torch.testing.assert_close(alone[0], logits[i], rtol=0, atol=1e-4)


def test_blocks_without_their_memory_are_refused():
    chunks = PagedChunks(model := tiny.model(), (13,))
    each = chunks.request((0,))
    with pytest.raises(ValueError, match="without their memory"):
        GraphDecoder(model, reference).decode([each.cache], [5], [each.end], [each.context])
