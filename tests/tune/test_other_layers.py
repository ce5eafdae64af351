"""Rows of models with wrapper tokens, windows, sinks and multipliers compute what the service computes."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ragkv.errors import ModelUnsupported
from ragkv.model.checkpoint import load_checkpoint
from ragkv.model.decoder import DecoderModel
from ragkv.model.source import ModelSource
from ragkv.model.wrapper import EVERY_COLLECTION, Wrapper, save_wrapper
from ragkv.tune.adapters import WrappedModel, new_wrapper, save_adapter
from ragkv.tune.contexts import Context
from ragkv.tune.masks import RowBatch, full_mask, stored_mask, unwrapped
from ragkv.tune.options import TuneOptions
from ragkv.tune.rows import DropParams
from ragkv.tune.run import check_trainable
from ragkv.tune.student import Student
from ragkv.tune.training import with_adapter
from tests import families
from tests.quick import TINY
from tests.tune.test_rows import ASKED, CHUNKS, batch, expected, firsts, maker
from tests.tune.tiny_folder import tiny_folder

KINDS = ("gemma2", "gemma3_text", "gemma4_small", "gpt_oss", "olmo3", "granite", "phi3", "mistral", "qwen3_moe")


def family_folder(name: str, folder: Path) -> Path:
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    size = {"vocab_size": len(tokenizer)}
    if name == "gemma4_small":
        size["vocab_size_per_layer_input"] = len(tokenizer)
    families.weights(name, **size, max_position_embeddings=1024).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def row_logits(student: Student, rows: RowBatch, mask: Tensor) -> Tensor:
    with torch.inference_mode():
        return student._logits(rows, [mask])[0]


def random_wrapper(folder: Path, hidden: int, base: str, seed: int = 0) -> Path:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, hidden, generator=draw)
    save_wrapper(Wrapper(rows[:3].clone(), rows[3:].clone(), "", base), folder)
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_the_engines_full_prefill_and_reuse(name: str, tmp_path: Path) -> None:
    folder = family_folder(name, tmp_path)
    model = DecoderModel.load(str(folder), "cpu", "float32")
    made = maker(model, DropParams(reuse=1.0)).row(Context(CHUNKS, ASKED), 512, Random(0))
    rows, weights = batch(made), load_checkpoint(str(folder), "cpu", "float32", None).weights
    if name == "gemma4_small":
        adapted = with_adapter(weights, TuneOptions(), None, None)
        with pytest.raises(ModelUnsupported, match="wrapper tokens have none"):
            _nothing(weights)
    else:
        adapted = with_adapter(weights, TuneOptions(kind="wrapper"), None, _nothing(weights))
    student = Student(adapted, TuneOptions())
    for method, mask in (("full", full_mask(rows)), ("reuse", stored_mask(rows))):
        mine = row_logits(student, rows, mask)[firsts(made)]
        torch.testing.assert_close(mine, expected(model, method)[0], rtol=1e-3, atol=1e-3)


def _nothing(weights: Any) -> Wrapper:
    return new_wrapper(weights, TuneOptions(front=1, back=1), "")


def test_layers_with_a_state_cannot_be_tuned() -> None:
    config = transformers.AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
    with pytest.raises(ModelUnsupported, match="some of its layers have a state"):
        check_trainable(config)


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tiny_folder(tmp_path_factory.mktemp("model"))
    found = load_checkpoint(str(folder), "cpu", "float32", None)
    hidden = found.weights.config.hidden_size
    return folder, random_wrapper(tmp_path_factory.mktemp("wrapper"), hidden, found.weights_hash)


def load(folder: Path, wrapper: Path) -> DecoderModel:
    source = ModelSource(str(folder), wrappers=((EVERY_COLLECTION, str(wrapper)),))
    return DecoderModel.load(source, "cpu", "float32")


@pytest.mark.parametrize("method", ["full", "reuse"])
def test_rows_with_wrapper_tokens_are_what_the_engine_computes(wrapped: tuple[Path, Path], method: str) -> None:
    model = load(*wrapped)
    made = maker(model, DropParams(reuse=1.0)).row(Context(CHUNKS, ASKED), 512, Random(0))
    rows = batch(made)
    weights = load_checkpoint(str(wrapped[0]), "cpu", "float32", None).weights
    wrapper = model.prompt.wrapper
    assert wrapper is not None
    student = Student(WrappedModel(weights, wrapper), TuneOptions(kind="wrapper"))
    mask = full_mask(rows) if method == "full" else stored_mask(rows)
    mine = row_logits(student, rows, mask)[firsts(made)]
    torch.testing.assert_close(mine, expected(model, method)[0], rtol=0, atol=2e-4)
    plain = expected(DecoderModel.load(str(wrapped[0]), "cpu", "float32"), method)[0]
    assert (mine - plain).abs().max() > 0.01, "wrapper tokens matter"


def test_rows_without_their_wrapper_tokens_are_the_model_as_it_was(wrapped: tuple[Path, Path]) -> None:
    model = load(*wrapped)
    made = maker(model, DropParams(reuse=1.0)).row(Context(CHUNKS, ASKED), 512, Random(0))
    rows = unwrapped(batch(made))
    weights = load_checkpoint(str(wrapped[0]), "cpu", "float32", None).weights
    assert model.prompt.wrapper is not None
    student = Student(WrappedModel(weights, model.prompt.wrapper), TuneOptions(kind="wrapper"))
    mine = row_logits(student, rows, full_mask(rows))[firsts(made)]
    plain = DecoderModel.load(str(wrapped[0]), "cpu", "float32")
    torch.testing.assert_close(mine, expected(plain, "full")[0], rtol=0, atol=2e-4)


def test_what_is_trained_is_what_is_loaded(wrapped: tuple[Path, Path], tmp_path: Path) -> None:
    loaded = load_checkpoint(str(wrapped[0]), "cpu", "float32", None)
    wrapper = new_wrapper(loaded.weights, TuneOptions(front=2, back=3), loaded.weights_hash)
    model = WrappedModel(loaded.weights, wrapper)
    with torch.no_grad():
        model.rows += torch.randn(model.rows.shape)
    save_adapter(model, tmp_path, loaded.weights_hash)
    found = load(wrapped[0], tmp_path).prompt.wrapper
    assert found is not None
    torch.testing.assert_close(torch.cat([found.front, found.back]), model.rows.detach())
    assert (len(found.front), len(found.back)) == (2, 3)
