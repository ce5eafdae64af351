"""Dense decoding of a few requests, a token each, without a launch for every operation: one recorded graph a step.

A decode step of a large model is some hundred small kernels, and starting them one by one from Python takes longer than
the GPU needs to read the weights. So a step is recorded once as a CUDA graph, and then replayed with one call:

    joined products     q, k and v of a layer are one product, gate and up another
    own kernels         what is left between products (kernels/steps.py), caches found by address
    static inputs       tokens, positions and the table of caches: one copy to the device a step

A graph serves any caches of any lengths. There is one for each width, a power of two (missing requests are made up),
and for each number of parts that attention is divided into; at most `GRAPHS`, the least recently used go. Their memory
is one pool.

`Steps.read` gives the logits of `DecoderModel.forward` with `append`, up to the order of additions, and leaves the
caches as that does. Without a GPU it runs the same step with the references and records nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragkv.context import ContextCache
from ragkv.joined import fits, join
from ragkv.kernels import steps as reference
from ragkv.kernels.steps import Kernels, Places, splits_of
from ragkv.model import DecoderModel

WIDEST = 32
"""Requests of one graph; more are read in parts."""
GRAPHS = 16


@dataclass(frozen=True)
class _Recording:
    """inputs [2 + 3L, W] int64: tokens, positions, table · logits [W, vocabulary]: what a replay leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    logits: Tensor


def make_steps(model: DecoderModel) -> Steps | None:
    """Steps of a model that they can be recorded for, None otherwise: its forward serves every model.

    It must lie on one GPU, not in float64, with plain linear modules and SiLU between them, and Triton must be there.
    """
    return Steps(model) if fits(model.body) else None


class Steps:
    """See the module. Not thread-safe.

    The weights of the model are joined (joined.py).
    """

    def __init__(self, model: DecoderModel, kernels: Kernels | None = None):
        """kernels: None: the twins on a GPU, the references elsewhere."""
        self._model, self._shape = model, model.shape
        self._kernels = kernels or _kernels(model)
        self._layers = join(model.body)
        self._recorded: OrderedDict[tuple[int, int], _Recording] = OrderedDict()
        self._records = model.device.type == "cuda" and self._kernels is not reference
        # Requests that are made up to fill a width hold nothing and write here.
        row = (1, model.shape.kv_heads, model.shape.head_dim)
        self._nowhere = [torch.zeros(row, dtype=model.dtype, device=model.device) for _ in ("k", "v")]
        self._pool: Any = torch.cuda.graph_pool_handle() if self._records else None
        # One stream for all recordings: libraries keep memory to work in for every stream that they see.
        self._aside: Any = torch.cuda.Stream(model.device) if self._records else None

    @property
    def recorded(self) -> int:
        """Graphs that are kept."""
        return len(self._recorded)

    @torch.inference_mode()
    def read(self, caches: Sequence[ContextCache], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One token of each request, appended to its cache at its position, which must be behind all others in it;
        returns logits [W, vocabulary]. Every request has a cache of its own.

        Where it fails the caches are as they were, but for room.
        """
        parts = [slice(start, start + WIDEST) for start in range(0, len(caches), WIDEST)]
        if len(parts) != 1:
            none = torch.empty(0, self._model.config.vocab_size, dtype=self._model.dtype, device=self._model.device)
            return torch.cat([none, *(self.read(caches[part], tokens[part], positions[part]) for part in parts)])
        inputs, k, v = self._inputs(caches, tokens, positions)
        splits = splits_of(inputs.shape[1], self._shape.kv_heads, max(max(cache.lengths) for cache in caches) + 1)
        if self._records:
            logits = self._replay(inputs, splits)
        else:
            logits = self._step(inputs, Places(_table(inputs), k, v), splits)
        # A replay goes on by itself: keeping the books costs no time of the step.
        for cache, position in zip(caches, positions, strict=True):
            at = torch.tensor([position])
            for layer in range(self._shape.layers):
                cache.reserve(layer, at)
        return logits[: len(caches)]

    def _inputs(
        self, caches: Sequence[ContextCache], tokens: Sequence[int], positions: Sequence[int]
    ) -> tuple[Tensor, list[list[Tensor]], list[list[Tensor]]]:
        """(what is copied to the device, [2 + 3L, W] int64: tokens, positions, table; K and V [L][W] that it tells of).
        W is the width, requests that are made up included."""
        layers, lacking = range(self._shape.layers), (1 << (len(caches) - 1).bit_length()) - len(caches)
        nothing, nowhere = [0] * lacking, [self._nowhere] * lacking
        stores = [[*(cache.stores(layer, 1) for cache in caches), *nowhere] for layer in layers]
        k, v = ([[pair[side] for pair in layer] for layer in stores] for side in (0, 1))
        addresses = [[each.data_ptr() for each in layer] for layer in (*k, *v)]
        rows = [[*(cache.lengths[layer] for cache in caches), *nothing] for layer in layers]
        lines = [[*tokens, *nothing], [*positions, *nothing], *addresses, *rows]
        return torch.tensor(lines, dtype=torch.int64), k, v

    def _replay(self, host: Tensor, splits: int) -> Tensor:
        """Logits [W, vocabulary], one's own: the next replay does not change them."""
        with torch.cuda.device(self._model.device):
            recording = self._recording(host, splits)
            # Memory that is pinned is not used anew before the copy out of it is done.
            recording.inputs.copy_(host.pin_memory(), non_blocking=True)
            recording.graph.replay()
            return recording.logits.clone()

    def _recording(self, host: Tensor, splits: int) -> _Recording:
        """The graph of this width and number of parts, recorded at its first use, with `host` as its inputs."""
        key = (host.shape[1], splits)
        if key not in self._recorded:
            while len(self._recorded) >= GRAPHS:
                self._recorded.popitem(last=False)
            self._recorded[key] = self._record(host.to(self._model.device), splits)
        self._recorded.move_to_end(key)
        return self._recorded[key]

    def _record(self, inputs: Tensor, splits: int) -> _Recording:
        """Warm up and record. The step is really done while warming up, with the same rows as in the replay to come."""
        places, here = Places(_table(inputs)), torch.cuda.current_stream()
        self._aside.wait_stream(here)
        with torch.cuda.stream(self._aside):
            for _ in range(2):
                self._step(inputs, places, splits)
        here.wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads load KV to the GPU meanwhile; what they ask of it is none of the graph's business.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"):
            logits = self._step(inputs, places, splits)
        return _Recording(graph, inputs, logits)

    def _step(self, inputs: Tensor, places: Places, splits: int) -> Tensor:
        """Logits [W, vocabulary]; nothing in it waits for the device."""
        model, shape, kernels = self._model, self._shape, self._kernels
        x = model.body.embed_tokens(inputs[0])
        at = model.rotary(inputs[1])
        normed = model.body.layers[0].input_layernorm(x)
        for i, layer in enumerate(self._layers):
            q = kernels.turn(layer.qkv(normed), at.cos, at.sin, places, i, shape, layer.heads)
            attended = kernels.attend(q, places, i, shape, scale=model.scale, splits=splits)
            x, normed = kernels.add_norm(x, layer.out(attended.flatten(1)), layer.middle.weight, layer.middle.eps)
            x, normed = kernels.add_norm(
                x, layer.down(kernels.gated(layer.gate_up(normed))), layer.last.weight, layer.last.eps
            )
        logits: Tensor = model.lm_head(normed)
        return logits


def _table(inputs: Tensor) -> Tensor:
    """[3, L, W], a view."""
    return inputs[2:].view(3, -1, inputs.shape[1])


def _kernels(model: DecoderModel) -> Kernels:
    if model.device.type != "cuda" or model.dtype == torch.float64:
        return reference
    from ragkv.kernels import triton_steps

    return triton_steps
