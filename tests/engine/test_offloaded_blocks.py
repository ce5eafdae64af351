"""Blocks that come back while an answer is decoded: which, when, and that they are then like all others."""

import pytest
import torch

from ragkv.engine.decoding import decode
from ragkv.engine.generation import Sampling
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.offloaded_blocks import OffloadedBlocks
from ragkv.engine.policies import make_decode_policy
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.question import prompt_order
from ragkv.engine.registry import make_method
from ragkv.model.layer_pass import append
from ragkv.recompute.samkv import SamKV
from ragkv.sparse.psa import Psa
from ragkv.timing import StepTimer
from ragkv.types import AskOptions
from tests import tiny
from tests.libraries import QUESTION, open_library

PREFIX, ASKED = tiny.tokens(3, 99), tiny.tokens(7, 50)
CHUNKS = [tiny.tokens(n, n) for n in (30, 26, 41)]
FEW = SamKV(layers=(2, 3), middle="none")
ABSENT = 5 + 4 + 8
"""Blocks of 4 tokens that are not the first or the last two of their chunks."""


def asked(decoder):
    """The talk, what a question reads in it, and the sources."""
    reader = Prefiller(tiny.model(), PREFIX)
    sources = [InMemoryChunk(reader.encode(chunk), 4, exact=i == 0) for i, chunk in enumerate(CHUNKS)]
    talk = reader.new_state()
    # No room is made for what may come, so that the cache has to grow inside a pass.
    return (
        talk,
        reader.prefill_sparse(sources, ASKED, FEW, StepTimer(), PrefillOptions(decode_policy=decoder), state=talk),
        sources,
        reader.model,
    )


def step(model, context, at, token=5):
    row = append(context.cache, [token], context.position + at, attention=context.decoding)
    return model.forward([row])[0][-1]


def test_at_the_identity_setting_everything_comes_in_the_first_step_and_is_read():
    talk, dense, sources, model = asked(None)
    absent = OffloadedBlocks(model, talk.stitch, sources, dense.plan)
    for layer in range(4):
        absent.fetch(layer, range(ABSENT))
    _, reaching, _, _ = asked(Psa(1.0, block=4, reach="all"))
    for at in range(6):
        torch.testing.assert_close(step(model, reaching, at), step(model, dense, at), rtol=0, atol=1e-10)
        assert reaching.decoding.fetched == 4 * ABSENT
    assert reaching.decoding.keys_read == reaching.decoding.keys_present
    assert reaching.cache.lengths == dense.cache.lengths


def test_a_block_that_came_is_where_a_block_that_was_kept_would_be():
    talk, few, sources, model = asked(None)
    everything = Prefiller(tiny.model(), PREFIX).prefill_sparse(
        sources, ASKED, SamKV(layers=(2, 3), middle="all"), StepTimer(), PrefillOptions(8)
    )
    absent = OffloadedBlocks(model, talk.stitch, sources, few.plan)
    for layer in range(4):
        before = few.cache.lengths[layer]
        k, v = absent.fetch(layer, (0, 3, ABSENT - 1))
        at = few.cache.positions(layer)[before:]
        assert at.tolist() == [*range(7, 11), *range(19, 23), *range(91, 95)]
        there = [everything.cache.positions(layer).tolist().index(position) for position in at.tolist()]
        torch.testing.assert_close(k, everything.cache.k(layer)[there], rtol=0, atol=1e-12)
        torch.testing.assert_close(v, everything.cache.v(layer)[there], rtol=0, atol=1e-12)
        keys, sizes = absent.keys(layer)
        assert keys.shape == (2, ABSENT - 3, 8)
        assert sizes.tolist() == [4] * (ABSENT - 3)


def test_some_come_and_stay_and_the_cache_is_read_as_if_they_had_been_there():
    _, context, _, model = asked(Psa(0.9, block=4, micro=1, reach="all"))
    counts = []
    for at in range(8):
        step(model, context, at)
        counts.append(context.decoding.fetched)
        for layer in range(4):
            positions = context.cache.positions(layer).tolist()
            assert len(set(positions)) == len(positions), "no block comes twice"
    assert counts == sorted(counts)
    assert 0 < counts[-1] < 4 * ABSENT
    assert len(context.decoding.key_counts) == 8 * 4, "every row of the answer was a step"
    assert all(int(each.read.max()) <= each.present for each in context.decoding.key_counts)


def test_without_reach_nothing_comes():
    _, context, _, model = asked(Psa(1.0, block=4))
    step(model, context, 0)
    assert (context.decoding.fetched, context.decoding.offloaded) == (0, None)


def test_a_conversation_goes_on_without_what_came_and_reads_the_answer_again():
    talk, context, _, model = asked(Psa(0.9, block=4, reach="all"))
    before, end = list(context.cache.lengths), talk.position
    for at in range(3):
        step(model, context, at)
    assert context.decoding.fetched
    talk.append_answer((5, 5, 5), (9,))
    assert talk.stitch.cache.lengths == before
    assert (talk.pending_tokens, talk.position) == ((5, 5, 5, 9), end + 4)


@pytest.mark.parametrize("spec", ["psa:reach=all,least=0,above=0", "psa:reach=all,least=0,above=0,threshold=1"])
def test_the_report_counts_blocks_that_came_back(library, spec):
    kept = library.answer(QUESTION, AskOptions(method="samkv-fusion", top_k=4, decode="psa:least=0,above=0")).report
    report = library.answer(QUESTION, AskOptions(method="samkv-fusion", top_k=4, decode=spec)).report
    assert kept.decoding.pulled == 0 < report.decoding.pulled
    assert report.bytes.loaded > kept.bytes.loaded
    assert report.tokens.kept == kept.tokens.kept
    blocks = sum(chunk.blocks for chunk in report.chunks) * library.model.shape.layers
    assert report.decoding.pulled < blocks


def test_a_store_that_fails_meanwhile_costs_an_encoding(tmp_path, model, embedder):
    with open_library(tmp_path, model, embedder, ("01",)) as engine:
        hits = prompt_order(engine.retriever.search(QUESTION, "default", 2))
        way, question = make_method("samkv-fusion:middle=none", model), model.prompt.question(QUESTION)
        said = []
        for broken in (False, True):
            sources = [engine.chunks.open(hit.chunk, "default", first=i == 0) for i, hit in enumerate(hits)]
            decoder = make_decode_policy("psa:reach=all,least=0,above=0,threshold=1", model.profile)
            context = engine.prefiller.prefill_sparse(
                sources, question, way, StepTimer(), PrefillOptions(8, decode_policy=decoder)
            )
            if broken:
                for path in (engine.settings.data / "kv").glob("*/*.kv"):
                    path.unlink()
            place = context.cache, context.logits, context.position
            said.append(list(decode(model, *place, Sampling(8), context.decoding)))
            assert context.decoding.fetched
            assert any(source.fallback for source in sources) == broken
        assert said[0] == said[1]
