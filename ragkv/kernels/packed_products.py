"""Products of a model in bfloat16 on a CPU, with weights in the order in which oneDNN reads them.

torch gives oneDNN a weight as it lies in memory, and oneDNN reorders it in every product. For the few rows of a
question or of a decoded token that takes longer than the product itself. Here each weight is reordered once, when the
model is loaded. The products of few rows are equal, bit for bit.

The operators are those that torch's compiler puts in the place of linear modules.

For each shape oneDNN makes a program. Where memory runs out while it does, it crashes, or refuses every new shape that
the thread meets from then on. So memory for a program is asked for before, and only a shape that is new costs that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROWS = 1
"""Rows that the order is chosen for. For more rows the products take as long as with an order that was chosen for
them."""
PROGRAM_BYTES = 32 * 2**20
"""Memory that there must be to make a program: it takes several pieces of a quarter of a MiB, and room to work."""
MOST_SHAPES = 512
"""Shapes whose programs are taken to be there; oneDNN keeps 1024."""

_prepared = set[tuple[int, int, int]]()


class PackedLinear(nn.Module):
    """A linear module whose weight is in oneDNN's order.

    Attributes:
        weight: [out, in], opaque. `to_dense()` returns it as it was.
        bias: [out], or None.
    """

    def __init__(self, linear: nn.Linear):
        """Take the weight and the bias of a linear module."""
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self._size = linear.out_features, linear.in_features

    def forward(self, x: Tensor) -> Tensor:
        """Apply the product to x [..., in]. Raises RuntimeError where memory is short (`ragkv.memory`)."""
        shape = (x.numel() // x.shape[-1], *self._size)
        if shape not in _prepared:
            torch.empty(PROGRAM_BYTES + shape[0] * shape[1] * x.element_size(), dtype=torch.uint8)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        if shape not in _prepared:
            if len(_prepared) >= MOST_SHAPES:
                _prepared.clear()
            _prepared.add(shape)
        return product


def multiplies_bfloat16() -> bool:
    """Return whether this CPU multiplies in bfloat16, which is several times as fast there as float32."""
    can = torch.cpu.get_capabilities()
    return bool(can.get("avx512_bf16") or can.get("amx_bf16"))


def supports_packing(weights: Any) -> bool:
    """Return whether all weights of a model are in bfloat16 on a CPU that multiplies in it, and torch can pack them."""
    kinds = {(each.device.type, each.dtype) for each in weights.parameters()}
    operators = torch.ops.mkldnn
    return (
        kinds == {("cpu", torch.bfloat16)}
        and all(hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
        and torch.backends.mkldnn.is_available()
        and bool(operators._is_mkldnn_bf16_supported())
    )


@torch.no_grad()
def pack_products(module: nn.Module) -> None:
    """Put packed modules in the place of all linear modules inside a module. Others stay as they are."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
