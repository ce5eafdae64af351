"""Dense decoding with KV in host memory: the copy engine copies it over the bus in every step.

A share of every layer's rows stays on the device. Two stages take turns for the rest: while one layer computes, the
rows of the next two layers are copied on a separate stream, with one large copy per layer, request and side. After the
last layer the first layers of the next step follow. So the bus is never idle, and a step takes as long as its copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ragkv.kernels.decode_step import CachePointers, splits_of
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_layers import LayerStack, StackInputs, decode_layers, step_kernels
from ragkv.model.execution.merged_weights import merge_weights
from ragkv.model.kv_cache import ContextCache


class StagedDecoder:
    """Dense decode steps of a few requests together. The rows of their answers stay on the device.

    No graph is recorded, since copies limit a step, not launches.
    """

    def __init__(self, model: DecoderModel, caches: Sequence[ContextCache], share: float, room: int):
        """Copy the resident rows.

        Args:
            model: the model, on one device. Its weights are merged.
            caches: the contexts, in host memory. They are not changed.
            share: share of the rows of every layer that stays on the device.
            room: largest number of steps.
        """
        self._model, self._caches, self._room, self._steps, self._done = model, caches, room, 0, 0
        self._stack = LayerStack(model, merge_weights(model.body), step_kernels(model))
        self._lengths = [[cache.lengths[layer] for cache in caches] for layer in range(model.shape.layers)]
        self._resident = [[int(share * rows) for rows in layer] for layer in self._lengths]
        self._positions = [1 + max(int(c.positions(at).max()) for at in range(c.shape.layers)) for c in caches]
        shape, most = model.shape, max(map(max, self._lengths))
        kept = max(map(max, self._resident))

        def store(*sizes: int) -> Tensor:
            return torch.zeros(2, *sizes, shape.kv_heads, shape.head_dim, dtype=model.dtype, device=model.device)

        self._kept, self._answers = store(shape.layers, len(caches), kept), store(shape.layers, len(caches), room)
        self._stages = [store(len(caches), most + room) for _ in range(2)]
        for layer in range(shape.layers):
            for at, cache in enumerate(caches):
                rows = self._resident[layer][at]
                for side, x in enumerate((cache.k(layer), cache.v(layer))):
                    self._kept[side, layer, at, :rows] = x[:rows]
        cuda = model.device.type == "cuda"
        self._aside: Any = torch.cuda.Stream(model.device) if cuda else None
        if self._aside is not None:
            # Earlier work on this memory may still be running, and copies for a step that is never run may outlive it.
            self._aside.wait_stream(torch.cuda.current_stream(model.device))
            for stage in self._stages:
                stage.record_stream(self._aside)
        self._ready: list[Any] = [torch.cuda.Event() if cuda else None for _ in range(2)]
        for number in range(2):
            self._copy(number)

    @property
    def copied(self) -> int:
        """Bytes that a step copies over the bus."""
        rows = sum(map(sum, self._lengths)) - sum(map(sum, self._resident))
        return rows * self._model.token_bytes // self._model.shape.layers

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each request and return logits [W, vocabulary].

        Raises:
            ValueError: there is no room for another token.
        """
        if self._steps == self._room:
            raise ValueError("no room for another token")
        model, layers = self._model, self._model.shape.layers
        k, v = (
            [list(self._stages[(self._done + layer) % 2][side].unbind(0)) for layer in range(layers)] for side in (0, 1)
        )
        addresses = [[each.data_ptr() for each in layer] for layer in (*k, *v)]
        positions = [each + self._steps for each in self._positions]
        held = [[rows + self._steps for rows in layer] for layer in self._lengths]
        inputs = torch.tensor([list(tokens), positions, *addresses, *held], dtype=torch.int64).to(model.device)
        pointers = CachePointers(inputs[2:].view(3, layers, -1), k, v)
        splits = splits_of(len(tokens), model.shape.kv_heads, 1 + max(map(max, held)))

        def attend(layer: int, q: Tensor, qkv: Tensor) -> Tensor:
            out = self._stack.kernels.attend(q, pointers, layer, model.shape, scale=model.scale, splits=splits)
            self._turn(layer, held[layer])
            return out

        self._wait(self._done)
        logits = decode_layers(self._stack, StackInputs(inputs[0], inputs[1], pointers), attend)
        self._steps += 1
        return logits

    def _turn(self, layer: int, held: Sequence[int]) -> None:
        """Keep the new rows of a layer, copy for the next but one, and wait for the next."""
        stage = self._stages[self._done % 2]
        for at, rows in enumerate(held):
            self._answers[:, layer, at, self._steps] = stage[:, at, rows]
        if self._aside is not None:
            self._aside.wait_stream(torch.cuda.current_stream())
        self._done += 1
        self._copy(self._done + 1)
        self._wait(self._done)

    def _wait(self, number: int) -> None:
        if self._aside is not None:
            torch.cuda.current_stream().wait_event(self._ready[number % 2])

    def _copy(self, number: int) -> None:
        """Copy the rows that attention number `number`, counted over all steps, needs."""
        stage, layer = self._stages[number % 2], number % self._model.shape.layers
        with torch.cuda.stream(self._aside):
            for at, cache in enumerate(self._caches):
                rows, kept = self._lengths[layer][at], self._resident[layer][at]
                stage[:, at, :kept] = self._kept[:, layer, at, :kept]
                stage[:, at, rows : rows + self._room] = self._answers[:, layer, at]
                for side, x in enumerate((cache.k(layer), cache.v(layer))):
                    stage[side, at, kept:rows].copy_(x[kept:rows], non_blocking=True)
            if self._aside is not None:
                self._ready[number % 2].record(self._aside)
