"""Dense decoding of a few requests, a token each, without a launch for every operation: one recorded graph a step.

A decode step of a large model is some hundred small kernels, and starting them one by one from Python takes longer than
the GPU needs to read the weights. So a step is recorded once as a CUDA graph, and then replayed with one call:

    joined products     q, k and v of a layer are one product, gate and up another
    own kernels         what is left between products (kernels/steps.py), caches found by address
    static inputs       tokens, positions and the table of caches: one copy to the device a step

A graph serves any caches of any lengths. There is one for each width, a power of two (missing requests are made up),
and for each number of parts that attention is divided into (recorder.py).

`Steps.read` gives the logits of `DecoderModel.forward` with `append`, up to the order of additions, and leaves the
caches as that does. `Steps.ask` is the composite pass of a short question, likewise a graph: to the kernels its tokens
are requests whose caches are one and the same, each a row longer than the one before. Without a GPU both run the same
step with the references and record nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragkv.kernels import decode_step as reference
from ragkv.kernels.decode_step import CachePointers, StepKernels, splits_of
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.cuda_graphs import CUDAGraphPool
from ragkv.model.execution.graph_layers import decode_layers, kernels_of, query_layers
from ragkv.model.execution.graph_prefill import GraphPrefill
from ragkv.model.execution.merged_weights import merge_weights, supports_merging
from ragkv.model.kv_cache import ContextCache

WIDEST = 32
"""Requests of one graph; more are read in parts."""
ASKED, AMONG = 64, 16384
"""A question of more tokens is not worth asking by a graph, and neither are more rows: each token reads all of them."""


def make_graph_decoder(model: DecoderModel) -> GraphDecoder | None:
    """Steps of a model that they can be recorded for, None otherwise: its forward serves every model.

    It must lie on one GPU, not in float64, with plain linear modules and SiLU between them, and Triton must be there.
    """
    return GraphDecoder(model) if supports_merging(model.body) and not model.spread else None


class GraphDecoder:
    """See the module. Not thread-safe.

    The weights of the model are joined (joined.py). passes: whole passes of few rows, likewise recorded (replay.py).
    """

    def __init__(self, model: DecoderModel, kernels: StepKernels | None = None):
        """kernels: None: the twins on a GPU, the references elsewhere."""
        self._model, self._shape = model, model.shape
        self._kernels = kernels or kernels_of(model)
        self._layers = merge_weights(model.body)
        records = model.device.type == "cuda" and self._kernels is not reference
        self._graphs = CUDAGraphPool(model.device) if records else None
        # Requests that are made up to fill a width hold nothing and write here.
        row = (1, model.shape.kv_heads, model.shape.head_dim)
        self._nowhere = [torch.zeros(row, dtype=model.dtype, device=model.device) for _ in ("k", "v")]
        self.prefill = GraphPrefill(model, self._layers, self._kernels, self._graphs, self._nowhere)

    @property
    def recorded(self) -> int:
        """Graphs that are kept."""
        return 0 if self._graphs is None else len(self._graphs)

    @torch.inference_mode()
    def decode(self, caches: Sequence[ContextCache], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One token of each request, appended to its cache at its position, which must be behind all others in it;
        returns logits [W, vocabulary]. Every request has a cache of its own.

        Where it fails the caches are as they were, but for room.
        """
        parts = [slice(start, start + WIDEST) for start in range(0, len(caches), WIDEST)]
        if len(parts) != 1:
            none = torch.empty(0, self._model.config.vocab_size, dtype=self._model.dtype, device=self._model.device)
            return torch.cat([none, *(self.decode(caches[part], tokens[part], positions[part]) for part in parts)])
        stores = [[cache.buffers(layer, 1) for cache in caches] for layer in range(self._shape.layers)]
        held = [[cache.lengths[layer] for cache in caches] for layer in range(self._shape.layers)]
        logits = self._run(tokens, positions, stores, held)[0].clone()  # the next replay does not change it
        # A replay goes on by itself: keeping the books costs no time of the step.
        for cache, position in zip(caches, positions, strict=True):
            at = torch.tensor([position])
            for layer in range(self._shape.layers):
                cache.reserve(layer, at)
        return logits[: len(caches)]

    def supports_queries(self, cache: ContextCache, tokens: Sequence[int]) -> bool:
        """Whether `ask` is worth it for a question behind what the cache holds."""
        return 0 < len(tokens) <= ASKED and len(tokens) * max(cache.lengths) <= AMONG * ASKED // 2

    @torch.inference_mode()
    def queries(self, cache: ContextCache, tokens: Sequence[int], position: int, depth: int) -> list[Tensor]:
        """A question's tokens at positions from `position` on, behind all rows of the cache, which stays as it is but
        for room; returns the pre-RoPE queries [T, Hq, d] of the layers below `depth`, as a pass captures them.

        On a GPU they are good until the next call.
        """
        count, layers = len(tokens), range(self._shape.layers)
        stores = [[cache.buffers(layer, count)] * count for layer in layers]
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
        if self._graphs is None:
            return self._step(host, CachePointers(_table(host), k, v), splits, depth)
        key = ("step", host.shape[1], splits, depth)
        return self._graphs.run(
            key, host, lambda inputs: self._step(inputs, CachePointers(_table(inputs)), splits, depth)
        )

    def _step(self, inputs: Tensor, places: CachePointers, splits: int, depth: int | None) -> list[Tensor]:
        """Logits [W, vocabulary], alone; with a depth the pre-RoPE queries [W, Hq, d] of the layers below it."""
        model, kernels = self._model, self._kernels

        def attend(layer: int, q: Tensor) -> Tensor:
            return kernels.attend(q, places, layer, self._shape, scale=model.scale, splits=splits)

        if depth is None:
            return [decode_layers(model, self._layers, kernels, inputs[0], inputs[1], places, attend)]
        return query_layers(model, self._layers[:depth], kernels, inputs[0], inputs[1], places, attend)


def _table(inputs: Tensor) -> Tensor:
    """[3, L, W], a view."""
    return inputs[2:].view(3, -1, inputs.shape[1])
