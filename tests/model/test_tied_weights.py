"""Embeddings that a GGUF file holds twice are one matrix in memory and on disk; two matrices stay two."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open

from ragkv.model.checkpoint import load_checkpoint
from ragkv.model.gguf import open_gguf, parameters
from tests import written_gguf
from tests.written_gguf import write_gguf

Q4, Q5, Q8 = (gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q5_0", "Q8_0"))


def written(folder: Path, model, *, embeddings, output) -> Path:
    """A file whose two matrices have these types: as llama.cpp writes tied embeddings, or another output layer."""
    path = folder / "a.gguf"
    matrices = {"token_embd.weight": model.model.embed_tokens.weight, "output.weight": model.lm_head.weight}
    changed = {name: rows.detach().numpy() for name, rows in matrices.items()}
    model.config.tie_word_embeddings = False
    types = {"token_embd.weight": embeddings, "output.weight": output}
    return write_gguf(path, model, "qwen2", changed=changed, types=types)


def loaded(path: Path, cache: Path):
    return load_checkpoint(str(path), "cpu", "float32", None, cache).weights


def tied():
    model = written_gguf.weights("qwen2")
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


@pytest.mark.parametrize(
    ("embeddings", "output", "kept"), [(Q5, Q8, Q8), (Q4, Q8, Q8), (Q8, Q4, Q8), (Q8, None, None), (Q8, Q8, Q8)]
)
def test_a_second_copy_of_the_embeddings_is_left_out_and_the_finer_one_stays(tmp_path, embeddings, output, kept):
    model = tied()
    path = written(tmp_path, model, embeddings=embeddings, output=output)
    shared = loaded(path, tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert list(file.keys()).count("lm_head.weight") == 0
        got = file.get_tensor("model.embed_tokens.weight").float()
    rows = model.model.embed_tokens.weight.detach()
    expected = rows if kept is None else torch.from_numpy(gguf.dequantize(gguf.quantize(rows.numpy(), kept), kept))
    assert torch.equal(got, expected.bfloat16().float())
    assert shared.lm_head.weight.data_ptr() == shared.model.embed_tokens.weight.data_ptr()
    total = sum(each.numel() for each in model.parameters())
    assert sum(each.numel() for each in shared.parameters()) == total == parameters(open_gguf(path))


@pytest.mark.parametrize("kind", [Q4, Q8, None])
def test_an_output_layer_of_its_own_stays(tmp_path, kind):
    path = written(tmp_path, written_gguf.weights("qwen2"), embeddings=kind, output=kind)
    shared = loaded(path, tmp_path / "cache")
    assert shared.lm_head.weight.data_ptr() != shared.model.embed_tokens.weight.data_ptr()
    assert not torch.equal(shared.lm_head.weight, shared.model.embed_tokens.weight)


@pytest.mark.parametrize("row", [2, 60])
def test_one_trained_row_is_enough_for_an_output_layer_of_its_own(tmp_path, row):
    model = tied()
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.lm_head.weight.data[row] += 0.015 * torch.from_numpy(np.random.default_rng(0).normal(size=64)).float()
    path = written(tmp_path, model, embeddings=Q8, output=Q8)
    shared = loaded(path, tmp_path / "cache")
    assert not torch.equal(shared.lm_head.weight, shared.model.embed_tokens.weight)
