"""Muon for the matrices inside the layers, AdamW for the rest.

Muon: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): momentum, orthogonalised by five
Newton-Schulz steps; here scaled by .2 · sqrt(max(rows, columns)), so that one learning rate serves both (Liu et al.,
"Muon is Scalable for LLM Training", 2025, eq. 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon:
    """Matrices of the same shape are stacked and orthogonalised together."""

    def __init__(self, matrices: Sequence[nn.Parameter], momentum: float = 0.95, decay: float = 0.1):
        groups: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            groups.setdefault(matrix.shape, []).append(matrix)
        self._groups = list(groups.values())
        self._momenta = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self._groups]
        self._momentum, self._decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update; clears the gradients."""
        for group, momentum in zip(self._groups, self._momenta, strict=True):
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            momentum.lerp_(gradient, 1 - self._momentum)
            update = orthogonal(gradient.lerp(momentum, self._momentum))
            scale = 0.2 * max(update.shape[1:]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self._decay).add_(change, alpha=-rate * scale)
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The momenta."""
        return {"momenta": self._momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the momenta."""
        for mine, saved in zip(self._momenta, state["momenta"], strict=True):
            mine.copy_(saved)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly. matrices, result: float32 [count, rows, columns]."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    wide = x.shape[1] > x.shape[2]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram: Tensor = x.mT @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    result: Tensor = (x.mT if wide else x).float()
    return result
