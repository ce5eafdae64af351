"""Lower bounds for the time of a question on a device: bytes / bandwidth, arithmetic / peak.

Bandwidth and peak are measured in the same run, with nothing else running: a long copy, a large product, a copy from
page-locked host memory. The work is counted from the plan:

    weights   of every layer of a pass, read once per pass; of the last layer only those that write K and V, or q
    kv        K and V that the rows of a layer attend to, read once per layer
    link      bytes that come from host memory
    flops     two per weight and row, four per query-key pair, attention head and dimension

A question that chooses blocks needs passes one after the other: its composite passes, up to the layer that `plan`
needs, and a pass that repairs blocks and prefills the question. A pass takes at least the larger of the time for its
bytes and the time for its arithmetic. Loads may overlap with both passes, so the bound is the sum of these maxima, or
the time of the link if that is larger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ragkv.model.decoder import DecoderModel
from ragkv.recompute.base import Blocks, Piece, Plan, Tokens, rows_alive

TURNS = 3


@dataclass(frozen=True)
class Speeds:
    """Measured speeds of a device.

    Attributes:
        copy: bytes per second, read and written, of a copy on the device.
        link: bytes per second from page-locked host memory to the device; on a CPU that of a copy.
        products: multiplications and additions per second in the model's dtype.
    """

    copy: float
    link: float
    products: float


@dataclass(frozen=True)
class PassWork:
    """Work of one pass: bytes of weights, bytes of K and V, and arithmetic operations."""

    weights: float
    kv: float
    flops: float


@dataclass(frozen=True)
class Floors:
    """Least milliseconds of each kind of work, and of all together (`bound`)."""

    weights: float
    kv: float
    link: float
    flops: float
    bound: float


def speeds(device: torch.device, dtype: torch.dtype) -> Speeds:
    """Measure the speeds, the best of TURNS; takes about half a second."""
    cuda = device.type == "cuda"
    size, side = (2**30, 8192) if cuda else (2**26, 768)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / _seconds(lambda: target.copy_(source), device)
    link = copy
    if cuda:
        pinned = torch.empty(size // 4, dtype=torch.uint8, pin_memory=True)
        link = pinned.nbytes / _seconds(lambda: target[: size // 4].copy_(pinned, non_blocking=True), device)
    a = torch.randn(side, side, dtype=dtype, device=device)
    return Speeds(copy, link, 2 * side**3 / _seconds(lambda: a @ a, device))


def _seconds(do: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, on the device too. Several calls are queued together, so that queueing does not count."""
    count, best = (8 if device.type == "cuda" else 2), float("inf")
    do()
    for _ in range(TURNS):
        settled(device)
        start = time.perf_counter()
        for _ in range(count):
            do()
        settled(device)
        best = min(best, (time.perf_counter() - start) / count)
    return best


def settled(device: torch.device) -> None:
    """Wait until the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(model: DecoderModel) -> str:
    """Name of the device or devices that a model is on."""
    if model.device.type != "cuda":
        return model.device_names
    count, name = len(set(model.devices)), torch.cuda.get_device_name(model.device)
    return name if count == 1 else f"{count} {name}"


def floors(passes: Sequence[PassWork], link: float, at: Speeds) -> Floors:
    """Lower bounds for passes that run one after the other. link: bytes that come from host memory."""

    def ms(amount: float, speed: float) -> float:
        return 1000 * amount / speed

    coming = ms(link, at.link)
    bound = sum(max(ms(p.weights + p.kv, at.copy), ms(p.flops, at.products)) for p in passes)
    return Floors(
        weights=ms(sum(p.weights for p in passes), at.copy),
        kv=ms(sum(p.kv for p in passes), at.copy),
        link=coming,
        flops=ms(sum(p.flops for p in passes), at.products),
        bound=max(coming, bound),
    )


class WorkCounter:
    """Counts the work of passes of one model."""

    def __init__(self, model: DecoderModel):
        shape, layer = model.shape, model.body.layers[0]
        self._layers, self._size = shape.layers, model.dtype.itemsize
        self._layer: int = sum(each.numel() for each in layer.parameters())
        attention = layer.self_attn
        self._kv: int = attention.k_proj.weight.numel() + attention.v_proj.weight.numel()
        self._q: int = attention.q_proj.weight.numel()
        self._head: int = model.lm_head.weight.numel()
        self._row_bytes = 2 * shape.kv_heads * shape.head_dim * self._size
        self._pair = 4 * shape.q_heads * shape.head_dim

    def prefill_full(self, tokens: int) -> list[PassWork]:
        """Work of a prefill of `tokens` tokens; the last one gives logits."""
        layer = (tokens, tokens * (tokens + 1) // 2, tokens)
        return [self._whole([layer] * self._layers)]

    def prefill_sparse(
        self,
        plan: Plan,
        pieces: Sequence[Piece],
        prefix: int,
        question: int,
        looks: Sequence[Sequence[Blocks]],
        depth: int,
    ) -> list[PassWork]:
        """Work of a question by its plan.

        Args:
            prefix: tokens of the prefix.
            question: tokens of the question.
            looks: blocks per chunk that each composite pass attends to.
            depth: layers of a composite pass.
        """
        passes = []
        for look in looks:
            keys = prefix + sum(piece.row_count(blocks) for piece, blocks in zip(pieces, look, strict=True))
            passes.append(self._composite(depth, question, keys))
        starts = np.cumsum([0, *(piece.tokens for piece in pieces)])
        counted: dict[tuple[int, ...], tuple[int, int, int]] = {}  # most plans are the same in every layer
        layers = []
        for kept, alive in zip(plan.kept, rows_alive(plan.recompute), strict=True):
            name = id(kept), *map(id, alive)
            if name not in counted:
                there = _places(starts, [piece.rows(blocks) for piece, blocks in zip(pieces, kept, strict=True)])
                again = _places(starts, alive)
                seen = int(np.searchsorted(there, again, side="right").sum()) + prefix * len(again)
                own = question * (prefix + len(there)) + question * (question + 1) // 2
                counted[name] = len(again) + question, seen + own, prefix + len(there) + question
            layers.append(counted[name])
        return [*passes, self._whole(layers)]

    def _whole(self, layers: Sequence[tuple[int, int, int]]) -> PassWork:
        """layers: (rows, query-key pairs, keys) of each. In the last layer one row attends and goes through the MLP; of
        the other rows only K and V are computed."""
        *below, (rows, _, keys) = layers
        flops = sum(2 * self._layer * n + self._pair * pairs for n, pairs, _ in below)
        flops += 2 * self._kv * rows + 2 * (self._layer + self._head) + self._pair * keys
        weights = self._size * (self._layers * self._layer + self._head)
        return PassWork(weights, self._row_bytes * sum(keys for *_, keys in layers), flops)

    def _composite(self, depth: int, question: int, keys: int) -> PassWork:
        """Work of a composite pass; in its last layer only the queries are computed."""
        pairs = question * keys + question * (question + 1) // 2
        flops = (depth - 1) * (2 * self._layer * question + self._pair * pairs) + 2 * self._q * question
        weights = self._size * ((depth - 1) * self._layer + self._q)
        return PassWork(weights, self._row_bytes * (depth - 1) * (keys + question), flops)


def _places(starts: NDArray[np.int64], tokens: Sequence[Tokens]) -> NDArray[np.int64]:
    """Positions of token indices per chunk, ascending, not counting the prefix."""
    parts = [np.asarray(part, dtype=np.int64) + start for start, part in zip(starts, tokens, strict=False)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
