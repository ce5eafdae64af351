"""Decoding a few requests whose KV lies in host memory: PSA's pool (arXiv 2503.00392, its system part), a token each.

    PooledKV       what W requests hold: blocks in pinned host memory; digests, near rows and a pool of slots on the
                   device
    PooledSteps    a step of all of them, recorded as one CUDA graph: each kv head reads its blocks progressively
                   (`kernels/pool.py`), what has no slot over the bus

A context is divided into blocks when its request comes. Its last rows, from the block on that a new row would go to,
stay near for the whole answer, and so do the rows of the answer: answers are short, and so no block gets its digest
while decoding. All state is on the device, and a step waits for nothing.
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
from ragkv.model.execution.graph_layers import decode_layers, kernels_of
from ragkv.model.execution.merged_weights import merge_weights
from ragkv.model.kv_cache import ContextCache
from ragkv.sparse.attention import score_dtype
from ragkv.sparse.blocks import BlockDigests, cuboid
from ragkv.sparse.psa import Psa


class PooledKV:
    """KV of W requests, at most B full blocks each; S slots a partition (`kernels.pool.Pool`).

    host [W]: all blocks of a request, one allocation · digests [L, W, Hkv, B, 2d] · hidden, bool [L, W, B]: blocks that
    are not ranked: near, or not there · natural [L, W, Hkv, B] int64: the ranked blocks as they stand in the cache,
    then the hidden ones · held: near rows [L, W] · positions [W]: of the next token.
    """

    def __init__(self, caches: Sequence[ContextCache], params: Psa, share: float, room: int):
        """Copies the caches, which may be the same one more than once. share: slots, of the blocks of the longest
        request · room: tokens that may come.

        PyTorch takes pinned memory in powers of two: a request of 4.1 GiB costs 8.
        Raises ValueError for a share that is none, and where params want dense layers or reach beyond the cache.
        """
        if not 0 <= share <= 1:
            raise ValueError("share must be from 0 to 1")
        if params.dense or params.reach != "kept":
            raise ValueError("blocks in a pool are read progressively in all layers, and none are elsewhere")
        first = caches[0]
        self.shape, self.size, self.dtype, self.device = first.shape, params.block, first.dtype, first.device
        layers, width, heads, d = self.shape.layers, len(caches), self.shape.kv_heads, self.shape.head_dim
        counts = [[each // self.size for each in cache.lengths] for cache in caches]
        most = max(1, *(max(each) for each in counts))
        self.host = [self._pinned(sum(each) * heads * 2 * self.size * d) for each in counts]
        self.digests = torch.zeros(layers, width, heads, most, 2 * d, dtype=self.dtype, device=self.device)
        near = (params.sinks + 1) * self.size + room
        k, v = (torch.zeros(layers, width, near, heads, d, dtype=self.dtype, device=self.device) for _ in range(2))
        self._near, self._clock, self._settled = (k, v), 0, False
        blocks, hidden = list[list[Tensor]](), torch.ones(layers, width, most, dtype=torch.bool)
        self.held = [[0] * width for _ in range(layers)]
        self.positions = [1 + max(int(cache.positions(layer).max()) for layer in range(layers)) for cache in caches]
        for layer in range(layers):
            blocks.append([self._part(of, layer, counts[of]) for of in range(width)])
            for of, cache in enumerate(caches):
                sinks = self._put(layer, of, cache, params.sinks, blocks[layer][of])
                hidden[layer, of, : counts[of][layer]] = False
                hidden[layer, of, sinks] = True
        natural = hidden.to(torch.uint8).argsort(dim=-1, stable=True)
        ranked = (~hidden).sum(-1, dtype=torch.int32)
        self.hidden = hidden.to(self.device)
        self.natural = natural[:, :, None].expand(-1, -1, heads, -1).contiguous().to(self.device)
        addresses = [[[each.data_ptr(), each[0].nbytes] for each in line] for line in blocks]
        slots = math.ceil(share * most)
        self.pool = SlotPool(
            torch.tensor(addresses, dtype=torch.int64, device=self.device),
            ranked.to(self.device),
            torch.zeros(layers, width, heads, slots, 2, self.size, d, dtype=self.dtype, device=self.device),
            torch.empty(layers, width, heads, most, dtype=torch.int32, device=self.device),
            torch.empty(layers, width, heads, slots, dtype=torch.int32, device=self.device),
            torch.empty(layers, width, heads, slots, dtype=torch.int32, device=self.device),
            blocks,
        )
        self._first = [
            [natural[layer, of, : min(slots, int(ranked[layer, of]))] for of in range(width)] for layer in range(layers)
        ]
        self.settle()

    @property
    def near(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """K and V [L][W] of near rows with their room [capacity, Hkv, d]."""
        k, v = ([list(layer.unbind(0)) for layer in store.unbind(0)] for store in self._near)
        return k, v

    @property
    def bytes(self) -> int:
        """Bytes of K and V of one block."""
        return 2 * self.size * self.shape.head_dim * self.dtype.itemsize

    @property
    def settled(self) -> bool:
        """Whether the pool still is as `settle` left it."""
        return self._settled

    def tick(self) -> int:
        """The number of a new step that may change the pool, from 1 on."""
        self._clock, self._settled = self._clock + 1, False
        return self._clock

    def settle(self) -> None:
        """The pool as at the beginning: it holds the first ranked blocks of every partition, read by no step."""
        pool = self.pool
        pool.place.fill_(-1)
        pool.owner.fill_(-1)
        pool.used.zero_()
        for layer, line in enumerate(self._first):
            for of, first in enumerate(line):
                numbers, count = torch.arange(len(first), dtype=torch.int32, device=self.device), len(first)
                pool.owner[layer, of, :, :count] = first.to(self.device, torch.int32)
                pool.place[layer, of][:, first.to(self.device)] = numbers
                for slot, block, many in _runs(first.tolist()):
                    for head, host in enumerate(pool.blocks[layer][of]):  # each copy from and to one piece of memory
                        pool.slots[layer, of, head, slot : slot + many].copy_(host[block : block + many])
        self._settled = True

    def _pinned(self, numbers: int) -> Tensor:
        return torch.empty(numbers, dtype=self.dtype, pin_memory=self.device.type == "cuda")

    def _part(self, of: int, layer: int, counts: Sequence[int]) -> Tensor:
        """Blocks [Hkv, B, 2, size, d] of a layer, a view of the request's memory."""
        heads, d = self.shape.kv_heads, self.shape.head_dim
        start, row = sum(counts[:layer]), heads * 2 * self.size * d
        whole = self.host[of][start * row : (start + counts[layer]) * row]
        return whole.view(heads, counts[layer], 2, self.size, d)

    def _put(self, layer: int, of: int, cache: ContextCache, sinks: int, host: Tensor) -> Tensor:
        """Copy one layer of a request; returns its sink blocks."""
        k, v, known = cache.k(layer), cache.v(layer), BlockDigests(self.size, sinks, None)
        known.update(k, cache.positions(layer))
        tail = len(k) // self.size
        keys, values = (x[: tail * self.size].unflatten(0, (tail, self.size)) for x in (k, v))
        host.copy_(torch.stack([keys, values]).permute(3, 1, 0, 2, 4).contiguous())
        if tail:
            self.digests[layer, of, :, :tail] = torch.cat(cuboid(keys.to(score_dtype(self.dtype))), -1).transpose(0, 1)
        for store, x in zip(self._near, (k, v), strict=True):
            rows = known.near_rows(x, tail)
            store[layer, of, : len(rows)] = rows
        self.held[layer][of] = len(known.sinks) * self.size + len(k) - tail * self.size
        return known.sinks.cpu()


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class PooledDecoder:
    """Steps of the requests of one `PooledKV`, all of them together. Not thread-safe.

    Joins the model's weights as `ragkv.model.execution.graph_decode.Steps` does. met: of the last step, by layer; a recorded step writes them
    anew.
    """

    def __init__(
        self, model: DecoderModel, kv: PooledKV, params: Psa | None, progress: ProgressiveKernel | None = None
    ) -> None:
        """params: None: every block is read, and none of them changes its place · progress: None: the twin on a GPU,
        the reference elsewhere.

        Raises ValueError where params have blocks of another size.
        """
        if params is not None and params.block != kv.size:
            raise ValueError(f"the pool has blocks of {kv.size} rows")
        self.kv, self.reads = kv, list[PoolRead]()
        self._model, self._kernels, self._layers = model, kernels_of(model), merge_weights(model.body)
        self._progress, self._ranks = progress or progress_of(model), params is not None
        self._rule = rule_of(params)
        self._taken, layers = 0, model.shape.layers
        k, v = kv.near
        addresses = [[each.data_ptr() for each in line] for line in (*k, *v)]
        self._inputs = torch.zeros(3 + 3 * layers, len(kv.positions), dtype=torch.int64, device=model.device)
        self._inputs[3 : 3 + 2 * layers] = torch.tensor(addresses, dtype=torch.int64)
        self._pointers = CachePointers(self._inputs[3:].view(3, layers, -1), k, v)
        self._recorded: _Recording | None = None
        self._records = model.device.type == "cuda" and self._progress is not reference.attend_progressively

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Logits [W, vocabulary] of the next token of each request. Those of the last call are
        overwritten, and so is what it met."""
        self._advance(tokens)
        if not self._records:
            return self._step()
        with torch.cuda.device(self._model.device), torch.inference_mode():
            if self._recorded is None:
                graph, logits = capture(self._step, torch.cuda.Stream(self._model.device))
                self._recorded = _Recording(graph, logits)
            self._recorded.graph.replay()
        return self._recorded.logits

    @torch.inference_mode()
    def _advance(self, tokens: Sequence[int]) -> None:
        """The inputs of the next step: one copy to the device. Raises ValueError where there is no room."""
        if max(map(max, self.kv.held)) + self._taken >= self.kv.near[0][0][0].shape[0]:
            raise ValueError("no room for another token")
        lines = [list(tokens), [each + self._taken for each in self.kv.positions]]
        lines.append([self.kv.tick() if self._ranks else 0] * len(tokens))
        lines += [[each + self._taken for each in line] for line in self.kv.held]
        self._taken += 1
        given = torch.tensor(lines, dtype=torch.int64)
        if self._model.device.type == "cuda":
            given = given.pin_memory()
        ours = given.to(self._model.device, non_blocking=True)
        self._inputs[:3] = ours[:3]
        self._inputs[-self._model.shape.layers :] = ours[3:]

    @torch.inference_mode()
    def _step(self) -> Tensor:
        self.reads = []
        return decode_layers(
            self._model, self._layers, self._kernels, self._inputs[0], self._inputs[1], self._pointers, self.attend
        )

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of one layer's queries [W, Hq, d]."""
        kv = self.kv
        order = rank(q, kv.digests[layer], kv.hidden[layer]) if self._ranks else kv.natural[layer]
        met = self._progress(
            q, order, kv.pool, self._pointers, layer, kv.shape, self._rule, self._inputs[2, :1], scale=self._model.scale
        )
        self.reads.append(met)
        return met.out


def _runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """(where it stands in the list, first block, how many) of consecutive blocks."""
    starts = [i for i, block in enumerate(blocks) if not i or block != blocks[i - 1] + 1]
    ends = [*starts[1:], len(blocks)]
    return [(start, blocks[start], end - start) for start, end in zip(starts, ends, strict=False)]


def rule_of(params: Psa | None) -> StopRule:
    """When reading stops; None: it does not."""
    if params is None:
        return StopRule(1.0, 4)
    return StopRule(params.threshold, params.micro, params.least, params.group == "mean", params.part)


def progress_of(model: DecoderModel) -> ProgressiveKernel:
    """The twin on a GPU, the reference elsewhere."""
    if model.device.type != "cuda" or model.dtype == torch.float64:
        return reference.attend_progressively
    from ragkv.kernels import triton_pool

    return triton_pool.attend_progressively
