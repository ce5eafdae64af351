"""Dense decoding with a pool for part of the KV: the copy engine copies the rest over the bus in every step.

Two stages take turns. While one layer computes, blocks without a slot are copied for the next two layers, on a separate
stream, with one large copy per kv head and request. After the last layer the first layers of the next step follow, as
their blocks are known. So the bus is never idle, and a step takes as long as its copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ragkv.kernels.pool import ProgressiveKernel, SlotPool
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.pooled_decode import PooledDecoder, PooledKV


class StagedDecoder(PooledDecoder):
    """Dense decoding with staged copies.

    The pool keeps the first blocks of every partition, as `PooledKV.settle` leaves it. Nothing may change it meanwhile:
    a block that loses its slot would not be copied. No graph is recorded, since copies limit a step, not launches.
    """

    def __init__(self, model: DecoderModel, kv: PooledKV, progress: ProgressiveKernel | None = None):
        super().__init__(model, kv, None, progress)
        kv.reset()
        self._records, self._done = False, 0
        pool, width = kv.pool, len(kv.positions)
        ranked, slots = pool.ranked.tolist(), pool.slots.shape[3]
        # Sinks may lie between the blocks that are needed; they are copied too.
        self._from = [
            [int(kv.natural[layer, of, 0, slots:count].min()) if count > slots else len(pool.blocks[layer][of][0])
             for of, count in enumerate(line)]
            for layer, line in enumerate(ranked)
        ]  # fmt: skip
        most = pool.slot_of.shape[3]
        self._stages = torch.empty(2, width, *pool.slots.shape[2:3], most, *pool.slots.shape[4:], dtype=kv.dtype,
                                   device=model.device)  # fmt: skip
        self._pools = [self._over(stage) for stage in self._stages]
        cuda = model.device.type == "cuda"
        self._aside: Any = torch.cuda.Stream(model.device) if cuda else None
        if self._aside is not None:
            # Earlier work on this memory may still be running.
            self._aside.wait_stream(torch.cuda.current_stream(model.device))
            self._stages.record_stream(self._aside)  # copies for a step that is never run may outlive this object
        self._ready: list[Any] = [torch.cuda.Event() if cuda else None for _ in range(2)]
        self._free: list[Any] = [torch.cuda.Event() if cuda else None for _ in range(2)]
        for number in range(2):
            self._copy(number)

    @property
    def copied(self) -> int:
        """Bytes that a step copies over the bus."""
        blocks = [
            len(host[0]) - first
            for hosts, line in zip(self.kv.pool.blocks, self._from, strict=True)
            for host, first in zip(hosts, line, strict=True)
        ]
        return sum(blocks) * self.kv.shape.kv_heads * self.kv.bytes

    def _prepare(self, tokens: Sequence[int]) -> None:
        """See `PooledDecoder`. Raises ValueError also if the pool has been changed."""
        if not self.kv.is_reset:
            raise ValueError("other steps have changed the pool; blocks without a slot would be missing")
        super()._prepare(tokens)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See `PooledDecoder.attend`."""
        number, side = self._done, self._done % 2
        kv, order = self.kv, self.kv.natural[layer]
        if self._aside is not None:
            torch.cuda.current_stream().wait_event(self._ready[side])
        met = self._progress(
            q, order, self._pools[side], self._pointers, layer, kv.shape, self._rule, self._inputs[2, :1],
            scale=self._model.scale,
        )  # fmt: skip
        if self._aside is not None:
            self._free[side].record()
            self._aside.wait_event(self._free[side])
        self._copy(number + 2)
        self.reads.append(met)
        self._done += 1
        return met.out

    def _copy(self, number: int) -> None:
        """Copy the blocks that attention number `number`, counted over all steps, needs."""
        side, layer = number % 2, number % self.kv.shape.layers
        with torch.cuda.stream(self._aside):
            for of, host in enumerate(self.kv.pool.blocks[layer]):
                first = self._from[layer][of]
                for head in range(len(host)):
                    self._stages[side, of, head, first : host.shape[1]].copy_(host[head, first:], non_blocking=True)
            if self._aside is not None:
                self._ready[side].record(self._aside)

    def _over(self, stage: Tensor) -> SlotPool:
        """The pool with a stage in place of host memory."""
        pool, layers = self.kv.pool, self.kv.shape.layers
        host = torch.tensor([[each.data_ptr(), each[0].nbytes] for each in stage], device=stage.device)
        blocks = [list(stage) for _ in range(layers)]
        return replace(pool, host=host.expand(layers, -1, -1).contiguous(), blocks=blocks)
