"""The kernels that torch has for dense attention: which one it takes, and how long each takes alone.

A speedup over dense prefill is worth what dense prefill is worth, so every FlashAttention-class kernel is timed.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ragkv.kernels.attention import attend
from ragkv.model.decoder import DecoderModel
from ragkv.timing import StepTimer

Done = TypeVar("Done")

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""Kernels whose memory does not grow with the square of the length."""


@dataclass(frozen=True)
class Backend:
    """ms: dense attention of all layers but the last (whose only row costs nothing) with this kernel; random numbers,
    median of one layer's runs times the layers."""

    length: int
    name: str
    ms: float


def preferring(backend: str) -> AbstractContextManager[None]:
    """Dense attention with this kernel where it can run."""
    if not backend:
        return nullcontext()
    first = BACKENDS[backend]
    others = [each for each in (*BACKENDS.values(), SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH) if each != first]
    context: AbstractContextManager[None] = sdpa_kernel([first, *others], set_priority=True)
    return context


def chosen_backend(model: DecoderModel, length: int) -> str:
    """The kernel that torch takes for dense attention of the model's shape: one of BACKENDS, or torch's word for it."""
    q, k, v = _random(model, length)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    choose: Any = torch._fused_sdp_choice  # its stub is not its signature
    backend = SDPBackend(choose(*heads, None, 0.0, True, scale=model.scale, enable_gqa=True))
    return next((name for name, each in BACKENDS.items() if each == backend), str(backend.name).lower())


@torch.inference_mode()
def backend_times(model: DecoderModel, length: int, repeat: int = 5) -> list[Backend]:
    """Dense attention with each of the BACKENDS that can run it here."""
    layers = max(1, model.shape.layers - 1)
    found = []
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells at length why a backend cannot run
            times = unless_full(lambda: _attend_times(model, length, repeat))
        if times:
            found.append(Backend(length, name, layers * statistics.median(times)))
    return found


def _attend_times(model: DecoderModel, length: int, repeat: int) -> list[float]:
    """Milliseconds of each of `repeat` dense attentions of one layer; none where no kernel can run it."""
    q, k, v = _random(model, length)
    positions, watch = torch.arange(length), StepTimer(model.device)
    times = []
    for _ in range(repeat + 1):
        start = watch.total()
        try:
            attend(q, k, v, positions, positions, scale=model.scale)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # "No available kernel": the only backend that was allowed cannot run this
            return []
        times.append(watch.total() - start)
    return times[1:]


def _random(model: DecoderModel, length: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = model.shape
    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(length, h, shape.head_dim, dtype=model.dtype, device=model.device) for h in heads)
    return q, k, v


def unless_full(do: Callable[[], Done]) -> Done | None:
    """What `do` gives; None when the device's memory is full."""
    try:
        return do()
    except torch.OutOfMemoryError:
        pass
    # Behind the handler: while it ran, the error's traceback held what had been allocated.
    torch.cuda.empty_cache()
    return None
