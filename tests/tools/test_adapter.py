"""The tools that make the default model's adapter: the generator as a source, and the table of a measurement."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragkv.model.decoder import DecoderModel
from tools.adapter.average import average
from tools.adapter.generator import GeneratorSource
from tools.adapter.measure import figures, question_sets
from tools.adapter.paraphrase import ParaphrasedSource, Paraphraser
from tools.adapter.recipe import GENERATOR_SHARE, OPTIONS
from tools.demo_model.rows import RowMaker
from tools.demo_model.shape import Shape


@pytest.mark.parametrize("seed", [0, 1])
def test_the_generators_contexts_hold_their_answers(model: DecoderModel, seed: int) -> None:
    shape = Shape()
    source = GeneratorSource(RowMaker(model.tokenizer, model.prompt, shape), shape)
    found = source.context(Random(seed), 1024)
    assert found.asked
    for asked in found.asked:
        if asked.chunk >= 0:
            assert asked.answer in found.chunks[asked.chunk][1]
    assert source.context(Random(seed), 1024) == found


def test_the_recipe_learns_answers_and_stored_kv_together() -> None:
    assert (OPTIONS.teacher, OPTIONS.answers, OPTIONS.stored) == ("self", 1.0, 1.0)
    assert 0 < GENERATOR_SHARE < 1


SYNONYMS = {
    "noun": {"city": ["metropolis"]},
    "verb": {"establish": ["found"], "write": ["pen"]},
    "adjective": {"famous": ["celebrated"]},
}


def test_a_paraphrase_replaces_words_in_all_their_forms() -> None:
    paraphraser = Paraphraser(SYNONYMS)
    seen = {paraphraser.paraphrase(Random(seed), "Who established famous cities?") for seed in range(60)}
    assert "Who founded celebrated metropolises?" in seen
    assert "Who established famous cities?" in seen


def test_a_paraphrase_keeps_names_and_quotations() -> None:
    paraphraser = Paraphraser(SYNONYMS)
    question = 'Who said "write a famous city" in Famous City?'
    assert {paraphraser.paraphrase(Random(seed), question) for seed in range(20)} == {question}


def test_paraphrased_contexts_keep_their_chunks_and_answers(model: DecoderModel) -> None:
    shape = Shape()
    source = GeneratorSource(RowMaker(model.tokenizer, model.prompt, shape), shape)
    plain = source.context(Random(3), 1024)
    found = ParaphrasedSource(source, Paraphraser(SYNONYMS)).context(Random(3), 1024)
    assert found.chunks == plain.chunks
    assert [each.answer for each in found.asked] == [each.answer for each in plain.asked]


def test_a_table_has_a_line_per_set_and_method() -> None:
    def row(method: str, number: int, answer: str, em: float, gold: str = "Tarn") -> dict[str, object]:
        fixed = {"set": "s", "kind": "", "q": "?", "recall": 1.0, "sequence": 0.5, "recompute": 0.0}
        return {**fixed, "at": [number, 0], "method": method, "a": [gold], "answer": answer, "em": em, "f1": em}

    rows = [
        row("full", 0, "Tarn", 1.0),
        row("full", 1, "unknown", 1.0, "unknown"),
        row("reuse", 0, "unknown", 0.0),
        row("reuse", 1, "unknown", 1.0, "unknown"),
    ]
    full, reuse = figures(rows)
    assert "n    2 EM 1.000" in full
    assert "d +0.000" in full
    assert "EM 0.500" in reuse
    assert "d -0.500 [-1.000 +0.000]" in reuse
    assert "false-unknown 1.000 none 1.000 some 0.000" in reuse


def test_the_development_set_is_not_the_natural_one(model: DecoderModel) -> None:
    dev = {question.text for each in question_sets("dev:8", model) for question in each.questions}
    natural = {question.text for each in question_sets("natural:8", model) for question in each.questions}
    assert len(dev) == 110
    assert not dev & natural


def test_an_average_lies_between_its_adapters(tmp_path: Path) -> None:
    for name, value in (("first", 1.0), ("second", 3.0), ("other", 1.0)):
        (tmp_path / name).mkdir()
        shape = (4, 2) if name == "other" else (2, 4)
        save_file({"lora_A": torch.full(shape, value)}, tmp_path / name / "adapter_model.safetensors")
        (tmp_path / name / "adapter_config.json").write_text(f'{{"from": "{name}"}}', encoding="utf-8")
    average(tmp_path / "first", tmp_path / "second", 0.25, tmp_path / "out")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")["lora_A"]
    assert torch.equal(found, torch.full((2, 4), 1.5, dtype=torch.bfloat16))
    assert "second" in (tmp_path / "out" / "adapter_config.json").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="different tensors"):
        average(tmp_path / "first", tmp_path / "other", 0.5, tmp_path / "out")
