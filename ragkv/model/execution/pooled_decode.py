"""Decoding over KV in host memory with a pool of blocks on the device: the system part of PSA (arXiv 2503.00392).

    PooledDecoder   a decode step of all requests that have joined, as one CUDA graph on a GPU
    PooledRequest   one request from its prefill on: it joins, takes steps with the others, and leaves

Each kv head reads its blocks progressively (`kernels/pool.py`). The kernel reads a block without a slot over the bus
and keeps it in a slot, so no thread polls a flag and no block is loaded without being read. While a layer computes, a
stream of its own loads the blocks that the next layer read in the last step and that have no slot. All decisions are
made on the device, and the host never waits for a step. Without a GPU the same code runs with the reference kernels and
without streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ragkv.kernels import pool as reference
from ragkv.kernels.pool import PooledRows, PoolKernels, rank
from ragkv.kernels.slots import refill
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.cuda_graphs import CUDAGraphPool
from ragkv.model.execution.graph_layers import LayerStack, StackInputs, decode_layers, step_kernels
from ragkv.model.execution.kv_pool import KVPool
from ragkv.model.execution.merged_weights import is_plain, merge_weights
from ragkv.model.kv_cache import ContextCache
from ragkv.sparse.psa import Psa

REFILLS = 8
"""How often a step refills the free list, if the model has so many layers."""


@dataclass(frozen=True)
class PoolCounts:
    """What the steps of one request did with the pool. A block is one of one kv head and layer.

    Attributes:
        read: Blocks read.
        hits: Blocks that were read from their slots.
        loaded: Blocks that were copied from host memory.
        keys_read: Keys read, near rows included, over steps, layers and kv heads.
        keys_present: Keys in the cache, likewise.
        steps: Steps.
    """

    read: int = 0
    hits: int = 0
    loaded: int = 0
    keys_read: int = 0
    keys_present: int = 0
    steps: int = 0


class PooledDecoder:
    """Decode steps over a pool. It merges the model's weights. Not thread-safe.

    Attributes:
        model: the model.
        pool: the pool and its index.
    """

    def __init__(self, model: DecoderModel, policy: Psa, budget: int, kernels: PoolKernels | None = None) -> None:
        """Allocate the pool.

        Args:
            model: the model.
            policy: supplies what all requests share (`KVPool`).
            budget: bytes of the slots.
            kernels: None for the Triton kernels on a GPU and the references elsewhere.

        Raises:
            ValueError: the model cannot be decoded so, or the budget holds no block.
        """
        if model.spread or not (model.wired and is_plain(model.body)):
            raise ValueError(f"{model.name} is on several devices, or not made of plain linear layers as Llama is")
        self.model, self.pool = model, KVPool(model.shape, model.dtype, model.device, policy, budget)
        self._stack = LayerStack(model, merge_weights(model.body), step_kernels(model))
        self._kernels = kernels or pool_kernels(model)
        cuda = model.device.type == "cuda"
        self._graphs = CUDAGraphPool(model.device) if cuda and self._kernels is not reference else None
        self._recorded_index, self._missed = self.pool.index, torch.zeros_like(self.pool.index.read)
        self._aside: Any = torch.cuda.Stream(model.device) if cuda else None
        self._refill_every = max(1, model.shape.layers // REFILLS)

    def open(self, cache: ContextCache, params: Psa, rows: int) -> PooledRequest | None:
        """Return a request that may join; None where its policy differs from that of the pool.

        Args:
            cache: the context.
            params: the policy.
            rows: largest number of rows that will be appended.
        """
        return PooledRequest(self, cache, params, rows) if self.pool.serves(params) else None

    @torch.inference_mode()
    def decode(self, requests: Sequence[PooledRequest], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to each request and return logits [W, vocabulary].

        Args:
            requests: requests that have joined, each once.
            tokens: the token of each request.
            positions: its position, which must be after all positions in its cache.
        """
        places, pool = [each.place for each in requests], self.pool
        host = pool.begin_step(places, tokens, positions)
        if self._graphs is None:
            logits = self._step(host.to(self.model.device))
        else:
            if self._recorded_index is not pool.index:  # graphs hold the addresses of an index that is gone
                self._graphs, self._recorded_index = CUDAGraphPool(self.model.device), pool.index
            logits = self._graphs.run("step", host, self._step).clone()
        counts = [pool.index.read, self._missed, pool.index.ahead]
        pool.index.counts.add_(torch.stack([each.sum((0, 2), dtype=torch.int64) for each in counts], dim=1))
        for request in requests:
            request.count_step()
        pool.end_step(places, positions)
        return logits[places]

    def _step(self, inputs: Tensor) -> Tensor:
        """Run a step and return logits [P, vocabulary]."""
        rows = self.pool.rows(inputs)
        self._missed = torch.zeros_like(self.pool.index.read)
        self._load_ahead(0, rows)

        def attend(layer: int, q: Tensor, qkv: Tensor) -> Tensor:
            return self.attend(layer, q, rows)

        return decode_layers(self._stack, StackInputs(inputs[0], inputs[1], rows.near), attend)

    def attend(self, layer: int, q: Tensor, rows: PooledRows) -> Tensor:
        """Compute attention [P, Hq, d] of one layer's queries [P, Hq, d], and load ahead for the next layer."""
        pool, index, model = self.pool, self.pool.index, self.model
        order = rank(q, index.digests[layer], index.hidden[layer])
        if self._aside is not None:
            torch.cuda.current_stream().wait_stream(self._aside)
        found = self._kernels.attend_progressively(
            q, order, pool.pool, rows, layer, model.shape, pool.rule, scale=model.scale
        )
        index.order[layer], index.read[layer], self._missed[layer] = order, found.read, found.missed
        last = layer == model.shape.layers - 1
        if last or layer % self._refill_every == self._refill_every - 1:
            refill(pool.pool, rows.clock, layer)
        if not last:
            self._load_ahead(layer + 1, rows)
        return found.out

    def _load_ahead(self, layer: int, rows: PooledRows) -> None:
        """Load blocks of a layer beside the model, before it attends."""
        index = self.pool.index
        if self._aside is not None:
            self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            self._kernels.load_ahead(
                index.order[layer], index.read[layer], self.pool.pool, rows, layer, index.ahead[layer]
            )


class PooledRequest:
    """One request that is decoded over a pool. Between `join` and `leave` it holds a place.

    Attributes:
        decoder: decodes it.
        cache: its context; in host memory once it has joined. Its last rows are there once it has left.
        params: its policy.
        place: its place; -1 while it has none.
        counts: what its steps did; complete once it has left.
    """

    def __init__(self, decoder: PooledDecoder, cache: ContextCache, params: Psa, rows: int):
        self.decoder, self.cache, self.params, self._rows = decoder, cache, params, rows
        self.place, self.counts = -1, PoolCounts()
        self._near_keys = self._keys = self._steps = 0

    @property
    def fits(self) -> bool:
        """Whether the pool holds what a step of this request and of those that have joined reads at least.

        A request that needs more by itself fits while it is alone; its blocks then cross the bus again and again.
        """
        pool = self.decoder.pool
        needed = pool.working_set(self.cache, self.params)
        return not pool.joined or needed + pool.reserved <= pool.slots

    def join(self) -> None:
        """Take a place and move the cache to host memory. Nothing happens where it has one."""
        if self.place < 0:
            self.place = self.decoder.pool.join(self.cache, self.params, self._rows)

    def leave(self) -> None:
        """Give the place and all slots back. Nothing happens where it has none."""
        if self.place < 0:
            return
        pool = self.decoder.pool
        (read, missed, ahead), self.place = pool.leave(self.place), -1
        keys = self._near_keys * pool.shape.kv_heads + read * pool.size
        present = self._keys * pool.shape.kv_heads
        self.counts = PoolCounts(read, read - missed, missed + ahead, keys, present, self._steps)

    def count_step(self) -> None:
        """Count the keys of a step, before the row that it appends is in the cache."""
        layers = self.decoder.model.shape.layers
        self._near_keys += self.decoder.pool.near_rows(self.place) + layers
        self._keys += sum(self.cache.lengths) + layers
        self._steps += 1


def pool_kernels(model: DecoderModel) -> PoolKernels:
    """Return the Triton kernels on a GPU, the references elsewhere and in float64."""
    if model.device.type != "cuda" or model.dtype == torch.float64:
        return cast(PoolKernels, reference)
    from ragkv.kernels import triton_pool

    return cast(PoolKernels, triton_pool)
