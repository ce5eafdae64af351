"""A LoRA layer of peft's that is computed as it is served: merged, y = x (W + s · B A)ᵀ.

peft computes x Wᵀ + s · (x Aᵀ) Bᵀ. With many tokens in a pass, the two products over all tokens and the casts around
them take longer than B A, which does not depend on the tokens.
"""

from __future__ import annotations

import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn


class MergedLinear(Linear):  # type: ignore[misc]  # peft is Any to mypy
    """A linear layer W [out, in] with an adapter A [rank, in], B [out, rank]."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the layer's output for x [..., in]; with the adapter disabled, the base layer's."""
        if self.disable_adapters:
            found: Tensor = self.base_layer(x, *args, **kwargs)
            return found
        weight, bias = self.base_layer.weight, self.base_layer.bias
        for name in self.active_adapters:
            change = self.scaling[name] * (self.lora_B[name].weight @ self.lora_A[name].weight)
            weight = weight + change.to(weight.dtype)
        return F.linear(x, weight, bias)


CUSTOM = {nn.Linear: MergedLinear}
"""For `LoraConfig._register_custom_module`, peft's way to bring a layer of one's own."""
