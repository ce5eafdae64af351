"""Turns of a conversation against one dense prefill of everything that was said so far."""

from dataclasses import replace

import pytest
import torch

from ragkv.engine.decoding import decode
from ragkv.engine.generation import Sampling
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.model.layer_pass import append
from ragkv.recompute.cacheblend import CacheBlend
from ragkv.recompute.epic import Epic
from ragkv.recompute.reuse import Reuse
from ragkv.recompute.samkv import SamKV
from ragkv.recompute.scout import Scout
from ragkv.sparse.critiprefill import CritiPrefill
from ragkv.sparse.loopserve import LoopServe
from ragkv.sparse.reselect import LoopServeDecode
from ragkv.timing import StepTimer
from tests import tiny

EXACT = {"rtol": 0, "atol": 1e-10}
PREFIX = tiny.tokens(3, 99)
CHUNKS = [tiny.tokens(n, n) for n in (30, 26, 41, 18)]
QUESTIONS = [tiny.tokens(n, 50 + n) for n in (5, 9, 7)]
SEPARATOR = tiny.tokens(2, 70)
TURNS = [((0, 1), 4), ((2,), 1), ((), 6)]
"""Per turn the chunks that join and the length of the answer."""
EVERYTHING = SamKV(layers=(2, 3), middle="all", repair="kept", update="overwrite")
HEADS = ((2, 1), (3, 6))


def reader(kind="llama", mode="shared", **profile):
    model = tiny.model(kind)
    model.profile = replace(model.profile, **profile)
    return Prefiller(model, PREFIX, mode)


def scout(r, **fields):
    return Scout(**{"layers": 4, "heads": HEADS, "group": 4, "scale": r.model.scale, "floor": 1, "cap": 0.2, **fields})


def dense(r, tokens):
    """Logits after S and `tokens`, in one go."""
    return r.prefill_full([tokens], (), StepTimer()).logits


def hold(r, turns=TURNS, method=None, policy=None, decoded=True):
    """Yield (context, everything read so far) of every turn. Answers are decoded, or (replay) given."""
    talk, said, sources = r.new_state(), [], []
    for (joining, length), question in zip(turns, QUESTIONS, strict=True):
        chunks = [CHUNKS[i] for i in joining]
        if method is None:
            context = r.prefill_full(
                chunks, question, StepTimer(), PrefillOptions(length, prefill_policy=policy), state=talk
            )
        else:
            for chunk in chunks:
                sources.append(InMemoryChunk(r.encode(chunk), 4, exact=not sources and r.mode == "shared"))
            context = r.prefill_sparse(sources, question, method, StepTimer(), PrefillOptions(length), state=talk)
        said += [t for chunk in chunks for t in chunk] + list(question)
        yield context, list(said)
        answer = list(decode(r.model, context.cache, context.logits, context.position, Sampling(length)))
        if not decoded:
            context.cache.truncate([n - length + 1 for n in context.cache.lengths])
        talk.append_answer(answer, SEPARATOR)
        said += [*answer, *SEPARATOR]


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_every_turn_is_one_dense_prefill_of_all_that_was_said(kind):
    r = reader(kind)
    for context, said in hold(r):
        torch.testing.assert_close(context.logits, dense(r, said), **EXACT)
        assert context.position == len(PREFIX) + len(said)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("mode", ["shared", "isolated"])
def test_everything_kept_and_recomputed_is_one_dense_prefill_too(kind, mode):
    r = reader(kind, mode)
    for context, said in hold(r, method=EVERYTHING):
        torch.testing.assert_close(context.logits, dense(r, said), **EXACT)


def test_reuse_with_chunks_that_join_is_not_one_dense_prefill():
    r = reader()
    apart = [float((c.logits - dense(r, said)).abs().max()) for c, said in hold(r, method=Reuse(4))]
    assert min(apart) > 1e-2


def test_scout_without_limits_and_epic_with_whole_chunks_are_one_dense_prefill():
    r = reader(retrieval_heads=HEADS)
    for method in (scout(r, promise=1.0, cap=1.0), Epic(4, link=41), CacheBlend(4, ratio=1.0)):
        for context, said in hold(r, method=method):
            torch.testing.assert_close(context.logits, dense(r, said), **EXACT)


def test_an_answer_that_is_read_instead_of_written_leaves_the_same_state():
    r = reader()
    for method in (None, EVERYTHING):
        written, read = list(hold(r, method=method)), list(hold(r, method=method, decoded=False))
        for (a, _), (b, _) in zip(written, read, strict=True):
            torch.testing.assert_close(a.logits, b.logits, **EXACT)


@pytest.mark.parametrize("method", ["scout", "samkv"])
def test_the_first_turn_is_a_question_without_a_conversation(method):
    r = reader(retrieval_heads=HEADS)
    way = scout(r) if method == "scout" else SamKV(layers=(2, 3), extremes="dynamic")
    first, _ = next(hold(r, method=way))
    sources = [InMemoryChunk(r.encode(CHUNKS[i]), 4, exact=i == 0) for i in (0, 1)]
    alone = r.prefill_sparse(sources, QUESTIONS[0], way, StepTimer(), PrefillOptions(4))
    assert first.plan == alone.plan
    assert torch.equal(first.logits, alone.logits)
    assert (first.cached_tokens, first.cached_chunks, first.prefilled_tokens) == (0, 0, alone.prefilled_tokens)


def test_a_later_question_loads_and_repairs_only_what_is_not_there():
    r = reader(retrieval_heads=HEADS)
    loaded = []

    class Counted(InMemoryChunk):
        def load(self, requested):
            loaded.append((self.tokens, [set(blocks) for blocks in requested]))
            return super().load(requested)

    talk, way = r.new_state(), SamKV(layers=(2, 3), extremes="dynamic")
    sources = [Counted(r.encode(CHUNKS[i]), 4, exact=i == 0) for i in (0, 1)]
    contexts = [r.prefill_sparse(sources, QUESTIONS[0], way, StepTimer(), PrefillOptions(8), state=talk)]
    talk.append_answer((), SEPARATOR)
    sources.append(Counted(r.encode(CHUNKS[2]), 4))
    for question in QUESTIONS[1:]:
        contexts.append(r.prefill_sparse(sources, question, way, StepTimer(), PrefillOptions(8), state=talk))
        talk.append_answer((), SEPARATOR)
    kept = [context.plan.kept for context in contexts]
    assert any(set(kept[1][layer][1]) > set(kept[0][layer][1]) for layer in range(4)), "the second question wants more"
    rows = sum(len(q) + 2 for q in QUESTIONS) - 2 + len(PREFIX)
    for layer in range(4):
        for i, chunk in enumerate(CHUNKS[:3]):
            blocks = [block for tokens, requested in loaded if tokens == chunk for block in requested[layer]]
            assert len(blocks) == len(set(blocks)), "no block is loaded twice"
            assert set(blocks) == set(kept[2][layer][i])
        again = [set(context.plan.recompute[layer][0]) for context in contexts]
        assert not any(again), "the first chunk after S is exact"
        repaired = [set(c.plan.recompute[layer][1]) for c in contexts]
        assert not repaired[0] & repaired[1]
        context_rows = sum(len(s.piece.rows(b)) for s, b in zip(sources, kept[2][layer], strict=True))
        assert contexts[2].cache.lengths[layer] == context_rows + rows
    assert [context.cached_chunks for context in contexts] == [0, 2, 3]
    assert contexts[2].prefilled_tokens < contexts[1].prefilled_tokens < contexts[0].prefilled_tokens + len(CHUNKS[2])


def test_blocks_that_a_later_question_wants_are_repaired_over_what_stands_before_them():
    """First only the fixed blocks, then all: rows of the first chunk, exact, and of layer 0 are those of a prefill."""
    r = reader()
    talk = r.new_state()
    sources = [InMemoryChunk(r.encode(CHUNKS[i]), 4, exact=i == 0) for i in (0, 1)]
    r.prefill_sparse(
        sources, QUESTIONS[0], replace(EVERYTHING, middle="none"), StepTimer(), PrefillOptions(8), state=talk
    )
    talk.append_answer((), ())
    context = r.prefill_sparse(sources, QUESTIONS[1], EVERYTHING, StepTimer(), PrefillOptions(8), state=talk)
    whole = r.prefill_full([*(CHUNKS[i] for i in (0, 1)), QUESTIONS[0]], QUESTIONS[1], StepTimer()).cache
    end = len(PREFIX) + 56
    for layer in range(4):
        here, there = context.cache.positions(layer).argsort()[:end], slice(0, end)
        assert context.cache.positions(layer)[here].tolist() == list(range(end))
        apart = (context.cache.v(layer)[here] - whole.v(layer)[there]).abs().amax((1, 2))
        assert apart[: len(PREFIX) + 30].max() < 1e-10
        assert layer or apart.max() < 1e-10


def test_an_answer_that_is_cut_leaves_no_rows_of_what_was_cut():
    r = reader()
    talk = r.new_state()
    context = r.prefill_full(CHUNKS[:1], QUESTIONS[0], StepTimer(), PrefillOptions(8), state=talk)
    answer = list(decode(r.model, context.cache, context.logits, context.position, Sampling(6)))
    assert context.cache.lengths[0] == 3 + 30 + 5 + 5
    talk.append_answer(answer[:2], SEPARATOR)
    assert (talk.pending_tokens, talk.position) == (SEPARATOR, 3 + 30 + 5 + 4)
    again = r.prefill_full((), QUESTIONS[1], StepTimer(), PrefillOptions(8), state=talk)
    said = [*CHUNKS[0], *QUESTIONS[0], *answer[:2], *SEPARATOR, *QUESTIONS[1]]
    torch.testing.assert_close(again.logits, dense(r, said), **EXACT)
    assert (again.cached_tokens, again.prefilled_tokens) == (30 + 5 + 2, 2 + 9)


def test_a_policy_goes_from_turn_to_turn():
    r = reader()
    params = {"segment": 8, "block": 4, "skip": 1, "threshold": 8}
    for context, said in hold(r, policy=CritiPrefill(budget=512, **params)):
        torch.testing.assert_close(context.logits, dense(r, said), **EXACT)
        assert context.sparse is not None
        assert context.sparse.end == context.position
    sparse = list(hold(r, policy=CritiPrefill(budget=4, **params)))
    assert sparse[1][0].sparse.computed_pairs < sparse[1][0].sparse.dense_pairs
    assert len({id(context.sparse.state) for context, _ in sparse}) == 1, "one state for all turns"
    *_, (last, _) = hold(r, policy=LoopServe(alpha=0.9, sample=4, tile=4, threshold=8))
    kept = [[len(each.slash[0]) > 0 for each in passes] for passes in last.sparse.state.lines.values()]
    assert kept == [[True] * 3, [True] * 3, [False, True, True]], "in the third layer the first turn was read densely"


class OnLines:
    """The attention of one token over the keys on lines and its own, one key at a time."""

    def __init__(self, lines, answered):
        self.lines, self.answered = lines, answered

    def __call__(self, layer, q, k, v, q_pos, k_pos, *, scale):
        heads, now, out = k.shape[1], int(q_pos[0]), torch.zeros_like(q)
        group = q.shape[1] // heads
        passes = self.lines[layer]
        for head in range(q.shape[1]):
            mates = {head // group * group + i for i in range(group)}
            columns = {int(c) for p in passes for h, c in p.vertical.T if int(h) in mates}
            distances = {int(o) for p in passes for h, o in p.slash.T if int(h) in mates}
            every = any(bool(passes[-1].unlimited[mate]) for mate in mates)
            rows = [
                i
                for i, at in enumerate(k_pos.tolist())
                if every or at >= self.answered or at in columns or now - at in distances
            ]
            shares = (k[rows, head // group] @ q[0, head] * scale).softmax(0)
            out[0, head] = shares @ v[rows, head // group]
        return out


@pytest.mark.parametrize("method", [None, "reuse"])
def test_a_turn_decodes_over_the_lines_of_its_prefill_and_of_the_turns_before(method):
    r, few = reader(), 0
    talk, sources = r.new_state(), []
    policies = LoopServe(alpha=0.5, sample=4, tile=4, dense=1.0), LoopServeDecode(first=9)
    for turn, ((joining, length), question) in enumerate(zip(TURNS, QUESTIONS, strict=True)):
        options, chunks = PrefillOptions(length, *policies), [CHUNKS[i] for i in joining]
        if method is None:
            context = r.prefill_full(chunks, question, StepTimer(), options, state=talk)
        else:
            sources += [InMemoryChunk(r.encode(chunk), 4, exact=not sources) for chunk in chunks]
            context = r.prefill_sparse(sources, question, Reuse(4), StepTimer(), options, state=talk)
        passes = talk.attention(policies[0], None).state.lines
        assert all(len(mine) == turn + 1 and mine[-1].last == context.position - 1 for mine in passes.values())
        assert len(passes) == 4
        cache, lengths = context.cache, list(context.cache.lengths)
        token = append(cache, [7], context.position, attention=OnLines(passes, context.position))
        expected = r.model.forward([token])[0][-1]
        cache.truncate(lengths)
        found = r.model.forward([append(cache, [7], context.position, attention=context.decoding)])[0][-1]
        torch.testing.assert_close(found, expected, **EXACT)
        few += context.decoding.keys_read < context.decoding.keys_present
        cache.truncate(lengths)
        talk.append_answer((), SEPARATOR)
    assert few == 3
    assert talk.bytes > talk.stitch.cache.bytes, "lines count"


def test_a_turn_that_is_read_densely_decodes_without_lines():
    r, talk = reader(), reader().new_state()
    lined = PrefillOptions(8, LoopServe(alpha=0.5, sample=4, tile=4, dense=1.0), LoopServeDecode(first=9))
    r.prefill_full([CHUNKS[0]], QUESTIONS[0], StepTimer(), lined, state=talk)
    talk.append_answer((), SEPARATOR)
    plain = replace(lined, prefill_policy=None)
    context = r.prefill_full([], QUESTIONS[1], StepTimer(), plain, state=talk)
    r.model.forward([append(context.cache, [7], context.position, attention=context.decoding)])
    assert not context.decoding.has_selected
    assert context.decoding.keys_read == context.decoding.keys_present
