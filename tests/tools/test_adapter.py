"""The tools that make the default model's adapter: the generator as a source, and the table of a measurement."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragkv.ingest.loader import load
from ragkv.model.decoder import DecoderModel
from ragkv.types import Document
from tools.adapter.average import average
from tools.adapter.generator import GeneratorSource
from tools.adapter.measure import figures, question_sets, write_documents
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


def write_adapter(folder: Path, seed: int, rank: int = 2, name: str = "q") -> dict[str, torch.Tensor]:
    """Write random factors of one matrix [6, 5]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"{name}.lora_A.weight": (rank, 5), f"{name}.lora_B.weight": (6, rank)}
    factors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"seed": {seed}}}', encoding="utf-8")
    return factors


def change(factors: dict[str, torch.Tensor]) -> torch.Tensor:
    return factors["q.lora_B.weight"].float() @ factors["q.lora_A.weight"].float()


def test_an_average_is_that_of_the_weights_changes(tmp_path: Path) -> None:
    first, second = (write_adapter(tmp_path / str(seed), seed) for seed in (1, 2))
    kept = average(tmp_path / "1", tmp_path / "2", 0.25, tmp_path / "out")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    mean = 0.75 * change(first) + 0.25 * change(second)
    u, s, v = torch.linalg.svd(mean)
    best = u[:, :2] * s[:2] @ v[:2]
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in first.items()}
    torch.testing.assert_close(change(found), best, rtol=0.02, atol=0.02)
    assert kept == pytest.approx(float(s[:2].square().sum() / s.square().sum()), abs=1e-4)
    assert 0.5 < kept < 1
    assert "1" in (tmp_path / "out" / "adapter_config.json").read_text(encoding="utf-8")


def test_an_adapter_averaged_with_other_factors_of_itself_is_itself(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "1", 1)
    (tmp_path / "2").mkdir()
    turned = {"q.lora_A.weight": -2 * first["q.lora_A.weight"], "q.lora_B.weight": -0.5 * first["q.lora_B.weight"]}
    save_file(turned, tmp_path / "2" / "adapter_model.safetensors")
    assert average(tmp_path / "1", tmp_path / "2", 0.5, tmp_path / "out") == pytest.approx(1)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    torch.testing.assert_close(change(found), change(first), rtol=0.02, atol=0.02)


def test_adapters_of_other_matrices_are_not_averaged(tmp_path: Path) -> None:
    write_adapter(tmp_path / "1", 1)
    write_adapter(tmp_path / "2", 2, name="k")
    with pytest.raises(ValueError, match="different matrices"):
        average(tmp_path / "1", tmp_path / "2", 0.5, tmp_path / "out")


def test_the_development_documents_can_be_ingested(tmp_path: Path) -> None:
    write_documents(tmp_path / "dev.jsonl")
    documents = list(load([tmp_path / "dev.jsonl"], 10**6))
    assert len(documents) == 16
    assert all(isinstance(each, Document) and each.title for each in documents)
