"""The kernels that torch has for dense attention: which one it chooses, and how long each takes.

A speedup over dense prefill means little if dense prefill is slow, so every FlashAttention-class kernel is timed.
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

T = TypeVar("T")

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""Kernels whose memory does not grow with the square of the length."""


@dataclass(frozen=True)
class Backend:
    """Time of one kernel.

    Attributes:
        length: tokens of the input.
        ms: milliseconds of dense attention over random numbers, in all layers but the last (whose single row costs
            next to nothing): the median of one layer's runs times the number of layers.
    """

    length: int
    name: str
    ms: float


def preferring(backend: str) -> AbstractContextManager[None]:
    """Make this kernel the first choice for dense attention; "": leave the choice to torch."""
    if not backend:
        return nullcontext()
    first = BACKENDS[backend]
    others = [each for each in (*BACKENDS.values(), SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH) if each != first]
    context: AbstractContextManager[None] = sdpa_kernel([first, *others], set_priority=True)
    return context


def chosen_backend(model: DecoderModel, length: int) -> str:
    """The kernel that torch chooses for the model's shape: one of BACKENDS, or torch's name for it."""
    q, k, v = _random(model, length)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    choose: Any = torch._fused_sdp_choice  # its stub is not its signature
    backend = SDPBackend(choose(*heads, None, 0.0, True, scale=model.scale, enable_gqa=True))
    return next((name for name, each in BACKENDS.items() if each == backend), str(backend.name).lower())


@torch.inference_mode()
def backend_times(model: DecoderModel, length: int, repeat: int = 5) -> list[Backend]:
    """Time dense attention with each of the BACKENDS that runs here."""
    layers = max(1, model.shape.layers - 1)
    found = []
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch explains at length why a backend cannot run
            times = unless_full(lambda: _attend_times(model, length, repeat))
        if times:
            found.append(Backend(length, name, layers * statistics.median(times)))
    return found


def _attend_times(model: DecoderModel, length: int, repeat: int) -> list[float]:
    """Milliseconds of `repeat` dense attentions of one layer; empty if no kernel can run it."""
    q, k, v = _random(model, length)
    positions, timer = torch.arange(length), StepTimer(model.device)
    times = []
    for _ in range(repeat + 1):
        start = timer.total()
        try:
            attend(q, k, v, positions, positions, scale=model.scale)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # "No available kernel": the only backend that was allowed cannot run this
            return []
        times.append(timer.total() - start)
    return times[1:]


def _random(model: DecoderModel, length: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = model.shape
    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(length, h, shape.head_dim, dtype=model.dtype, device=model.device) for h in heads)
    return q, k, v


def unless_full(do: Callable[[], T]) -> T | None:
    """Call `do`; returns its result, or None if the device is out of memory."""
    try:
        return do()
    except torch.OutOfMemoryError:
        pass
    # After the handler, not inside it: the error's traceback keeps the allocated tensors alive.
    torch.cuda.empty_cache()
    return None
