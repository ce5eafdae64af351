"""A LoRA layer of peft's that is computed as it is served: merged, y = x (W + s · B A)ᵀ.

peft computes x Wᵀ + s · (x Aᵀ) Bᵀ. With many tokens in a pass, the two products over all tokens and the casts around
them take longer than B A, which does not depend on the tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn


class MergedLora(Linear):
    """A linear layer W [out, in] with an adapter A [rank, in], B [out, rank]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for x [..., in]; with the adapter disabled, the base layer's."""
        base: Any = self.base_layer
        if self.disable_adapters:
            return cast(Tensor, base(x))
        weight: Tensor = base.weight
        for name in self.active_adapters:
            first: Any = self.lora_A[name]
            second: Any = self.lora_B[name]
            change = self.scaling[name] * (second.weight @ first.weight)
            weight = weight + change.to(weight.dtype)
        return F.linear(x, weight, base.bias)


CUSTOM = {nn.Linear: MergedLora}
"""For `LoraConfig._register_custom_module`, peft's way to bring a layer of one's own."""
