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
caches as that does. `Steps.ask` is the composite pass of a short question, likewise a graph: to the kernels its tokens
are requests whose caches are one and the same, each a row longer than the one before. Without a GPU both run the same
step with the references and record nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ragkv.context import ContextCache
from ragkv.joined import Layer, fits, join
from ragkv.kernels import steps as reference
from ragkv.kernels.rows import raw_queries
from ragkv.kernels.steps import Kernels, Places, splits_of
from ragkv.model import DecoderModel, Rotary

WIDEST = 32
"""Requests of one graph; more are read in parts."""
GRAPHS = 16
ASKED, AMONG = 64, 16384
"""A question of more tokens is not worth asking by a graph, and neither are more rows: each token reads all of them."""


Made = TypeVar("Made")
Attend = Callable[[int, Tensor], Tensor]
"""(layer, its queries [W, Hq, d]) -> their attention [W, Hq, d]"""


@dataclass(frozen=True)
class _Recording:
    """inputs [2 + 3L, W] int64: tokens, positions, table · made: what a replay leaves, as `Steps._step` says."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    made: list[Tensor]


def make_steps(model: DecoderModel) -> Steps | None:
    """Steps of a model that they can be recorded for, None otherwise: its forward serves every model.

    It must lie on one GPU, not in float64, with plain linear modules and SiLU between them, and Triton must be there.
    """
    return Steps(model) if fits(model.body) and not model.spread else None


class Steps:
    """See the module. Not thread-safe.

    The weights of the model are joined (joined.py).
    """

    def __init__(self, model: DecoderModel, kernels: Kernels | None = None):
        """kernels: None: the twins on a GPU, the references elsewhere."""
        self._model, self._shape = model, model.shape
        self._kernels = kernels or kernels_of(model)
        self._layers = join(model.body)
        self._recorded: OrderedDict[tuple[int, int, int], _Recording] = OrderedDict()
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
        stores = [[cache.stores(layer, 1) for cache in caches] for layer in range(self._shape.layers)]
        held = [[cache.lengths[layer] for cache in caches] for layer in range(self._shape.layers)]
        logits = self._run(tokens, positions, stores, held)[0].clone()  # the next replay does not change it
        # A replay goes on by itself: keeping the books costs no time of the step.
        for cache, position in zip(caches, positions, strict=True):
            at = torch.tensor([position])
            for layer in range(self._shape.layers):
                cache.reserve(layer, at)
        return logits[: len(caches)]

    def takes(self, cache: ContextCache, tokens: Sequence[int]) -> bool:
        """Whether `ask` is worth it for a question behind what the cache holds."""
        return 0 < len(tokens) <= ASKED and len(tokens) * max(cache.lengths) <= AMONG * ASKED // 2

    @torch.inference_mode()
    def ask(self, cache: ContextCache, tokens: Sequence[int], position: int, depth: int) -> list[Tensor]:
        """A question's tokens at positions from `position` on, behind all rows of the cache, which stays as it is but
        for room; returns the pre-RoPE queries [T, Hq, d] of the layers below `depth`, as a pass captures them.

        On a GPU they are good until the next call.
        """
        count, layers = len(tokens), range(self._shape.layers)
        stores = [[cache.stores(layer, count)] * count for layer in layers]
        held = [list(range(cache.lengths[layer], cache.lengths[layer] + count)) for layer in layers]
        made = self._run(tokens, range(position, position + count), stores, held, depth)
        return [q[:count] for q in made]

    def _run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        stores: Sequence[Sequence[tuple[Tensor, Tensor]]],
        held: Sequence[Sequence[int]],
        depth: int | None = None,
    ) -> list[Tensor]:
        """Fill up to a power of two, and step. stores, held [L][W]: the cache of each row, and the rows in it that it
        attends to beside its own."""
        lacking = (1 << (len(tokens) - 1).bit_length()) - len(tokens)
        nothing, nowhere = [0] * lacking, [(self._nowhere[0], self._nowhere[1])] * lacking
        k, v = ([[pair[side] for pair in (*layer, *nowhere)] for layer in stores] for side in (0, 1))
        addresses = [[each.data_ptr() for each in layer] for layer in (*k, *v)]
        lines = [[*tokens, *nothing], [*positions, *nothing], *addresses, *([*rows, *nothing] for rows in held)]
        host = torch.tensor(lines, dtype=torch.int64)  # [2 + 3L, W]: tokens, positions, table
        splits = splits_of(host.shape[1], self._shape.kv_heads, 1 + max(max(rows) for rows in held))
        if self._records:
            return self._replay(host, splits, depth)
        return self._step(host, Places(_table(host), k, v), splits, depth)

    def _replay(self, host: Tensor, splits: int, depth: int | None) -> list[Tensor]:
        """What `_step` says; the next replay changes it."""
        with torch.cuda.device(self._model.device):
            recording = self._recording(host, splits, depth)
            # Memory that is pinned is not used anew before the copy out of it is done.
            recording.inputs.copy_(host.pin_memory(), non_blocking=True)
            recording.graph.replay()
            return recording.made

    def _recording(self, host: Tensor, splits: int, depth: int | None) -> _Recording:
        """The graph of this width and number of parts, recorded at its first use, with `host` as its inputs."""
        key = (host.shape[1], splits, 0 if depth is None else depth)
        if key not in self._recorded:
            while len(self._recorded) >= GRAPHS:
                self._recorded.popitem(last=False)
            self._recorded[key] = self._record(host.to(self._model.device), splits, depth)
        self._recorded.move_to_end(key)
        return self._recorded[key]

    def _record(self, inputs: Tensor, splits: int, depth: int | None) -> _Recording:
        """The step is really done while warming up, with the same rows as in the replay to come."""
        places = Places(_table(inputs))
        graph, made = record(lambda: self._step(inputs, places, splits, depth), self._aside, self._pool)
        return _Recording(graph, inputs, made)

    def _step(self, inputs: Tensor, places: Places, splits: int, depth: int | None) -> list[Tensor]:
        """Logits [W, vocabulary], alone; with a depth the pre-RoPE queries [W, Hq, d] of the layers below it."""
        model, kernels = self._model, self._kernels

        def attend(layer: int, q: Tensor) -> Tensor:
            return kernels.attend(q, places, layer, self._shape, scale=model.scale, splits=splits)

        if depth is None:
            return [step(model, self._layers, kernels, inputs[0], inputs[1], places, attend)]
        return queries(model, self._layers[:depth], kernels, inputs[0], inputs[1], places, attend)


def record(work: Callable[[], Made], aside: Any, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Made]:
    """Do `work` twice, then record it: (the graph, what a replay leaves its result in). aside: the stream of all
    recordings · pool: what graphs share memory by."""
    here = torch.cuda.current_stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(2):
            work()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # Other threads load KV to the GPU meanwhile; what they ask of it is none of the graph's business.
    with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
        result = work()
    return graph, result


def step(
    model: DecoderModel,
    layers: Sequence[Layer],
    kernels: Kernels,
    tokens: Tensor,
    positions: Tensor,
    places: Places,
    attend: Attend,
) -> Tensor:
    """Logits [W, vocabulary] of tokens at positions [W], their rows written to places. Nothing in it waits for the
    device, if `attend` does not."""
    x, at, normed = _begin(model, tokens, positions)
    for i, layer in enumerate(layers):
        x, normed = _read(model, i, layer, kernels, x, layer.qkv(normed), at, places, attend)
    logits: Tensor = model.lm_head(normed)
    return logits


def queries(
    model: DecoderModel,
    layers: Sequence[Layer],
    kernels: Kernels,
    tokens: Tensor,
    positions: Tensor,
    places: Places,
    attend: Attend,
) -> list[Tensor]:
    """As `step`, but for the pre-RoPE queries [W, Hq, d] of each of the layers; the last one does nothing else."""
    x, at, normed = _begin(model, tokens, positions)
    found = list[Tensor]()
    for i, layer in enumerate(layers):
        qkv = layer.qkv(normed)
        found.append(raw_queries(qkv, model.shape, layer.heads))
        if i < len(layers) - 1:
            x, normed = _read(model, i, layer, kernels, x, qkv, at, places, attend)
    return found


def _begin(model: DecoderModel, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotary, Tensor]:
    x = model.body.embed_tokens(tokens)
    return x, model.rotary(positions), model.body.layers[0].input_layernorm(x)


def _read(
    model: DecoderModel,
    i: int,
    layer: Layer,
    kernels: Kernels,
    x: Tensor,
    qkv: Tensor,
    at: Rotary,
    places: Places,
    attend: Attend,
) -> tuple[Tensor, Tensor]:
    """The rest of a layer: rows as they leave it, and behind the norm that comes next."""
    q = kernels.turn(qkv, at.cos, at.sin, places, i, model.shape, layer.heads)
    x, normed = kernels.add_norm(x, layer.out(attend(i, q).flatten(1)), layer.middle.weight, layer.middle.eps)
    return kernels.add_norm(x, layer.down(kernels.gated(layer.gate_up(normed))), layer.last.weight, layer.last.eps)


def _table(inputs: Tensor) -> Tensor:
    """[3, L, W], a view."""
    return inputs[2:].view(3, -1, inputs.shape[1])


def kernels_of(model: DecoderModel) -> Kernels:
    """The twins on a GPU, the references elsewhere."""
    if model.device.type != "cuda" or model.dtype == torch.float64:
        return reference
    from ragkv.kernels import triton_steps

    return triton_steps
