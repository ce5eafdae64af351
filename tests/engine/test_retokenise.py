"""A data folder that outlives its model: chunks that another tokenizer read are read again from their texts."""

from __future__ import annotations

from pathlib import Path

from ragkv.ingest.pipeline import ingest, reindex
from ragkv.model.decoder import DecoderModel
from ragkv.types import AskOptions, Document
from tests import written_gguf
from tests.ingest.reader import WordEmbedder
from tests.libraries import open_engine
from tests.quick import quick_model
from tests.written_gguf import write_gguf

TEXT = " ".join(f"The harbour of Tarn number {number} was built in {1700 + number}." for number in range(9))
REUSE = AskOptions(method="reuse", max_tokens=1)


def test_a_model_with_another_tokenizer_reads_the_text_and_not_the_old_ids(tmp_path: Path) -> None:
    with open_engine(tmp_path / "data", quick_model(), WordEmbedder()) as engine:
        ingest(engine, Document("tarn", "Tarn", TEXT))
        old = [chunk.tokens for chunk in engine.catalog.chunks_of("default", "tarn")]
    path = write_gguf(tmp_path / "a.gguf", written_gguf.weights("llama", max_positions=4096), "llama")
    model = DecoderModel.load(str(path), "cpu", cache=tmp_path / "cache")
    assert max(map(max, old)) >= len(written_gguf.vocabulary()), "the ids mean nothing to the other model"
    with open_engine(tmp_path / "data", model, WordEmbedder()) as engine:
        request = engine.prefill("When was the harbour built?", REUSE)
        for hit in request.hits:
            assert hit.chunk.tokens == model.prompt.chunk(hit.chunk.title, hit.chunk.text)
        first, second = (engine.answer("When was it built?", REUSE).report.cache for _ in range(2))
        assert first.chunks == len(old)
        assert (second.hits.store, second.misses) == (len(old), 0), "what a question encoded is found by the next"
        reindex(engine)
        cache = engine.answer("When was it built?", REUSE).report.cache
        assert cache.hits.store == cache.chunks > 0


def test_the_model_that_ingested_them_takes_the_stored_ids(tmp_path: Path) -> None:
    with open_engine(tmp_path / "data", quick_model(), WordEmbedder()) as engine:
        ingest(engine, Document("tarn", "Tarn", TEXT))
        hits = engine.prefill("When was it built?", REUSE).hits
        stored = {chunk.id: chunk.tokens for chunk in engine.catalog.chunks_of("default", "tarn")}
        assert {hit.chunk.id: hit.chunk.tokens for hit in hits} == stored


def test_a_conversation_goes_on_with_another_model(tmp_path: Path) -> None:
    talk = AskOptions(method="reuse", max_tokens=2, conversation="yard")
    with open_engine(tmp_path / "data", quick_model(), WordEmbedder()) as engine:
        ingest(engine, Document("tarn", "Tarn", TEXT))
        engine.answer("When was the harbour built?", talk)
    path = write_gguf(tmp_path / "a.gguf", written_gguf.weights("llama", max_positions=4096), "llama")
    model = DecoderModel.load(str(path), "cpu", cache=tmp_path / "cache")
    with open_engine(tmp_path / "data", model, WordEmbedder()) as engine:
        assert engine.answer("And where is it?", talk).report.tokens.generated >= 1
