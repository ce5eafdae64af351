"""The body of a decoder layer: everything but caches and attention, which the caller brings as a function.

WiredLayer    calls the modules of a layer that is made as Llama's is. Rows that leave a pass are dropped before the
              output projection and the MLP
OwnLayer      (own_forward.py) calls the layer's own forward, for every other family
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Attended(NamedTuple):
    """What attention returns for the rows of a layer.

    Attributes:
        rows: [O, Hq, d]. Attention of the rows that go on.
        kept: [O] int64. Their indices among the rows that entered, on their device; None for all rows.
    """

    rows: Tensor
    kept: Tensor | None


Attend = Callable[[Tensor, Tensor, Tensor], Attended]
"""Maps q [T, Hq, d] and k, v [T, Hkv, d] of the rows that enter a layer, before RoPE, to their attention."""


class LayerBody(Protocol):
    """One decoder layer."""

    def __call__(self, hidden: Tensor, positions: Tensor, attend: Attend, inputs: Tensor | None = None) -> Tensor:
        """Run the layer.

        Args:
            hidden: rows [T, hidden] that enter it.
            positions: their positions [T] int64, on the CPU.
            attend: writes K and V to caches and attends.
            inputs: the layer's own input [T, n] of the rows, in a model whose layers read one.

        Returns:
            Hidden states [O, hidden] of the rows that go on.
        """
        ...


class WiredLayer:
    """A layer made as that of Llama, Mistral, Qwen2 or Qwen3: norms before, one residual stream, one product each."""

    def __init__(self, block: Any, head_dim: int):
        """Wrap a layer of transformers."""
        self._block, self._head_dim = block, head_dim
        self._norms_heads = hasattr(block.self_attn, "q_norm")

    def __call__(self, hidden: Tensor, positions: Tensor, attend: Attend, inputs: Tensor | None = None) -> Tensor:
        """Run the layer. See `LayerBody`."""
        block, attention = self._block, self._block.self_attn
        x = block.input_layernorm(hidden)
        q = attention.q_proj(x).view(x.shape[0], -1, self._head_dim)
        k = attention.k_proj(x).view(x.shape[0], -1, self._head_dim)
        v = attention.v_proj(x).view(x.shape[0], -1, self._head_dim)
        if self._norms_heads:
            q, k = attention.q_norm(q), attention.k_norm(k)
        attended, kept = attend(q, k, v)
        x = hidden if kept is None else hidden[kept]
        x = x + attention.o_proj(attended.flatten(1))
        finished: Tensor = x + block.mlp(block.post_attention_layernorm(x))
        return finished
