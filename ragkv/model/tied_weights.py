"""Tied embeddings in GGUF files: the output layer is often a second copy of them, in another quantisation.

llama.cpp wants another precision for the output layer, so its tools write the same matrix twice. Read as two, a model
has up to a fifth more weights than were trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gguf import GGUFReader

EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"
_ROWS = 4096
"""Rows that are compared, beside those of control tokens: trainers that untie weights change all rows, or these."""
_ORDINARY = 1
"""Type of a token that is no control token, in `tokenizer.ggml.token_type`."""


def tied_copy(reader: GGUFReader) -> str:
    """Return the name of the coarser one of two copies of the embeddings; "" where there is one, or they differ.

    They are copies if they are as near to each other as quantisation alone leaves them: n bits and a scale for each
    block leave about 1.6 / 4 ** n of a row's square, and weights that were trained apart differ by about as much as
    they are large.
    """
    found = {tensor.name: tensor for tensor in reader.tensors if tensor.name in (EMBEDDINGS, OUTPUT)}
    if len(found) < 2 or (found[EMBEDDINGS].shape != found[OUTPUT].shape).any():
        return ""
    coarse, fine = sorted((found[OUTPUT], found[EMBEDDINGS]), key=_bits)
    rows = _compared_rows(reader, len(coarse.data))
    try:
        expected, given = (_dequantised(tensor, rows) for tensor in (fine, coarse))
    except NotImplementedError:  # a type that cannot be read; the conversion refuses it by name
        return ""
    present = expected.square().sum(1) > 1e-4 * expected.square().sum(1).mean()
    errors = ((given - expected).square().sum(1) / expected.square().sum(1))[present]
    step = 4.0 ** -min(8, int(_bits(coarse)))
    return str(coarse.name) if errors.mean() <= 4 * step and errors.max() <= 16 * step else ""


def _bits(tensor: Any) -> float:
    """Return how many bits a weight takes."""
    return 8 * float(tensor.n_bytes) / float(tensor.n_elements)


def _compared_rows(reader: GGUFReader, count: int) -> NDArray[np.int64]:
    field = reader.get_field("tokenizer.ggml.token_type")
    types = np.asarray(field.contents() if field else [])[:count]
    return np.union1d(np.linspace(0, count - 1, min(count, _ROWS)).astype(np.int64), np.flatnonzero(types != _ORDINARY))


def _dequantised(tensor: Any, rows: NDArray[np.int64]) -> torch.Tensor:
    from gguf import dequantize

    return torch.from_numpy(dequantize(np.ascontiguousarray(tensor.data[rows]), tensor.tensor_type).copy()).double()
