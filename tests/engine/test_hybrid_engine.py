"""A model with states through the whole engine: ingest stores them, a question loads those of one chunk, and faults of
the store cost an encoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from ragkv.engine.engine import Engine
from ragkv.errors import InputError
from ragkv.ingest.pipeline import ingest
from ragkv.model.decoder import DecoderModel
from ragkv.types import AskOptions, Document
from tests import families
from tests.hybrids import HYBRIDS
from tests.libraries import open_copy, open_engine

TOPICS = ("harbour", "lamp", "bridge", "mill")
NAME = "qwen3_5_text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_folder) -> Path:
    made = tmp_path_factory.mktemp("hybrid")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    fields = {**HYBRIDS[NAME], "num_hidden_layers": 4, "vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    families.weights(NAME, **fields).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def model(folder) -> DecoderModel:
    return DecoderModel.load(str(folder), "cpu", "float32")


@pytest.fixture(scope="module")
def filled(model, tmp_path_factory, embedder) -> Path:
    data = tmp_path_factory.mktemp("filled")
    with open_engine(data, model, embedder) as opened:
        for topic in TOPICS:
            ingest(opened, Document(topic, topic.title(), f"The {topic} of Tarn was built by Ada Brook in 1889. " * 4))
    return data


@pytest.fixture
def engine(filled, model, tmp_path, embedder):
    with open_copy(filled, tmp_path / "data", model, embedder) as opened:
        yield opened


def ask(engine: Engine, question: str = "Who built the lamp?", **options):
    return engine.answer(question, AskOptions(max_tokens=4, **options))


def test_a_question_loads_the_states_of_the_last_chunk_and_the_report_counts_them(engine, model):
    for method in ("scout", "reuse", "samkv-fusion"):
        report = ask(engine, method=method).report
        assert report.cache.misses == 0
        assert report.bytes.states == model.states.bytes > 0
        assert report.tokens.recomputed == 0
    assert ask(engine, method="full").report.bytes.states == 0


def test_states_are_composed_where_that_is_asked_for_and_the_report_says_what_it_cost(engine):
    for method in ("reuse", "scout", "samkv-fusion", "random"):
        last, composed = ask(engine, method=method), ask(engine, method=f"{method}:states=composed")
        assert composed.report.method == f"{method}:states=composed"
        assert composed.report.bytes.states == 0, "nothing is stored for it"
        assert composed.report.tokens.recomputed == 0
        assert composed.report.tokens.prefilled == last.report.tokens.prefilled + last.report.tokens.context
    assert ask(engine, method="reuse:states=last").report.bytes.states > 0


def test_a_conversation_composes_the_chunks_of_each_turn(engine):
    options = {"conversation": "b", "top_k": 1, "method": "reuse:states=composed"}
    first, second, third = (ask(engine, f"Who built the {topic}?", **options) for topic in ("lamp", "mill", "mill"))
    chunks = [sum(chunk.tokens for chunk in each.report.chunks) for each in (first, second)]
    assert first.report.tokens.prefilled > chunks[0]
    assert second.report.tokens.prefilled > chunks[1] - chunks[0]
    assert third.report.tokens.prefilled < chunks[1] - chunks[0], "no new chunk: nothing to compose"
    engine.sessions.forget_states()
    replayed = ask(engine, "Who built the bridge?", **options)
    assert replayed.report.tokens.prefilled > sum(chunk.tokens for chunk in replayed.report.chunks)


def test_the_best_chunk_stands_last(engine):
    report = ask(engine, method="reuse").report
    assert report.cache.chunks == len(TOPICS)
    assert report.chunks[-1].document_id == "lamp"


@pytest.mark.parametrize("change", ["flip", "cut"])
def test_states_that_are_damaged_or_cut_cost_an_encoding_and_the_answer_stays(engine, change):
    expected = ask(engine, method="reuse")
    (chunk,) = engine.catalog.chunks_of("default", expected.report.chunks[-1].document_id)
    key = engine.chunks.store("default").key(chunk.tokens)
    (path,) = (each for each in (engine.settings.data / "kv").rglob("*") if each.name.startswith(key))
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data if change == "flip" else data[:-9])
    found = ask(engine, method="reuse")
    assert found.answer == expected.answer
    assert [each.reason for each in found.report.cache.fallbacks] == ["corrupt"]
    again = ask(engine, method="reuse")
    assert (again.answer, again.report.cache.misses) == (expected.answer, 0)


def test_a_conversation_goes_on_with_and_without_new_chunks(engine):
    first = ask(engine, "Who built the lamp?", conversation="a", top_k=1)
    second = ask(engine, "Who built the mill?", conversation="a", top_k=1)
    third = ask(engine, "Who built the mill?", conversation="a", top_k=1)
    assert (first.report.bytes.states > 0, second.report.bytes.states > 0) == (True, True)
    assert third.report.bytes.states == 0, "no new chunk: the session has them"
    engine.sessions.forget_states()
    replayed = ask(engine, "Who built the bridge?", conversation="a", top_k=1)
    assert replayed.report.tokens.prefilled > 0


def test_what_recomputes_tokens_is_refused_with_what_to_ask_for(engine):
    with pytest.raises(InputError, match="cacheblend recomputes tokens"):
        ask(engine, method="cacheblend")
    with pytest.raises(InputError, match="cacheblend recomputes tokens"):
        ask(engine, method="cacheblend:states=composed")


def test_answers_are_decoded_a_token_a_step_and_the_report_says_why(engine):
    report = ask(engine, speculation=True).report
    assert report.decoding.speculation.why_none == "the model's layers with a state decode one token a step"


def test_a_prefix_that_was_read_before_is_read_again(engine):
    first, second = (ask(engine, method="full:prefix=true") for _ in range(2))
    assert first.answer == second.answer
    assert second.report.tokens.prefilled == first.report.tokens.prefilled
