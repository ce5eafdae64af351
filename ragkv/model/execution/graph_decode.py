"""Dense decoding of a few requests as one recorded CUDA graph a step: a token each, or several that are verified.

A decode step of a large model is some hundred small kernels. Launching them one by one from Python takes longer than
the GPU needs to read the weights. A step is therefore recorded once as a CUDA graph and then replayed with one call:

    merged weights      q, k and v of a layer are one product, gate and up another
    own kernels         the operations between products (kernels/decode_step.py); caches are found by address
    static inputs       tokens, positions and cache pointers are copied to the device in one transfer a step

A graph serves any caches of any lengths. There is one graph for each width, a power of two (missing requests are
padded), and for each number of splits of attention (cuda_graphs.py).

`GraphDecoder.decode` gives the logits of `DecoderModel.forward` with `append`, up to the order of additions, and
updates the caches in the same way. Tokens that speculation drafted are further rows of their request: a row attends to
the rows before it, and to itself. `GraphDecoder.queries` is the composite pass of a short question, also as a graph:
its tokens are requests that share one cache, each one row longer than the one before. Without a GPU both run the same
step with the reference kernels and record nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor

from ragkv.kernels import decode_step as reference
from ragkv.kernels.decode_step import CachePointers, StepKernels, splits_of
from ragkv.kernels.paged_attention import PagedBlocks, RawQueries
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.block_tables import BlockPoolMemory, BlockTables, PagedContext
from ragkv.model.execution.cuda_graphs import CUDAGraphPool
from ragkv.model.execution.graph_layers import (
    LayerStack,
    StackInputs,
    decode_layers,
    paged_attention,
    query_layers,
    step_kernels,
)
from ragkv.model.execution.graph_prefill import GraphPrefill
from ragkv.model.execution.merged_weights import merge_weights, supports_merging
from ragkv.model.execution.step_ahead import LaunchedStep, StepAhead
from ragkv.model.execution.step_inputs import pack_inputs, table_of
from ragkv.model.kv_cache import ContextCache

WIDEST = 64
"""Largest number of requests in a graph. More requests are decoded in parts."""
MAX_QUERY_TOKENS, MAX_QUERY_ROWS = 64, 16384
"""Longest question that `queries` takes, and a measure of its longest cache: each token reads all rows."""


def make_graph_decoder(model: DecoderModel, memory: BlockPoolMemory | None = None) -> GraphDecoder | None:
    """Return a graph decoder where the model supports it, else None. `DecoderModel.forward` serves every model.

    The model must be on one GPU, not in float64, with layers made as Llama's, plain linear modules and SiLU, and Triton
    must be installed.
    """
    supported = model.wired and supports_merging(model.body) and not model.spread
    return GraphDecoder(model, memory=memory) if supported else None


class GraphDecoder:
    """Recorded decode steps of one model. It merges the model's weights. Not thread-safe.

    Attributes:
        prefill: whole passes of few rows, recorded likewise.
    """

    def __init__(self, model: DecoderModel, kernels: StepKernels | None = None, memory: BlockPoolMemory | None = None):
        """Merge the weights.

        Args:
            model: the model.
            kernels: None for the Triton kernels on a GPU and the references elsewhere.
            memory: where blocks lie that requests read in place; None where they read their own caches only.
        """
        self._model, self._shape = model, model.shape
        self._memory, self._tables = memory, list[BlockTables]()
        self._versions = count()
        self._stack = LayerStack(model, merge_weights(model.body), kernels or step_kernels(model))
        self._attend_paged = paged_attention(self._stack.kernels)
        records = model.device.type == "cuda" and self._stack.kernels is not reference
        self._graphs = CUDAGraphPool(model.device) if records else None
        # Requests that pad a graph to its width hold no rows and write here.
        row = (1, model.shape.kv_heads, model.shape.head_dim)
        self._scratch = [torch.zeros(row, dtype=model.dtype, device=model.device) for _ in ("k", "v")]
        self._latest: LaunchedStep | None = None
        self._ahead: StepAhead | None = None
        self.prefill = GraphPrefill(self._stack, self._graphs, self._scratch)

    @property
    def recorded(self) -> int:
        """Number of recorded graphs."""
        return 0 if self._graphs is None else len(self._graphs)

    @torch.inference_mode()
    def decode(
        self,
        caches: Sequence[ContextCache],
        tokens: Sequence[int],
        positions: Sequence[int],
        paged: Sequence[PagedContext | None] = (),
    ) -> Tensor:
        """Append tokens to requests and return logits [W, vocabulary], a row for each token.

        Where this fails the caches are unchanged, except for capacity and for rows in parts of `WIDEST` before it.

        Args:
            caches: the cache of each token. It may occur again: the later token follows the earlier one.
            tokens: the tokens.
            positions: their positions, which must be after all positions in the cache.
            paged: what each of them reads in place beside its cache; empty where none does.
        """
        ahead, self._ahead, self._latest = self._ahead, None, None
        logits = None if ahead is None else ahead.logits_of(caches, tokens, positions)
        if ahead is not None and logits is not None:
            _append_rows(caches, positions)
            self._latest = ahead.step if logits is ahead.logits else None
            return logits
        parts = [slice(start, start + WIDEST) for start in range(0, len(caches), WIDEST)]
        for tables in self._tables[len(parts) :]:  # of a step with more parts
            tables.update((), 0)
        rows = [
            self._decode(number, caches[part], tokens[part], positions[part], paged[part])
            for number, part in enumerate(parts)
        ]
        if len(rows) == 1:
            return rows[0]
        self._latest = None
        none = torch.empty(0, self._model.config.vocab_size, dtype=self._model.dtype, device=self._model.device)
        return torch.cat([none, *rows])

    def is_ahead(self, cache: ContextCache) -> bool:
        """Whether the next step of a request was launched by `decode_ahead`. Only such requests can share it."""
        return self._ahead is not None and self._ahead.has(cache)

    @torch.inference_mode()
    def decode_ahead(self, tokens: Tensor, known: Callable[[], Sequence[int]]) -> None:
        """Launch the next step of the requests of the latest `decode`, before the host knows their tokens.

        The next `decode` takes its logits from there if it asks for these tokens, of all requests or of some. Nothing
        is launched where requests have several rows or read blocks in place, or where a cache would have to grow.

        Args:
            tokens: token [W] int64 of each request, on the device.
            known: returns them on the host, once they are there.
        """
        if self._latest is not None:
            self._ahead = self._latest.run_ahead(tokens, known)

    def _decode(
        self,
        number: int,
        caches: Sequence[ContextCache],
        tokens: Sequence[int],
        positions: Sequence[int],
        paged: Sequence[PagedContext | None],
    ) -> Tensor:
        """Decode a part of at most `WIDEST` rows, as `decode` does. number: of the part."""
        blocks = self._paged_blocks(number, paged, 1 + max(positions))
        # The next replay overwrites the original.
        logits = self._run(caches, tokens, positions, paged=blocks)[0].clone()
        # The replay runs asynchronously, so this bookkeeping costs no time of the step.
        _append_rows(caches, positions)
        return logits[: len(caches)]

    def supports_queries(self, cache: ContextCache, tokens: Sequence[int]) -> bool:
        """Return whether `queries` is worthwhile for a question behind the rows of the cache."""
        count = len(tokens)
        return 0 < count <= MAX_QUERY_TOKENS and count * max(cache.lengths) <= MAX_QUERY_ROWS * MAX_QUERY_TOKENS // 2

    @torch.inference_mode()
    def queries(self, cache: ContextCache, tokens: Sequence[int], position: int, depth: int) -> list[Tensor]:
        """Compute the pre-RoPE queries of a question, as a pass captures them.

        The cache keeps its rows; only its capacity may grow.

        Args:
            cache: the context.
            tokens: the question.
            position: position of the first token, behind all rows of the cache.
            depth: number of layers to run.

        Returns:
            Queries [T, Hq, d] of each layer below `depth`. On a GPU they are valid until the next call.
        """
        count = len(tokens)
        return [q[:count] for q in self._run([cache] * count, tokens, range(position, position + count), depth)]

    def _paged_blocks(self, number: int, paged: Sequence[PagedContext | None], positions: int) -> PagedBlocks | None:
        """Return what a part of a step reads in place; None where it reads nothing so.

        Each part has tables of its own, because its rows stay the same from step to step.

        Args:
            number: of the part.
            paged: as in `decode`.
            positions: of the longest context.
        """
        if any(each is not None for each in paged):
            if self._memory is None:
                raise ValueError("a request reads blocks in place, and the decoder was made without their memory")
            while len(self._tables) <= number:
                self._tables.append(BlockTables(self._model, self._memory, WIDEST, self._versions))
            return self._tables[number].update(paged, positions)
        if number < len(self._tables):
            self._tables[number].update((), 0)
        return None

    def _run(
        self,
        caches: Sequence[ContextCache],
        tokens: Sequence[int],
        positions: Sequence[int],
        depth: int | None = None,
        paged: PagedBlocks | None = None,
    ) -> list[Tensor]:
        """Pad to a power of two and run a step.

        Args:
            caches: the cache of each row, grown to hold its rows. A later row of a cache attends to the earlier ones.
            tokens: the token of each row.
            positions: its position.
            depth: as in `_step`.
            paged: as in `_step`.
        """
        count, layers = len(tokens), self._shape.layers
        inputs = pack_inputs(caches, tokens, positions, self._scratch[0].data_ptr(), self._scratch[1].data_ptr())
        width = inputs.shape[1]
        splits = splits_of(width, self._shape.kv_heads, 1 + int(table_of(inputs)[2].max()))
        if self._graphs is None:
            scratch = [(self._scratch[0], self._scratch[1])] * (width - count)
            pairs = [[*(cache.buffers(layer, 0) for cache in caches), *scratch] for layer in range(layers)]
            k, v = ([[pair[side] for pair in layer] for layer in pairs] for side in (0, 1))

            def run(inputs: Tensor) -> list[Tensor]:
                return self._step(inputs, CachePointers(table_of(inputs), k, v), splits, depth, paged)

            def run_again(change: Callable[[Tensor], None]) -> Tensor | None:
                change(inputs)
                return run(inputs)[0]

            result = run(inputs)
        else:
            # A graph holds the addresses of the tables that were there when it was recorded.
            graphs, key = self._graphs, ("step", width, splits, depth, None if paged is None else paged.version)

            def run_again(change: Callable[[Tensor], None]) -> Tensor | None:
                logits = graphs.run_again(key, change)
                return None if logits is None else logits[0]

            result = graphs.run(
                key, inputs, lambda inputs: self._step(inputs, CachePointers(table_of(inputs)), splits, depth, paged)
            )
        self._latest = LaunchedStep.of(caches, positions, run_again) if depth is None and paged is None else None
        return result

    def _step(
        self, inputs: Tensor, pointers: CachePointers, splits: int, depth: int | None, paged: PagedBlocks | None
    ) -> list[Tensor]:
        """Run a step.

        Args:
            inputs: tokens, positions and table [2 + 3 L, W] on the device.
            pointers: the caches.
            splits: as in `decode_step.attend`.
            depth: layer to stop before; None runs all.
            paged: what rows read in place; None where they read their own caches only.

        Returns:
            [logits [W, vocabulary]]; with a depth, the pre-RoPE queries [W, Hq, d] of the layers below it.
        """
        model, stack, rows = self._model, self._stack, StackInputs(inputs[0], inputs[1], pointers)

        def attend(layer: int, q: Tensor, qkv: Tensor) -> Tensor:
            if paged is None:
                return stack.kernels.attend(q, pointers, layer, self._shape, scale=model.scale, splits=splits)
            raw = RawQueries(qkv, inputs[1], stack.layers[layer].head_norms)
            return self._attend_paged(q, raw, pointers, paged, layer, scale=model.scale, splits=splits)

        if depth is None:
            return [decode_layers(stack, rows, attend)]
        return query_layers(LayerStack(model, stack.layers[:depth], stack.kernels), rows, attend)


def _append_rows(caches: Sequence[ContextCache], positions: Sequence[int]) -> None:
    for cache, position in zip(caches, positions, strict=True):
        cache.append_row(position)
