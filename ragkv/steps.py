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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragkv.context import ContextCache
from ragkv.kernels import steps as reference
from ragkv.kernels.steps import HeadNorms, Kernels, Places, splits_of
from ragkv.model import DecoderModel

WIDEST = 32
"""Requests of one graph; more are read in parts."""
GRAPHS = 16

Module = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Norm:
    weight: Tensor
    eps: float


@dataclass(frozen=True)
class _Product:
    """Rows of several linear modules as one product."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Layer:
    """What a step needs of a layer, in order; its first norm belongs to what comes before. last: the norm behind it."""

    qkv: _Product
    heads: HeadNorms | None
    out: Module
    middle: _Norm
    gate_up: _Product
    down: Module
    last: _Norm


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
    if model.device.type != "cuda" or model.dtype == torch.float64 or not find_spec("triton"):
        return None
    kinds = {(each.device, each.dtype) for each in model.body.parameters()}
    return Steps(model) if kinds == {(model.device, model.dtype)} and _is_plain(model) else None


class Steps:
    """See the module. Not thread-safe.

    The weights it joins are moved, not copied: the model's modules become views of the joined ones, so it costs no
    memory but that of one joined weight while it is made. The model computes what it computed before.
    """

    def __init__(self, model: DecoderModel, kernels: Kernels | None = None):
        """kernels: None: the twins on a GPU, the references elsewhere."""
        self._model, self._shape = model, model.shape
        self._kernels = kernels or kernels_of(model)
        self._layers = layers_of(model)
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
        """The step is really done while warming up, with the same rows as in the replay to come."""
        places = Places(_table(inputs))
        graph, logits = record(lambda: self._step(inputs, places, splits), self._aside, self._pool)
        return _Recording(graph, inputs, logits)

    def _step(self, inputs: Tensor, places: Places, splits: int) -> Tensor:
        """Logits [W, vocabulary]."""
        model, kernels = self._model, self._kernels

        def attend(layer: int, q: Tensor) -> Tensor:
            return kernels.attend(q, places, layer, self._shape, scale=model.scale, splits=splits)

        return step(model, self._layers, kernels, inputs[0], inputs[1], places, attend)


def record(work: Callable[[], Tensor], aside: Any, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
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
    attend: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Logits [W, vocabulary] of tokens at positions [W], their rows written to places. attend: attention [W, Hq, d] of
    a layer's queries [W, Hq, d]. Nothing in it waits for the device, if that does not."""
    x = model.body.embed_tokens(tokens)
    at = model.rotary(positions)
    normed = model.body.layers[0].input_layernorm(x)
    for i, layer in enumerate(layers):
        q = kernels.turn(layer.qkv(normed), at.cos, at.sin, places, i, model.shape, layer.heads)
        attended = attend(i, q)
        x, normed = kernels.add_norm(x, layer.out(attended.flatten(1)), layer.middle.weight, layer.middle.eps)
        x, normed = kernels.add_norm(
            x, layer.down(kernels.gated(layer.gate_up(normed))), layer.last.weight, layer.last.eps
        )
    logits: Tensor = model.lm_head(normed)
    return logits


def _table(inputs: Tensor) -> Tensor:
    """[3, L, W], a view."""
    return inputs[2:].view(3, -1, inputs.shape[1])


def kernels_of(model: DecoderModel) -> Kernels:
    """The twins on a GPU, the references elsewhere."""
    if model.device.type != "cuda" or model.dtype == torch.float64:
        return reference
    from ragkv.kernels import triton_steps

    return triton_steps


def layers_of(model: DecoderModel) -> list[Layer]:
    """What a step needs of every layer; weights are joined, see `Steps`."""
    blocks = list(model.body.layers)
    behind = [*(block.input_layernorm for block in blocks[1:]), model.body.norm]
    return [_layer(block, norm) for block, norm in zip(blocks, behind, strict=True)]


def _layer(block: Any, behind: Any) -> Layer:
    attention, mlp, heads = block.self_attn, block.mlp, None
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm, attention.k_norm
        heads = HeadNorms(torch.stack([q.weight.detach(), k.weight.detach()]), q.variance_epsilon)
    return Layer(
        _join([attention.q_proj, attention.k_proj, attention.v_proj]),
        heads,
        attention.o_proj,
        _norm(block.post_attention_layernorm),
        _join([mlp.gate_proj, mlp.up_proj]),
        mlp.down_proj,
        _norm(behind),
    )


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight.detach(), module.variance_epsilon)


def _join(modules: Sequence[Any]) -> _Product:
    """One product of the modules' rows. Their weights become views of its weight."""
    biases = [module.bias for module in modules if module.bias is not None]
    return _Product(_joined([module.weight for module in modules]), torch.cat(biases).detach() if biases else None)


def _joined(parts: Sequence[nn.Parameter]) -> Tensor:
    """The parts [rows, size] one behind the other, the same memory: what was joined before is not moved again."""
    first, sizes = parts[0], [part.shape[0] for part in parts]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    same = {part.untyped_storage().data_ptr() for part in parts} == {first.untyped_storage().data_ptr()}
    if same and ends[:-1] == [part.data_ptr() for part in parts[1:]]:
        return first.detach().as_strided((sum(sizes), first.shape[1]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, rows in zip(parts, whole.split(sizes), strict=True):
        part.data = rows
    return whole


def _is_plain(model: DecoderModel) -> bool:
    """Whether all products are those of unquantised linear modules, with SiLU between them."""
    linear = [
        getattr(part, name)
        for block in model.body.layers
        for part, names in (
            (block.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
            (block.mlp, ("gate_proj", "up_proj", "down_proj")),
        )
        for name in names
    ]
    return all(type(each) is nn.Linear for each in linear) and model.config.hidden_act == "silu"
