"""Weights of a model in FP8 (`RAGKV_WEIGHTS=fp8`): half the memory of bfloat16, and half the time to read them.

All linear modules of the layers are rounded when the model is loaded, each row of a weight with a scale of its own. The
head is rounded, too, unless it shares its weight with the embedding. Norms, biases and the embedding stay as they are.
The rounded model is another model: KV that was stored with the exact weights is not used with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ragkv.errors import ConfigError
from ragkv.kernels.fp8_linear import linear, quantise_rows

MULTIPLE = 16
"""Rows and columns of a weight must be multiples of this for products in FP8."""
CAPABILITY = (8, 9)
"""The first GPUs that multiply in FP8."""


class Fp8Linear(nn.Module):
    """A linear module with its weight in FP8.

    Attributes:
        weight: [out, in] float8_e4m3fn.
        scale: [out] float32, factor of each row.
        bias: [out], or None.
    """

    scale: Tensor

    def __init__(self, module: nn.Linear):
        """Round the weight of a linear module."""
        super().__init__()
        codes, scale = quantise_rows(module.weight.detach())
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", scale, persistent=False)
        self.bias = module.bias

    def forward(self, x: Tensor) -> Tensor:
        """Apply the product to x [..., in]."""
        flat = x.reshape(-1, x.shape[-1])
        return linear(flat, self.weight, self.scale, self.bias).view(*x.shape[:-1], self.weight.shape[0])


def check_fp8(device: torch.device) -> None:
    """Raise ConfigError unless a device multiplies in FP8."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        raise ConfigError(
            f"weights in FP8 need a GPU that multiplies in it (compute capability 8.9 or newer), and the model is on "
            f"{device}; set RAGKV_WEIGHTS=exact"
        )


@torch.no_grad()
def quantise_weights(weights: Any) -> None:
    """Put modules in FP8 in the place of the linear modules of a model, one by one.

    A module whose size is no multiple of `MULTIPLE` stays as it is, and so does a head that is the embedding.
    """
    for parent in list(weights.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if _fits(child):
                setattr(parent, name, Fp8Linear(child))
    if _fits(weights.lm_head) and weights.lm_head.weight is not weights.model.embed_tokens.weight:
        weights.lm_head = Fp8Linear(weights.lm_head)


def _fits(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not any(size % MULTIPLE for size in module.weight.shape)
