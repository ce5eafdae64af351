"""Attention of training rows: torch's SDPA over a dense mask, or its flex attention, which skips what nobody sees.

A row's masks are mostly empty: a chunk sees itself, a question sees the context and itself. SDPA computes all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from ragkv.model.supported import FULL, WINDOW
from ragkv.tune.masks import RowBatch, near_mask

AttentionName = Literal["sdpa", "flex", "eager"]
FLEX = "ragkv_flex"
TRIALS = 3


class RowAttention(Protocol):
    """How rows attend.

    Attributes:
        implementation: transformers' name for it.
    """

    implementation: str

    def prepare(self, mask: Tensor, dtype: torch.dtype) -> Any:
        """Return a bool mask [R, T, T] in the form that the implementation takes."""
        ...


class SdpaAttention:
    """torch's scaled dot product attention with a dense additive mask."""

    implementation = "sdpa"

    def prepare(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask as an additive one [R, 1, T, T], converted once and not in every layer."""
        return torch.zeros(1, dtype=dtype, device=mask.device).masked_fill(~mask[:, None], torch.finfo(dtype).min)


class EagerAttention(SdpaAttention):
    """The model's own attention in plain products, for layers with sinks or soft caps, which SDPA leaves out."""

    implementation = "eager"


class FlexRowAttention:
    """torch's flex attention. Backward needs a GPU."""

    implementation = FLEX

    def __init__(self) -> None:
        """Register the implementation with transformers."""
        from transformers import AttentionInterface

        AttentionInterface.register(FLEX, _flex_forward)

    def prepare(self, mask: Tensor, dtype: torch.dtype) -> Any:
        """Return the mask as a BlockMask."""
        from torch.nn.attention.flex_attention import create_block_mask

        rows, length, _ = mask.shape

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return mask[row, query, key]

        return create_block_mask(sees, rows, None, length, length, device=mask.device)


def row_attention(name: AttentionName) -> RowAttention:
    """Return the attention of a name."""
    if name == "flex":
        return FlexRowAttention()
    return EagerAttention() if name == "eager" else SdpaAttention()


@dataclass(frozen=True)
class RowWindows:
    """The windows of a model's layers.

    Attributes:
        window: Tokens that layers with a window see; 0 where no layer has one.
        every: Whether all layers have it.
    """

    window: int = 0
    every: bool = False

    @classmethod
    def of(cls, config: Any) -> RowWindows:
        """Read a model's configuration."""
        window, kinds = getattr(config, "sliding_window", None) or 0, set(getattr(config, "layer_types", None) or ())
        if not window or kinds == {FULL}:
            return cls()
        return cls(window, kinds <= {WINDOW})

    def prepare(self, attention: RowAttention, batch: RowBatch, masks: Sequence[Tensor], dtype: torch.dtype) -> Any:
        """Return masks [R, T, T] of the rows, one behind the other, as transformers' models take them."""
        seen = torch.cat([*masks])
        if not self.window:
            return attention.prepare(seen, dtype)
        near = seen & near_mask(batch, self.window).repeat(len(masks), 1, 1)
        if self.every:
            return attention.prepare(near, dtype)
        return {FULL: attention.prepare(seen, dtype), WINDOW: attention.prepare(near, dtype)}


def quicker(attempt: Callable[[AttentionName], None], say: Callable[[str], None]) -> AttentionName:
    """Return the attention that is quicker here.

    Args:
        attempt: Runs a forward and a backward pass. What flex attention raises means that it does not work here.
        say: Is told the times.
    """
    if not torch.cuda.is_available():
        return "sdpa"
    took: dict[AttentionName, float] = {}
    for name in ("sdpa", "flex"):
        try:
            attempt(name)  # compiles
            torch.cuda.synchronize()
            start = time.monotonic()
            for _ in range(TRIALS):
                attempt(name)
            torch.cuda.synchronize()
            took[name] = (time.monotonic() - start) / TRIALS
        except Exception as error:  # compilers raise many unrelated types
            say(f"{name} attention does not work here: {str(error).splitlines()[0][:200]}")
    best = min(took, key=lambda name: took[name])
    say("attention: " + ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in took.items()) + f"; {best}")
    return best


def _flex_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it: query [R, Hq, T, d], key and value [R, Hkv, T, d]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    found = _flex(query.is_cuda)(query, key, value, block_mask=attention_mask, scale=scaling)
    return found.transpose(1, 2).contiguous(), None


@cache
def _flex(compiled: bool) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Rows have few lengths: a kernel for each is quicker than one for all.
    found: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    return cast(Callable[..., Tensor], found)
