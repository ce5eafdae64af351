"""The engine with memory tiers: blocks come from memory, and answers do not change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.engine.engine import Engine
from ragkv.ingest.pipeline import ingest, remove
from ragkv.model.decoder import DecoderModel
from ragkv.retrieval import Embedder
from ragkv.types import AskOptions, Document
from tests.libraries import ANSWER, QUESTION, open_copy, open_library
from tests.redis_server import redis_server

TWO = ("01", "02")
ROOM = 64 * 2**20


@pytest.fixture
def engine(two_documents: Path, tmp_path: Path, model: DecoderModel, embedder: Embedder) -> Iterator[Engine]:
    with open_copy(two_documents, tmp_path / "data", model, embedder, host_bytes=ROOM) as opened:
        yield opened


def test_the_second_question_reads_nothing_from_the_store(engine: Engine) -> None:
    first = engine.answer(QUESTION)
    for path in (engine.settings.data / "kv").glob("??/*.kv"):
        path.unlink()
    second = engine.answer(QUESTION)
    assert second.answer == first.answer == ANSWER
    chunks = first.report.cache.chunks
    hits = first.report.cache.hits
    assert hits.store > 0, "for some chunks everything was prefetched"
    assert hits.host + hits.store == chunks
    assert (second.report.cache.hits.host, second.report.cache.hits.store) == (chunks, 0)
    assert second.report.ratios.cache_hit == 1.0
    assert second.report.bytes == first.report.bytes  # loads from host memory are counted too


def test_every_method_answers_from_memory_as_from_the_store(engine: Engine) -> None:
    for method in ("reuse", "epic", "cacheblend", "multi-infllm", "samkv-fusion", "scout"):
        first, second = (engine.answer(QUESTION, AskOptions(method=method)) for _ in range(2))
        assert first.answer == second.answer
        assert second.report.cache.hits.host == second.report.cache.chunks


def test_blocks_are_prefetched_while_the_question_is_embedded(engine: Engine) -> None:
    engine.answer("Skerrow Light architect", AskOptions(max_tokens=1))
    engine.tiers.close()
    held = engine.tiers.stats()["host"]
    assert held.used > 0
    assert held.pinned == 0


def test_a_store_that_dies_does_not_affect_chunks_in_memory(
    tmp_path: Path, model: DecoderModel, embedder: Embedder
) -> None:
    with (
        redis_server() as server,
        open_library(tmp_path, model, embedder, TWO, store=server.url, host_bytes=ROOM) as engine,
    ):
        engine.answer(QUESTION)
        server.process.kill()
        server.process.wait()
        answer = engine.answer(QUESTION)
        assert answer.answer == ANSWER
        assert answer.report.cache.hits.host == answer.report.cache.chunks


def test_a_new_version_is_used_and_a_deleted_one_is_dropped(engine: Engine) -> None:
    engine.answer(QUESTION)
    used = engine.tiers.stats()["host"].used
    title = "Skerrow Light"
    ingest(engine, Document("01-skerrow-light.md", title, "The architect of the Skerrow Light was Ada Brandt."))
    assert engine.tiers.stats()["host"].used < used
    assert "Brandt" in engine.answer("Who was the architect of the Skerrow Light?", AskOptions(top_k=1)).answer
    remove(engine, "default", "01-skerrow-light.md")
    remove(engine, "default", next(d.id for d in engine.catalog.documents("default")))
    assert engine.tiers.stats()["host"].used == 0


def test_health_reports_the_pools(engine: Engine) -> None:
    engine.answer(QUESTION)
    host = engine.health()["tiers"]["host"]
    assert 0 < host["used"] <= host["slots"]
    assert host["slots"] * host["size"] <= ROOM
    assert host["pinned"] == 0
