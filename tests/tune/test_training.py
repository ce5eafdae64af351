"""A training run lowers its loss, resumes where it stopped, and writes what the model loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from peft.tuners.lora import Linear
from safetensors.torch import load_file

from ragkv.model.checkpoint import load_checkpoint
from ragkv.model.prompt import Prompt
from ragkv.tune.adapters import PROJECTIONS
from ragkv.tune.contexts import Context, ProseSource, Source
from ragkv.tune.masks import RowBatch, full_mask, stored_mask
from ragkv.tune.merged import MergedLora
from ragkv.tune.options import TuneOptions
from ragkv.tune.rows import DropParams, RowMaker
from ragkv.tune.student import Student, answer_loss, distillation_loss
from ragkv.tune.training import RowBatches, TunedAdapter, train, with_adapter
from tests.tune.tiny_folder import passages, tiny_folder

OPTIONS = TuneOptions(
    steps=4, rows_tokens=512, accumulate=1, lengths=((256, 1.0),), rank=4, rate=5e-3, warmup=1, save_every=2
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def run(
    folder: Path, out: Path, options: TuneOptions, around: Callable[[Source], Source] = lambda source: source
) -> tuple[TunedAdapter, list[str]]:
    loaded, said = load_checkpoint(str(folder), "cpu", "float32", None), list[str]()
    maker = RowMaker(
        loaded.tokenizer, Prompt(loaded.tokenizer, loaded.profile), 8, loaded.tokenizer.eos_token_id, options.drop
    )
    source = around(ProseSource(passages(24), maker.chunk_tokens))
    batches = RowBatches(source, maker, options, options.steps * options.accumulate)
    return train(with_adapter(loaded.weights, options, None), batches, options, out, said.append), said


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


class Repeating:
    """The same context again and again: random weights learn nothing that holds for another."""

    def __init__(self, source: Source):
        self._context = source.context(Random(0), 256)

    def context(self, rng: Random, tokens: int) -> Context:
        return self._context


@pytest.mark.parametrize(("teacher", "answers"), [("base", 0.0), ("self", 1.0), ("gold", 0.0)])
def test_the_loss_falls(folder: Path, tmp_path: Path, teacher: str, answers: float) -> None:
    options = replace(OPTIONS, steps=20, rate=3e-3, teacher=teacher, answers=answers, drop=DropParams(reuse=1.0))
    done, _ = run(folder, tmp_path, options, Repeating)
    losses = [loss for _, loss in done.losses]
    assert losses[-1] < 0.6 * losses[0]
    assert done.tokens == 20 * 512


@pytest.mark.parametrize(("stored", "mask"), [(True, stored_mask), (False, full_mask)])
def test_gold_answers_are_learned_under_the_mask_that_the_batch_names(
    folder: Path, stored: bool, mask: Callable[[RowBatch], torch.Tensor]
) -> None:
    loaded = load_checkpoint(str(folder), "cpu", "float32", None)
    maker = RowMaker(loaded.tokenizer, Prompt(loaded.tokenizer, loaded.profile), 8, loaded.tokenizer.eos_token_id)
    found = RowBatches(ProseSource(passages(24), maker.chunk_tokens), maker, OPTIONS, 1)[0]
    student = Student(with_adapter(loaded.weights, OPTIONS, None), replace(OPTIONS, teacher="gold"))
    ids, positions, kinds, parts, blocks = found["columns"].unbind(1)
    batch = RowBatch(ids, positions, kinds, parts, blocks, found["targets"], found["kept"])
    expected = answer_loss(student._logits(batch, [mask(batch)])[0], ids.roll(-1, 1)[batch.targets])
    other = answer_loss(student._logits(batch, [full_mask(batch)])[0], ids.roll(-1, 1)[batch.targets])
    loss = student(**{**found, "stored": torch.tensor(stored)})["loss"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert stored == (abs(loss.item() - other.item()) > 1e-6)


def test_the_loss_is_the_weighted_sum_of_what_is_learned(folder: Path) -> None:
    loaded = load_checkpoint(str(folder), "cpu", "float32", None)
    maker = RowMaker(loaded.tokenizer, Prompt(loaded.tokenizer, loaded.profile), 8, loaded.tokenizer.eos_token_id)
    found = RowBatches(ProseSource(passages(24), maker.chunk_tokens), maker, OPTIONS, 1)[0]
    adapter = with_adapter(loaded.weights, OPTIONS, None)
    parts = Student(adapter, replace(OPTIONS, teacher="self", answers=0.5, distilled=3.0))(**found)
    assert parts["distillation"] > 0
    assert parts["loss"].item() == pytest.approx(0.5 * parts["answers"].item() + 3 * parts["distillation"].item())


def test_a_stopped_run_goes_on_where_it_stopped(folder: Path, tmp_path: Path) -> None:
    whole, _ = run(folder, tmp_path / "whole", OPTIONS)
    # The same run, killed after its first checkpoint.
    with pytest.raises(KeyboardInterrupt):
        run_until(folder, tmp_path / "again", 3)
    assert not (tmp_path / "again" / "adapter_model.safetensors").exists()
    again, said = run(folder, tmp_path / "again", OPTIONS)
    assert any("checkpoint-2" in line for line in said)
    assert again.steps == whole.steps == 4
    first, second = tensors(tmp_path / "whole"), tensors(tmp_path / "again")
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-4, atol=1e-6)


def run_until(folder: Path, out: Path, line: int) -> None:
    """Run, and interrupt the run at a line of its log."""
    loaded, said = load_checkpoint(str(folder), "cpu", "float32", None), list[str]()
    prompt = Prompt(loaded.tokenizer, loaded.profile)
    maker = RowMaker(loaded.tokenizer, prompt, 8, loaded.tokenizer.eos_token_id, OPTIONS.drop)
    batches = RowBatches(ProseSource(passages(24), maker.chunk_tokens), maker, OPTIONS, 4)

    def say(text: str) -> None:
        said.append(text)
        if len(said) == line:
            raise KeyboardInterrupt

    train(with_adapter(loaded.weights, OPTIONS, None), batches, OPTIONS, out, say)


def test_only_the_adapter_is_trained(folder: Path, tmp_path: Path) -> None:
    loaded = load_checkpoint(str(folder), "cpu", "float32", None)
    before = {name: value.clone() for name, value in loaded.weights.state_dict().items()}
    run(folder, tmp_path, OPTIONS)
    after = load_checkpoint(str(folder), "cpu", "float32", None).weights.state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert all(".lora_" in name for name in tensors(tmp_path))
    assert {value.shape[0] if ".lora_A." in name else value.shape[1] for name, value in tensors(tmp_path).items()} == {
        4
    }


def test_a_new_adapter_changes_nothing(folder: Path) -> None:
    loaded = load_checkpoint(str(folder), "cpu", "float32", None)
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        before = loaded.weights(ids).logits
        after = with_adapter(loaded.weights, OPTIONS, None)(ids).logits
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_run_ends_when_its_time_is_over(folder: Path, tmp_path: Path) -> None:
    done, _ = run(folder, tmp_path, replace(OPTIONS, steps=10_000, seconds=1e-3, save_every=10_000))
    assert 1 <= done.steps < 10


def test_batches_depend_on_seed_and_number_alone(folder: Path) -> None:
    loaded = load_checkpoint(str(folder), "cpu", "float32", None)
    prompt = Prompt(loaded.tokenizer, loaded.profile)

    def batch(number: int, seed: int = 0) -> RowBatch:
        maker = RowMaker(loaded.tokenizer, prompt, 8, loaded.tokenizer.eos_token_id)
        source = ProseSource(passages(24), maker.chunk_tokens)
        found = RowBatches(source, maker, replace(OPTIONS, seed=seed), 9)[number]
        return RowBatch(*found["columns"].unbind(1), found["targets"], found["kept"])

    assert torch.equal(batch(1).ids, batch(1).ids)
    assert torch.equal(batch(1).kept, batch(1).kept)
    assert not torch.equal(batch(1).ids, batch(2).ids)
    assert not torch.equal(batch(1).ids, batch(1, seed=5).ids)


def test_distillation_is_zero_for_equals_and_kl_for_others() -> None:
    teacher, student = (
        torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]),
        torch.tensor([[0.0, 1.0, 1.0], [3.0, 1.0, 0.0]]),
    )
    assert distillation_loss(teacher, teacher).item() == pytest.approx(0, abs=1e-7)
    p, q = teacher.softmax(-1), student.softmax(-1)
    expected = sum((p * (p / q).log()).sum(-1)) / 2
    assert distillation_loss(student, teacher).item() == pytest.approx(expected.item(), rel=1e-5)
    assert distillation_loss(teacher[:0], teacher[:0]).item() == 0
    assert answer_loss(teacher, torch.tensor([2, 0])).item() == pytest.approx(
        -(p[0, 2].log() + p[1, 0].log()).item() / 2, rel=1e-5
    )


def test_a_merged_layer_computes_what_pefts_own_layer_does(folder: Path) -> None:
    model = with_adapter(load_checkpoint(str(folder), "cpu", "float32", None).weights, OPTIONS, None)
    layers = [layer for layer in model.modules() if isinstance(layer, MergedLora)]
    assert len(layers) == 2 * len(PROJECTIONS)
    for layer in layers:
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    layer = layers[0]
    x = torch.randn(3, 5, layer.in_features, generator=torch.Generator().manual_seed(0))
    expected = Linear.forward(layer, x)
    assert torch.allclose(layer(x), expected, atol=1e-5)
    assert not torch.allclose(layer(x), layer.base_layer(x), atol=1e-3)
    with model.disable_adapter():
        assert torch.equal(layer(x), layer.base_layer(x))
    layer(x).sum().backward()
    assert layer.lora_A["default"].weight.grad.abs().sum() > 0
    assert layer.base_layer.weight.grad is None
