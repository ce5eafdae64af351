"""What decodes on a CPU: the fused loop over products of a few rows, beside the exact weights (`RAGKV_WEIGHTS=auto`).

A decoded token reads every weight once. Prefills, repairs and encoding keep the weights that were loaded, so stored KV
and the first token of an answer are theirs. Passes that decode (`Pass.decodes`) take `kernels/grid_products.py` for up
to `FEW` rows in all; more rows are multiplied with the exact weights, which is faster for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ragkv.kernels import grid_products
from ragkv.kernels.packed_products import PackedLinear
from ragkv.model.execution.merged_weights import MergedLayer, is_plain, merge_layers

FEW = 4
"""Planes times rows up to which the grid is the faster one; measured with 576 columns (docs/lab-notes.md)."""


class FewRowsLinear:
    """Linear modules as one product: of a few rows by the grid, of more rows by the modules themselves."""

    def __init__(self, modules: Sequence[Any]):
        """Quantise the weights of packed modules. They stay as they are."""
        self._modules, biases = list(modules), [each.bias for each in modules]
        whole = torch.cat([each.weight.to_dense().detach() for each in modules])
        fits = grid_products.fits_grid(whole)
        self._grid = grid_products.pack(whole) if fits else None
        self._bias = None if biases[0] is None else torch.cat([each.detach() for each in biases])

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the product to x [T, in]."""
        grid = self._grid
        if grid is not None and 0 < x.shape[0] * grid.planes <= FEW:
            return grid_products.linear(x, grid, self._bias)
        parts = [module(x) for module in self._modules]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def supports_few_rows(body: Any, head: Any) -> bool:
    """Return whether a model's products are packed in bfloat16 on a CPU, and torch multiplies by the grid."""
    return grid_products.supports_grid() and type(head) is PackedLinear and is_plain(body, [PackedLinear])


@torch.inference_mode()
def few_rows_layers(body: Any) -> list[MergedLayer]:
    """Make the layers of a model for which `supports_few_rows` holds."""
    return merge_layers(body, FewRowsLinear)
