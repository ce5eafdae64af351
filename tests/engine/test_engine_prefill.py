"""Long inputs of the engine, read sparsely: per request, at ingest, and what report and fingerprint say of it."""

from __future__ import annotations

import pytest
import torch

from ragkv.engine.policies import make_prefill_policy
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.errors import ConfigError, InputError
from ragkv.ingest.pipeline import ingest
from ragkv.timing import StepTimer
from ragkv.types import AskOptions, Document
from tests import tiny
from tests.libraries import QUESTION, open_engine, open_library
from tests.quick import quick_engine

SMALL = "segment=64,budget=128,threshold=256"
EVERYTHING = "critiprefill:segment=64,budget=8192,threshold=0"


@pytest.mark.parametrize("prefill", [EVERYTHING, "loopserve:alpha=0.99999,threshold=0", "loopserve:alpha=1"])
def test_a_policy_that_reads_everything_answers_as_dense_prefill_does(library, model, prefill):
    dense = library.answer(QUESTION, AskOptions(method="full", top_k=3))
    assert library.answer(QUESTION, AskOptions(method="full", top_k=3, prefill=prefill)).answer == dense.answer


def test_the_report_names_the_policy_that_was_at_work(library):
    def read(prefill, method="full"):
        return library.answer(
            QUESTION, AskOptions(method=method, top_k=3, max_tokens=1, prefill=prefill)
        ).report.prefill

    assert read(None) == "dense"
    assert read(f"critiprefill:{SMALL}") == "critiprefill"
    assert read("loopserve:alpha=0.9,threshold=256") == "loopserve"
    assert read("critiprefill:threshold=8000") == "dense"
    assert read("critiprefill:segment=64,budget=64", method="scout") == "critiprefill"


def test_a_long_question_is_read_sparsely_over_a_stitched_cache(model):
    reader = Prefiller(model, model.prompt.prefix)
    from ragkv.engine.memory_source import InMemoryChunk
    from ragkv.engine.registry import make_method

    chunks = [model.prompt.chunk("Ferry", "The ferry leaves at noon. " * 20) for _ in range(2)]
    sources = [InMemoryChunk(reader.encode(chunk), model.profile.block, i == 0) for i, chunk in enumerate(chunks)]
    asked = model.prompt.question("When does it leave? " + "I have read the timetable more than once. " * 40)
    way = make_method("scout", model)
    plain = reader.prefill_sparse(sources, asked, way, StepTimer(), PrefillOptions(1))
    exact = reader.prefill_sparse(
        sources,
        asked,
        way,
        StepTimer(),
        PrefillOptions(1, prefill_policy=make_prefill_policy(EVERYTHING, model.profile)),
    )
    torch.testing.assert_close(exact.logits, plain.logits, rtol=1e-4, atol=1e-4)
    little = reader.prefill_sparse(
        sources,
        asked,
        way,
        StepTimer(),
        PrefillOptions(
            1, prefill_policy=make_prefill_policy("critiprefill:segment=32,budget=32,threshold=0", model.profile)
        ),
    )
    assert little.sparse is not None
    assert little.sparse.selected
    assert little.sparse.computed_pairs < little.sparse.dense_pairs


def test_chunks_read_sparsely_at_ingest_have_their_own_fingerprint(tmp_path, model, embedder):
    way = "critiprefill:segment=32,budget=32,threshold=64"
    with open_library(tmp_path, model, embedder, ("01",)) as dense:
        prints = {dense.fingerprint}
        chunk = next(dense.catalog.chunks_of("default", d.id) for d in dense.catalog.documents("default"))[0]
        exact = dense.prefiller.encode(chunk.tokens)
    with open_engine(tmp_path, model, embedder, ingest_prefill=way) as sparse:
        prints.add(sparse.fingerprint)
        report = sparse.answer(QUESTION, AskOptions(top_k=1, max_tokens=1)).report
        assert report.cache.misses == report.cache.chunks == 1, "what was read densely is not taken for it"
        read = sparse.prefiller.encode(chunk.tokens)
    with open_engine(tmp_path, model, embedder, ingest_prefill=way.replace("32,", "16,", 1)) as other:
        prints.add(other.fingerprint)
    assert len(prints) == 3
    assert torch.equal(read.k[:2], exact.k[:2]), "the first layer is read densely"
    assert not torch.equal(read.k[2:], exact.k[2:])


def test_a_long_chunk_is_encoded_under_the_ingest_policy_whatever_its_size():
    model, chunk = tiny.model(layers=4), tiny.tokens(300, 3)
    exact = Prefiller(model, tiny.tokens(3)).encode(chunk)
    policy = make_prefill_policy("critiprefill:segment=32,block=8,budget=32", model.profile)
    found = Prefiller(model, tiny.tokens(3), ingest_policy=policy).encode(chunk)
    assert torch.equal(found.k[:2], exact.k[:2]), "the first layer is read densely"
    assert torch.equal(found.k[:, :32], exact.k[:, :32]), "the first segment has nothing before it but the prefix"
    assert not torch.allclose(found.k[2:], exact.k[2:])
    whole = make_prefill_policy("critiprefill:segment=32,block=8,budget=512", model.profile)
    same = Prefiller(model, tiny.tokens(3), ingest_policy=whole).encode(chunk)
    torch.testing.assert_close(same.k, exact.k, rtol=0, atol=1e-9)


def test_a_chunk_that_misses_is_encoded_as_at_ingest_and_stored(tmp_path):
    with quick_engine(tmp_path) as engine:
        text = " ".join(f"The harbour master kept lantern {number} of the north pier." for number in range(12))
        ingest(engine, Document("a", "Pier", text))
        chunks = [hit.chunk for hit in engine.retriever.search("Who kept it?", "default", 9)]
        for chunk in chunks:
            engine.store.delete(engine.key(chunk, "default"))
        options = AskOptions(method="reuse", prefill="critiprefill:segment=16,block=8,budget=8,skip=0")
        missed, found = (engine.answer("Who kept it?", options).report for _ in range(2))
        assert missed.cache.misses == missed.cache.chunks > 1
        assert found.cache.misses == 0
        assert missed.prefill == found.prefill == "critiprefill"
        assert missed.prefilling == found.prefilling


@pytest.mark.parametrize("name", ["prefill", "ingest_prefill"])
def test_a_setting_that_means_nothing_is_told_at_start(tmp_path, name):
    with pytest.raises(ConfigError, match=f"RAGKV_{name.upper()}: prefill policy 'quick' does not exist"):
        quick_engine(tmp_path, **{name: "quick"})


def test_an_unknown_policy_is_told(library):
    with pytest.raises(InputError, match="prefill policy 'quick' does not exist"):
        library.answer(QUESTION, AskOptions(prefill="quick"))
