"""Decoding of a few requests whose KV is in host memory, with PSA's pool (arXiv 2503.00392, its system part).

    PooledKV         the KV of W requests: blocks in pinned host memory; digests, near rows and a pool of slots on the
                     device
    PooledDecoder    a decode step of all of them, recorded as one CUDA graph. Each kv head reads its blocks
                     progressively (`kernels/pool.py`); blocks without a slot cross the bus.

A context is divided into blocks when its request starts. The rows of the last, incomplete block stay near for the whole
answer, and so do the rows of the answer. Answers are short, so no block is completed and digested while decoding. All
state is on the device, and the host never waits for a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.kernels import pool as reference
from ragkv.kernels.decode_step import CachePointers
from ragkv.kernels.pool import PoolRead, ProgressiveKernel, SlotPool, StopRule, rank
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.cuda_graphs import capture
from ragkv.model.execution.graph_layers import LayerStack, StackInputs, decode_layers, step_kernels
from ragkv.model.execution.merged_weights import merge_weights
from ragkv.model.kv_cache import ContextCache
from ragkv.sparse.attention import score_dtype
from ragkv.sparse.blocks import BlockDigests, cuboid
from ragkv.sparse.psa import Psa


class PooledKV:
    """KV of W requests with at most B full blocks each and S slots a partition (`kernels.pool.SlotPool`).

    Attributes:
        host: [W]. All blocks of a request, in one allocation.
        digests: [L, W, Hkv, B, 2d].
        hidden: [L, W, B] bool. Blocks that are not ranked because they are near or do not exist.
        natural: [L, W, Hkv, B] int64. The ranked blocks in cache order, then the hidden ones.
        near_lengths: [L][W]. Number of near rows.
        positions: [W]. Position of the next token.
        pool: the slots.
    """

    def __init__(self, caches: Sequence[ContextCache], params: Psa, share: float, room: int):
        """Copy the caches.

        PyTorch allocates pinned memory in powers of two: a request of 4.1 GiB takes 8.

        Args:
            caches: the contexts. The same cache may occur more than once.
            params: the policy.
            share: slots of a partition, as a share of the blocks of the longest request.
            room: largest number of tokens to decode.

        Raises:
            ValueError: `share` is not from 0 to 1, or `params` has dense layers or reaches beyond the cache.
        """
        if not 0 <= share <= 1:
            raise ValueError("share must be from 0 to 1")
        if params.dense or params.reach != "kept":
            raise ValueError("a pool reads blocks progressively in all layers and has no blocks outside the cache")
        first = caches[0]
        self.shape, self.size, self.dtype, self.device = first.shape, params.block, first.dtype, first.device
        layers, width, heads, d = self.shape.layers, len(caches), self.shape.kv_heads, self.shape.head_dim
        counts = [[each // self.size for each in cache.lengths] for cache in caches]
        most = max(1, *(max(each) for each in counts))
        self.host = [self._pinned(sum(each) * heads * 2 * self.size * d) for each in counts]
        self.digests = torch.zeros(layers, width, heads, most, 2 * d, dtype=self.dtype, device=self.device)
        near = (params.sinks + 1) * self.size + room
        k, v = (torch.zeros(layers, width, near, heads, d, dtype=self.dtype, device=self.device) for _ in range(2))
        self._near, self._clock, self._is_reset = (k, v), 0, False
        blocks, hidden = list[list[Tensor]](), torch.ones(layers, width, most, dtype=torch.bool)
        self.near_lengths = [[0] * width for _ in range(layers)]
        self.positions = [1 + max(int(cache.positions(layer).max()) for layer in range(layers)) for cache in caches]
        for layer in range(layers):
            blocks.append([self._part(request, layer, counts[request]) for request in range(width)])
            for request, cache in enumerate(caches):
                sinks = self._put(layer, request, cache, params.sinks, blocks[layer][request])
                hidden[layer, request, : counts[request][layer]] = False
                hidden[layer, request, sinks] = True
        natural = hidden.to(torch.uint8).argsort(dim=-1, stable=True)
        ranked = (~hidden).sum(-1, dtype=torch.int32)
        self.hidden = hidden.to(self.device)
        self.natural = natural[:, :, None].expand(-1, -1, heads, -1).contiguous().to(self.device)
        slots = math.ceil(share * most)
        self.pool = self._make_pool(blocks, ranked, most, slots)
        self._initial_blocks = [
            [natural[layer, request, : min(slots, int(ranked[layer, request]))] for request in range(width)]
            for layer in range(layers)
        ]
        self.reset()

    @property
    def near(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """K and V of near rows: [L][W] tensors [capacity, Hkv, d]."""
        k, v = ([list(layer.unbind(0)) for layer in store.unbind(0)] for store in self._near)
        return k, v

    @property
    def bytes(self) -> int:
        """Bytes of K and V of one block."""
        return 2 * self.size * self.shape.head_dim * self.dtype.itemsize

    @property
    def is_reset(self) -> bool:
        """Whether no step has changed the pool since `reset`."""
        return self._is_reset

    def tick(self) -> int:
        """Return the number, from 1 on, of a new step that may change the pool."""
        self._clock, self._is_reset = self._clock + 1, False
        return self._clock

    def reset(self) -> None:
        """Fill the slots of every partition with its first ranked blocks, not used by any step."""
        pool = self.pool
        pool.slot_of.fill_(-1)
        pool.block_of.fill_(-1)
        pool.last_used.zero_()
        for layer, requests in enumerate(self._initial_blocks):
            for request, first in enumerate(requests):
                numbers, count = torch.arange(len(first), dtype=torch.int32, device=self.device), len(first)
                pool.block_of[layer, request, :, :count] = first.to(self.device, torch.int32)
                pool.slot_of[layer, request][:, first.to(self.device)] = numbers
                for slot, block, many in _runs(first.tolist()):
                    # One copy a head: source and destination of each are contiguous.
                    for head, host in enumerate(pool.blocks[layer][request]):
                        pool.slots[layer, request, head, slot : slot + many].copy_(host[block : block + many])
        self._is_reset = True

    def _make_pool(self, blocks: list[list[Tensor]], ranked: Tensor, most: int, slots: int) -> SlotPool:
        """Allocate a pool. blocks: [L][W]; ranked: [L, W]; most: blocks of the longest request."""
        partitions = (*ranked.shape, self.shape.kv_heads)
        addresses = [[[each.data_ptr(), each[0].nbytes] for each in layer] for layer in blocks]
        slot_shape = (slots, 2, self.size, self.shape.head_dim)
        return SlotPool(
            torch.tensor(addresses, dtype=torch.int64, device=self.device),
            ranked.to(self.device),
            torch.zeros(*partitions, *slot_shape, dtype=self.dtype, device=self.device),
            torch.empty(*partitions, most, dtype=torch.int32, device=self.device),
            torch.empty(*partitions, slots, dtype=torch.int32, device=self.device),
            torch.empty(*partitions, slots, dtype=torch.int32, device=self.device),
            blocks,
        )

    def _pinned(self, numbers: int) -> Tensor:
        return torch.empty(numbers, dtype=self.dtype, pin_memory=self.device.type == "cuda")

    def _part(self, request: int, layer: int, counts: Sequence[int]) -> Tensor:
        """View the blocks [Hkv, B, 2, size, d] of a layer in the request's memory."""
        heads, d = self.shape.kv_heads, self.shape.head_dim
        start, row = sum(counts[:layer]), heads * 2 * self.size * d
        whole = self.host[request][start * row : (start + counts[layer]) * row]
        return whole.view(heads, counts[layer], 2, self.size, d)

    def _put(self, layer: int, request: int, cache: ContextCache, sinks: int, host: Tensor) -> Tensor:
        """Copy one layer of a request and return its sink blocks."""
        k, v, table = cache.k(layer), cache.v(layer), BlockDigests(self.size, sinks, None)
        table.update(k, cache.positions(layer))
        tail = len(k) // self.size
        keys, values = (x[: tail * self.size].unflatten(0, (tail, self.size)) for x in (k, v))
        host.copy_(torch.stack([keys, values]).permute(3, 1, 0, 2, 4).contiguous())
        if tail:
            self.digests[layer, request, :, :tail] = torch.cat(cuboid(keys.to(score_dtype(self.dtype))), -1).transpose(
                0, 1
            )
        for store, x in zip(self._near, (k, v), strict=True):
            rows = table.near_rows(x, tail)
            store[layer, request, : len(rows)] = rows
        self.near_lengths[layer][request] = len(table.sinks) * self.size + len(k) - tail * self.size
        return table.sinks.cpu()


@dataclass(frozen=True)
class _Recording:
    """A recorded step and the logits that a replay overwrites."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor


class PooledDecoder:
    """Decode steps of all requests of one `PooledKV` together. It merges the model's weights. Not thread-safe.

    Attributes:
        kv: the requests.
        reads: the result of attention in each layer of the last step. A recorded step overwrites them.
    """

    def __init__(
        self, model: DecoderModel, kv: PooledKV, params: Psa | None, progress: ProgressiveKernel | None = None
    ) -> None:
        """Prepare.

        Args:
            model: the model.
            kv: the requests.
            params: the policy; None reads every block and leaves the pool unchanged.
            progress: None for the Triton kernel on a GPU and the reference elsewhere.

        Raises:
            ValueError: `params` has blocks of another size than `kv`.
        """
        if params is not None and params.block != kv.size:
            raise ValueError(f"the pool has blocks of {kv.size} rows")
        self.kv, self.reads = kv, list[PoolRead]()
        self._model, self._stack = model, LayerStack(model, merge_weights(model.body), step_kernels(model))
        self._progress, self._ranks = progress or progressive_kernel(model), params is not None
        self._rule = stop_rule(params)
        self._steps, layers = 0, model.shape.layers
        k, v = kv.near
        addresses = [[each.data_ptr() for each in layer] for layer in (*k, *v)]
        self._inputs = torch.zeros(3 + 3 * layers, len(kv.positions), dtype=torch.int64, device=model.device)
        self._inputs[3 : 3 + 2 * layers] = torch.tensor(addresses, dtype=torch.int64)
        self._pointers = CachePointers(self._inputs[3:].view(3, layers, -1), k, v)
        self._recorded: _Recording | None = None
        self._records = model.device.type == "cuda" and self._progress is not reference.attend_progressively

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each request and return logits [W, vocabulary].

        The next call overwrites the logits and `reads`.

        Raises:
            ValueError: there is no room for another token.
        """
        self._prepare(tokens)
        if not self._records:
            return self._step()
        with torch.cuda.device(self._model.device), torch.inference_mode():
            if self._recorded is None:
                graph, logits = capture(self._step, torch.cuda.Stream(self._model.device))
                self._recorded = _Recording(graph, logits)
            self._recorded.graph.replay()
        return self._recorded.logits

    @torch.inference_mode()
    def _prepare(self, tokens: Sequence[int]) -> None:
        """Copy the inputs of the next step to the device in one transfer.

        Raises:
            ValueError: there is no room for another token.
        """
        if max(map(max, self.kv.near_lengths)) + self._steps >= self.kv.near[0][0][0].shape[0]:
            raise ValueError("no room for another token")
        numbers = [list(tokens), [each + self._steps for each in self.kv.positions]]
        numbers.append([self.kv.tick() if self._ranks else 0] * len(tokens))
        numbers += [[each + self._steps for each in layer] for layer in self.kv.near_lengths]
        self._steps += 1
        host = torch.tensor(numbers, dtype=torch.int64)
        if self._model.device.type == "cuda":
            host = host.pin_memory()
        inputs = host.to(self._model.device, non_blocking=True)
        self._inputs[:3] = inputs[:3]
        self._inputs[-self._model.shape.layers :] = inputs[3:]

    @torch.inference_mode()
    def _step(self) -> Tensor:
        self.reads = []
        return decode_layers(self._stack, StackInputs(self._inputs[0], self._inputs[1], self._pointers), self.attend)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Compute attention [W, Hq, d] of one layer's queries [W, Hq, d]."""
        kv = self.kv
        order = rank(q, kv.digests[layer], kv.hidden[layer]) if self._ranks else kv.natural[layer]
        read = self._progress(
            q, order, kv.pool, self._pointers, layer, kv.shape, self._rule, self._inputs[2, :1], scale=self._model.scale
        )
        self.reads.append(read)
        return read.out


def _runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (index in the list, first block, count) of each run of consecutive blocks."""
    starts = [i for i, block in enumerate(blocks) if not i or block != blocks[i - 1] + 1]
    ends = [*starts[1:], len(blocks)]
    return [(start, blocks[start], end - start) for start, end in zip(starts, ends, strict=False)]


def stop_rule(params: Psa | None) -> StopRule:
    """Return the stop rule of a policy; without one, all blocks are read."""
    if params is None:
        return StopRule(1.0, 4)
    return StopRule(params.threshold, params.micro, params.least, params.group == "mean", params.part)


def progressive_kernel(model: DecoderModel) -> ProgressiveKernel:
    """Return the Triton kernel on a GPU, the reference elsewhere and in float64."""
    if model.device.type != "cuda" or model.dtype == torch.float64:
        return reference.attend_progressively
    from ragkv.kernels import triton_pool

    return triton_pool.attend_progressively
