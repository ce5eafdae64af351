"""Multi-InfLLM: the blocks that each layer selects, and the logits over them."""

from dataclasses import replace

import pytest
import torch

from ragkv.engine.passes import run_alone
from ragkv.engine.stitch import Stitch
from ragkv.model.layer_pass import Capture, append
from ragkv.recompute.base import ChunkSpan
from ragkv.recompute.multi_infllm import MultiInfLLM
from ragkv.recompute.reuse import Reuse
from ragkv.recompute.samkv import score
from tests import tiny
from tests.engine.test_prefill import CHUNKS, EXACT, PREFIX, QUESTION, reader, sources, sparse

SMALL = MultiInfLLM(4, initial=2, local=3, share=0.2, angle="stitched")
BLOCKS = [-(-len(chunk) // 4) for chunk in CHUNKS]


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_a_share_of_one_reads_what_reuse_reads(kind):
    r = reader(kind)
    everything = sparse(r, replace(SMALL, share=1.0))
    assert everything.plan.kept == sparse(r, Reuse(4)).plan.kept
    torch.testing.assert_close(everything.logits, sparse(r, Reuse(4)).logits, **EXACT)


def test_the_ends_of_the_whole_context_are_kept_and_a_share_of_the_rest():
    plan = sparse(reader(), SMALL).plan
    for layer in plan.kept:
        assert {0, 1} <= set(layer[0])
        assert set(layer[2]) >= set(range(BLOCKS[2] - 3, BLOCKS[2]))
        assert sum(map(len, layer)) == 2 + 3 + -(-2 * sum(BLOCKS) // 10)
    assert len(set(plan.kept)) > 1, "each layer selects its own blocks"


def test_every_layer_keeps_the_blocks_its_own_queries_score_highest():
    """Prefill the question again over the resulting plan. Its queries must select the same plan."""
    r = reader()
    found = sources(r)
    kept = sparse(r, SMALL).plan.kept
    stitch = Stitch(r.model, [s.piece for s in found], len(PREFIX), 128)
    stitch.cache.extend(r.prefix)
    stitch.reserve([s.piece for s in found], kept)
    run_alone(r.model, r.runner.load_blocks(stitch, found, kept))
    capture = Capture()
    r.model.forward([append(stitch.cache, QUESTION, stitch.end, capture=capture)])
    for layer in range(4):
        query, scored = capture.q[layer].mean(0, keepdim=True), []
        for i, (chunk, source) in enumerate(zip(CHUNKS, found, strict=True)):
            k = r.encode(chunk).k[layer]
            for block in range(source.piece.blocks):
                rows = [int(t) for t in source.piece.digest.landmarks[layer, block]]
                scored.append((float(score(query, k[rows].mean(0)[None, None])[0, 0]), i, block))
        ends = {*scored[:2], *scored[-3:]}
        best = sorted(set(scored) - ends, reverse=True)[: -(-2 * sum(BLOCKS) // 10)]
        assert {(i, b) for _, i, b in [*best, *ends]} == {(i, b) for i, bs in enumerate(kept[layer]) for b in bs}


def test_its_logits_equal_those_of_the_question_over_the_selected_blocks():
    r = reader()
    context = sparse(r, SMALL)
    stitch = Stitch(r.model, [s.piece for s in sources(r)], len(PREFIX), 128)
    stitch.cache.extend(r.prefix)
    stitch.reserve([s.piece for s in sources(r)], context.plan.kept)
    run_alone(r.model, r.runner.load_blocks(stitch, sources(r), context.plan.kept))
    logits = r.model.forward([append(stitch.cache, QUESTION, stitch.end)])[0][-1]
    torch.testing.assert_close(context.logits, logits, **EXACT)


def test_keys_before_the_local_window_are_rotated_to_its_edge():
    angle = replace(SMALL, angle="one").plan([s.piece for s in sources(reader())], []).key_positions
    turned = angle(torch.tensor([0, 7, 28, 40]), ChunkSpan(first=3, start=59, end=100))
    window = sum(len(sources(reader())[2].piece.span(b)) for b in range(BLOCKS[2])[-3:])
    assert turned.tolist() == [100 - window, 100 - window, max(87, 100 - window), 99]
    one, stitched = (sparse(reader(), replace(SMALL, angle=a)).logits for a in ("one", "stitched"))
    assert (one - stitched).abs().max() > 1e-3


def test_a_context_without_a_middle_is_kept_whole():
    context = sparse(reader(), MultiInfLLM(4, initial=20, local=20))
    assert context.plan.kept == sparse(reader(), Reuse(4)).plan.kept
