"""Stitching, repair and question prefill against a full prefill. Oracles O10, S1-S6, S11, S12."""

from dataclasses import replace

import pytest
import torch

from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, append
from ragkv.recompute.cacheblend import CacheBlend
from ragkv.recompute.epic import Epic
from ragkv.recompute.evidence import BlockEvidence
from ragkv.recompute.reuse import Reuse
from ragkv.recompute.samkv import SamKV
from ragkv.recompute.scout import Scout
from ragkv.sparse.critiprefill import CritiPrefill
from ragkv.timing import StepTimer
from tests import tiny

EXACT = {"rtol": 0, "atol": 1e-10}
PREFIX, QUESTION = tiny.tokens(3, 99), tiny.tokens(5, 50)
CHUNKS = [tiny.tokens(n, n) for n in (30, 26, 41)]
LAYERS = (2, 3)


def reader(kind="llama", mode="shared"):
    return Prefiller(tiny.model(kind), PREFIX, mode)


def sources(r, chunks=CHUNKS):
    return [InMemoryChunk(r.encode(c), 4, exact=i == 0 and r.mode == "shared") for i, c in enumerate(chunks)]


def full(r, chunks=CHUNKS):
    return r.prefill_full(chunks, QUESTION, StepTimer(), PrefillOptions(8)).logits


def sparse(r, method, chunks=CHUNKS):
    return r.prefill_sparse(sources(r, chunks), QUESTION, method, StepTimer(), PrefillOptions(8))


@pytest.mark.parametrize("mode", ["shared", "isolated"])
@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_chunks_encoded_together_equal_chunks_encoded_alone(kind, mode):
    r = reader(kind, mode)
    for alone, together in zip(map(r.encode, CHUNKS), r.encode_many(CHUNKS), strict=True):
        assert together.tokens == alone.tokens
        torch.testing.assert_close((together.k, together.v), (alone.k, alone.v), **EXACT)
        for field, expected in vars(alone.digest).items():
            torch.testing.assert_close(getattr(together.digest, field), expected, rtol=1e-6, atol=1e-10)


def test_no_chunks_are_encoded_to_nothing():
    assert reader().encode_many([]) == []


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_one_chunk_after_the_shared_prefix_is_exact_without_recomputation(kind):
    r = reader(kind)
    torch.testing.assert_close(sparse(r, Reuse(4), CHUNKS[:1]).logits, full(r, CHUNKS[:1]), **EXACT)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_two_chunks_without_recomputation_are_not_a_full_prefill(kind):
    r = reader(kind)
    assert (sparse(r, Reuse(4), CHUNKS[:2]).logits - full(r, CHUNKS[:2])).abs().max() > 1e-2


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("mode", ["shared", "isolated"])
def test_everything_kept_and_recomputed_is_a_full_prefill(kind, mode):
    r = reader(kind, mode)
    everything = SamKV(layers=LAYERS, middle="all", repair="kept", update="overwrite")
    torch.testing.assert_close(sparse(r, everything).logits, full(r), **EXACT)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_epic_that_links_whole_chunks_is_a_full_prefill(kind):
    r = reader(kind)
    torch.testing.assert_close(sparse(r, Epic(4, link=41)).logits, full(r), **EXACT)
    assert (sparse(r, Epic(4, link=40)).logits - full(r)).abs().max() > 1e-9


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_layer_0_needs_no_context_and_the_layers_above_do(kind):
    r = reader(kind)
    capture = Capture(keys_too=True)
    whole = [*PREFIX, *CHUNKS[0], *CHUNKS[1]]
    start = len(PREFIX) + len(CHUNKS[0])
    cache = ContextCache(r.model.shape, len(whole), r.model.dtype)
    r.model.forward([append(cache, whole, 0, outputs=0, capture=capture)])
    alone = r.encode(CHUNKS[1])
    torch.testing.assert_close(alone.k[0], capture.k[0][start:], **EXACT)
    torch.testing.assert_close(alone.v[0], capture.v[0][start:], **EXACT)
    for layer in range(1, 4):
        assert (alone.k[layer] - capture.k[layer][start:]).abs().max() > 1e-3


def test_fusion_of_everything_is_not_a_full_prefill():
    r = reader()
    fused = SamKV(layers=LAYERS, middle="all", repair="kept", update="fusion")
    assert (sparse(r, fused).logits - full(r)).abs().max() > 1e-2


def test_recomputing_more_of_every_chunk_comes_closer_to_a_full_prefill():
    r = reader()
    errors = [float((sparse(r, Epic(4, link=n)).logits - full(r)).abs().max()) for n in (0, 20, 35, 41)]
    assert errors[-1] < 1e-10
    assert errors[0] > errors[2] > errors[3]


@pytest.mark.parametrize("update", ["overwrite", "fusion"])
@pytest.mark.parametrize("middle", ["top_p", "none"])
def test_repair_and_question_in_one_pass_equal_two_passes(update, middle):
    r = reader()
    method = SamKV(layers=LAYERS, update=update, middle=middle, extremes="dynamic", shared=True)

    class OnePass(SamKV):
        def plan(self, pieces, queries, read=()):
            return replace(super().plan(pieces, queries), one_pass=True)

    two = sparse(r, method)
    one = sparse(r, OnePass(**{f: getattr(method, f) for f in method.__dataclass_fields__}))
    assert two.plan.kept == one.plan.kept
    assert any(any(layer) for layer in two.plan.recompute)
    torch.testing.assert_close(one.logits, two.logits, **EXACT)
    for layer in range(4):
        torch.testing.assert_close(one.cache.k(layer), two.cache.k(layer), **EXACT)


def test_padding_stands_in_during_repair_and_is_gone_afterwards():
    """Rows thin out: a token recomputed at layer 2 only passes through layers whose plan does not keep its block."""
    r = reader()
    base = SamKV(layers=LAYERS, middle="none")

    class Thin(SamKV):
        def plan(self, pieces, queries, read=()):
            plan = super().plan(pieces, queries)
            kept = [list(map(list, layer)) for layer in plan.kept]
            recompute = [list(map(list, layer)) for layer in plan.recompute]
            kept[2][1].append(2)
            recompute[2][1].append(9)
            kept = tuple(tuple(tuple(sorted(b)) for b in layer) for layer in kept)
            recompute = tuple(tuple(tuple(sorted(t)) for t in layer) for layer in recompute)
            padding = tuple(((), (2,) if layer < 2 else (), ()) for layer in range(4))
            return replace(plan, kept=kept, recompute=recompute, padding=padding)

    with_padding, plain = sparse(r, Thin(layers=LAYERS, middle="none")), sparse(r, base)
    sizes = [with_padding.cache.lengths[layer] - plain.cache.lengths[layer] for layer in range(4)]
    assert sizes == [0, 0, 4, 0]
    assert (with_padding.logits - plain.logits).abs().max() > 1e-6


class Counting(InMemoryChunk):
    """A source that counts the blocks it gives, by layer."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.given = [0] * 4

    def load(self, requested):
        self.given = [given + len(blocks) for given, blocks in zip(self.given, requested, strict=True)]
        return super().load(requested)


def scout(r):
    """Its composite pass ends at layer 2."""
    heads = ((1, 1), (2, 6))
    r.model.profile = replace(r.model.profile, retrieval_heads=heads)
    kinds = ("meaning", "words", "attention")
    return Scout(layers=4, heads=heads, group=4, scale=r.model.scale, evidence=kinds, floor=1, cap=0.2)


OVERWRITING = {
    "scout": scout,
    "epic": lambda r: Epic(4, link=9),
    "samkv": lambda r: SamKV(layers=LAYERS, update="overwrite", extremes="dynamic"),
    "samkv, one pass": lambda r: SamKV(layers=LAYERS, update="overwrite", extremes="dynamic", repair="kept"),
}


@pytest.mark.parametrize("name", OVERWRITING)
def test_what_is_written_over_before_it_is_read_need_not_be_loaded(name, monkeypatch):
    """The same bits, whatever lies in rows that are reserved."""
    r = reader()
    method = OVERWRITING[name](r)

    def asked():
        found = told([Counting(r.encode(c), 4, exact=i == 0) for i, c in enumerate(CHUNKS)])
        return r.prefill_sparse(found, QUESTION, method, StepTimer(), PrefillOptions(8)), [
            source.given for source in found
        ]

    reserve = ContextCache.reserve

    def spoilt(cache, layer, positions):
        slots = reserve(cache, layer, positions)
        for store in cache.buffers(layer, 0):
            store[slots] = torch.nan
        return slots

    with monkeypatch.context() as patched:
        patched.setattr(
            "ragkv.engine.stitched_prefill.overwritten_blocks", lambda pieces, plan: [[()] * len(pieces)] * 4
        )
        whole, everything = asked()
    monkeypatch.setattr(ContextCache, "reserve", spoilt)
    spared, given = asked()
    assert torch.equal(spared.logits, whole.logits)
    assert spared.plan.kept == whole.plan.kept
    assert given[0] == everything[0], "of an exact chunk nothing is computed again"
    assert sum(map(sum, given)) < sum(map(sum, everything))
    assert all(torch.equal(spared.cache.k(layer), whole.cache.k(layer)) for layer in range(4))


def test_scout_loads_of_chunks_that_it_recomputes_what_the_composite_pass_attends_to_and_nothing_else():
    r = reader()
    way = replace(scout(r), look=0.4, cap=0.5)
    found = told([Counting(r.encode(c), 4, exact=i == 0) for i, c in enumerate(CHUNKS)])
    context = r.prefill_sparse(found, QUESTION, way, StepTimer(), PrefillOptions(8))
    kept, look = len(context.plan.kept[0][0]), [len(blocks) for blocks in context.looks[0]]
    assert sum(look[1:]) > 0
    assert [source.given for source in found] == [[kept] * 4, [look[1]] * 2 + [0, 0], [look[2]] * 2 + [0, 0]]


def test_the_model_is_asked_over_what_the_evidence_finds():
    r = reader()
    seen = []

    class Noting(Scout):
        def plan(self, pieces, queries, read=()):
            seen.append((queries, read))
            return super().plan(pieces, queries, read)

    way = scout(r)
    noting = Noting(**{f: getattr(way, f) for f in way.__dataclass_fields__} | {"look": 0.4, "cap": 0.5})
    found = told(sources(r))
    context = r.prefill_sparse(found, QUESTION, noting, StepTimer(), PrefillOptions(8))
    ((queries, read),) = seen
    alone = r.queries(sources(r), ((), (), ()), QUESTION, 3)
    assert read == noting.composite_blocks([source.piece for source in found]) != ((), (), ())
    assert context.looks == (read,)
    for found_rows, expected, first in zip(queries, r.queries(sources(r), read, QUESTION, 3), alone, strict=True):
        torch.testing.assert_close(found_rows, expected, **EXACT)
        assert found_rows is queries[0] or (found_rows - first).abs().max() > 1e-3, "layer 0 sees no context"
    assert all(set(one) <= set(other) for layer in context.plan.kept for one, other in zip(read, layer, strict=True))


def told(found):
    """Return sources with evidence in their pieces, from a fixed seed."""
    generator = torch.Generator().manual_seed(3)
    for source in found:
        blocks = source.piece.blocks
        meaning, words = torch.rand(blocks, generator=generator), torch.rand(blocks, 2, generator=generator) > 0.7
        named = torch.zeros(blocks, 0, dtype=torch.bool)
        source.piece = replace(source.piece, evidence=BlockEvidence(meaning, words, named, named[0]))
    return found


@pytest.mark.parametrize("cap", [0.02, 0.3, 0.7])
def test_the_cache_has_an_eighth_of_the_context_or_as_much_as_the_plan_keeps(cap):
    r = reader()
    chunks = [tiny.tokens(64, 64 + i) for i in range(8)]
    asked = replace(scout(r), look=0.0, floor=1, cap=cap, promise=1.0, repair="none")
    context = sparse(r, asked, chunks)
    ends = len(QUESTION) + 8
    expected = max(len(PREFIX) + 8 * 64 // 8 + ends, context.cache.lengths[0] + 8)
    sizes = [context.cache.buffers(layer, 0)[0].shape[0] for layer in range(4)]
    assert sizes == [expected] * 4


def test_layers_keep_different_blocks_and_positions_stay_those_of_the_full_text():
    r = reader()
    context = sparse(r, SamKV(layers=LAYERS, extremes="dynamic"))
    kept = context.plan.kept
    assert len({layer[i] for layer in kept for i in range(3)}) > 3
    starts = [3, 33, 59]
    for layer in range(4):
        expected = {0, 1, 2, *range(100, 105)}
        for start, chunk, blocks in zip(starts, CHUNKS, kept[layer], strict=True):
            expected |= {start + t for b in blocks for t in range(4 * b, min(len(chunk), 4 * b + 4))}
        positions = context.cache.positions(layer).tolist()
        assert sorted(positions) == sorted(expected)
    assert context.position == 105


def test_selection_does_not_see_the_chunks_behind():
    """O10 for encoding: a chunk's digest up to a token does not depend on the tokens after it."""
    r = reader()
    one, other = r.encode(CHUNKS[2]), r.encode((*CHUNKS[2][:20], *tiny.tokens(21, 5)))
    torch.testing.assert_close(one.k[:, :20], other.k[:, :20], **EXACT)
    torch.testing.assert_close(one.digest.mean_keys[:, :5], other.digest.mean_keys[:, :5], **EXACT)


def test_a_question_leaves_no_trace_in_what_is_stored():
    r = reader()
    stored = sources(r)
    scout = Scout(layers=4, heads=((2, 1), (3, 6)), group=4, scale=r.model.scale, floor=1, cap=0.2)
    calibrated = replace(r.model.profile, retrieval_heads=scout.heads)
    r.model.profile = calibrated
    stored = sources(r)
    first = r.prefill_sparse(stored, QUESTION, scout, StepTimer(), PrefillOptions(8)).logits
    r.prefill_sparse(stored, tiny.tokens(9, 3), scout, StepTimer(), PrefillOptions(8))
    torch.testing.assert_close(
        r.prefill_sparse(stored, QUESTION, scout, StepTimer(), PrefillOptions(8)).logits, first, rtol=0, atol=0
    )


def test_scout_with_an_unlimited_budget_and_full_repair_is_a_full_prefill():
    r = reader()
    heads = ((2, 1), (3, 6))
    r.model.profile = replace(r.model.profile, retrieval_heads=heads)
    scout = Scout(layers=4, heads=heads, group=4, scale=r.model.scale, promise=1.0, cap=1.0)
    torch.testing.assert_close(sparse(r, scout).logits, full(r), **EXACT)


class ManyRows(CritiPrefill):
    """Acts where more rows attend than a question has."""

    def why_dense(self, rows: int, keys: int) -> str:
        return "few rows" if rows <= len(QUESTION) else ""


def test_a_policy_that_asks_for_many_rows_acts_on_repair_and_leaves_the_question_dense():
    r, small = reader(), {"segment": 8, "block": 4, "budget": 4, "skip": 0}

    def asked(policy):
        method, options = CacheBlend(4, ratio=0.5), PrefillOptions(8, prefill_policy=policy)
        return r.prefill_sparse(sources(r), QUESTION, method, StepTimer(), options)

    repaired, everything = asked(ManyRows(**small)), asked(CritiPrefill(**small))
    assert repaired.sparse.dense_pairs == everything.sparse.dense_pairs
    assert everything.sparse.pairs_read < repaired.sparse.pairs_read < repaired.sparse.dense_pairs
    assert repaired.dense.prefill == ""
    rows = [(len(PREFIX) + sum(map(len, CHUNKS)) + at) for at in range(1, len(QUESTION) + 1)]
    heads, layers = r.model.shape.q_heads, r.model.shape.layers
    unread = everything.sparse.dense_pairs - everything.sparse.pairs_read
    kept = repaired.sparse.dense_pairs - repaired.sparse.pairs_read
    assert 0 < unread - kept <= heads * ((layers - 1) * sum(rows) + rows[-1])
    assert not torch.equal(repaired.logits, everything.logits)
