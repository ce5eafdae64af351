"""Decoding under LFPS with a context that is split between the device that computes and host memory.

    near     the sinks and the newest keys, in a ring, on the device: passes write to it, and the device attends to it
    cache    all rows, in host memory: the CPU attends to the marked candidates that are not near

In each layer, the query and the new row go to the host. While they travel, the CPU marks the next token's candidates of
the layer before. Then it attends to those of this layer, and the device attends to the near keys meanwhile. The results
are merged by their log-sum-exp. Without a GPU the same code runs with both parts in the memory of the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ragkv.kernels.attention import merge
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Attention, Pass, Step
from ragkv.sparse.attention import attend_heads, score_dtype
from ragkv.sparse.base import DecodeState
from ragkv.sparse.lfps import LfpsState


class SplitContext:
    """The context of one request, and the attention of its decode steps. Not thread-safe.

    Attributes:
        state: Chooses what the CPU reads.
        cache: All rows, in host memory.
        near: The rows on the device.
        crossed: Bytes that passed between host and device so far.
    """

    def __init__(self, model: DecoderModel, cache: ContextCache, state: LfpsState, rows: int):
        """Split a context.

        Args:
            model: The model.
            cache: The context; its rows move to host memory. `ContextCache.move` brings them back.
            state: Has observed the question.
            rows: Largest number of rows that will be appended.
        """
        self.state, self.cache, self.crossed = state, cache, 0
        self.near = ContextCache(model.shape, 0, model.dtype, model.devices)
        self._sinks, self._oldest = list[int](), [0] * model.shape.layers
        cache.make_room(rows)
        for layer in range(model.shape.layers):
            self._copy_near(layer)
        host = torch.device("cpu")
        cache.move([host] * model.shape.layers)
        for scores in state.scores.values():
            scores.move(host)
        self._slots = [0] * model.shape.layers
        size, pinned = model.shape.head_dim, model.device.type == "cuda"
        sent = (model.shape.q_heads + 2 * model.shape.kv_heads, size)
        self._sent = torch.empty(sent, dtype=model.dtype, pin_memory=pinned)
        answer = (model.shape.q_heads, size + 1)
        self._answer = torch.empty(answer, dtype=score_dtype(model.dtype), pin_memory=pinned)

    @property
    def in_host(self) -> int:
        """Rows that are in host memory alone, over all layers."""
        return sum(self.cache.lengths) - sum(self.near.lengths)

    def append(self, token: int, position: int, attention: Attention) -> Pass:
        """Make the pass that appends one token to both parts, under this attention or one that calls it."""
        split, slots = self.state.params.split, dict[int, Tensor]()
        at = torch.tensor([position])
        for layer, sinks in enumerate(self._sinks):
            if self.near.lengths[layer] < sinks + split:
                slot = int(self.near.reserve(layer, at))
            else:
                slot = sinks + self._oldest[layer]
                self._oldest[layer] = (self._oldest[layer] + 1) % split
                self.near.positions(layer)[slot] = position
            self._slots[layer] = slot
            slots.setdefault(slot, torch.tensor([slot]))
        self.cache.append_row(position)
        layers = len(self._slots)
        steps = [
            Step(None, slots[slot], leave=at.new_zeros(1) if layer == layers - 1 else None)
            for layer, slot in enumerate(self._slots)
        ]
        return Pass(torch.tensor([token]), at, self.near, steps, attention=attention, decodes=True)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> Tensor:
        """Attend with the token [1, Hq, d] that was appended, as `Attention`: k and v are the near rows."""
        slot, cache, heads = self._slots[layer], self.cache, k.shape[1]
        sent = torch.cat([q[0], k[slot], v[slot]])
        self._sent.copy_(sent, non_blocking=True)
        arrived: Any = torch.cuda.Event() if q.device.type == "cuda" else None
        if arrived is not None:
            arrived.record()
        queries = q[0].unflatten(0, (heads, -1)).to(score_dtype(q.dtype))
        near = attend_heads(queries, k.transpose(0, 1), v.transpose(0, 1), scale=scale)
        self.state.mark_ahead()
        if arrived is not None:
            arrived.synchronize()
        query, key, value = self._sent.split([q.shape[1], heads, heads])
        keys, values = cache.k(layer), cache.v(layer)
        keys[-1], values[-1] = key, value
        first = int(k_pos[self._sinks[layer] :].min())
        out, lse = self.state.attend_before(
            layer, query, keys, values, cache.positions(layer), first=first, scale=scale
        )
        answer = self._answer.view(heads, -1, self._answer.shape[1])
        answer[..., :-1], answer[..., -1] = out, lse
        there = answer.to(q.device, non_blocking=True)
        self.crossed += self._sent.nbytes + self._answer.nbytes
        return merge([near, (there[..., :-1], there[..., -1])])[0].flatten(0, 1).to(q.dtype)[None]

    def _copy_near(self, layer: int) -> None:
        """Copy the sinks and the newest rows of a layer, oldest first."""
        cache, sinks = self.cache, self.state.scores[layer].sinks.cpu()
        order = cache.positions(layer).argsort()
        newest = order[len(sinks) :][-self.state.params.split :]
        rows = torch.cat([sinks, newest])
        there = rows.to(cache.devices[layer])
        self._sinks.append(len(sinks))
        self.near.put(layer, cache.k(layer)[there], cache.v(layer)[there], cache.positions(layer)[rows])


def split_context(
    model: DecoderModel, cache: ContextCache, state: DecodeState | None, rows: int
) -> SplitContext | None:
    """Split a context whose policy asks for it; None where it does not, or all keys would stay on the device.

    Layers with a window or another softmax than the plain one, packed heads and states are not split.

    Args:
        model: The model.
        cache: The context, with the rows that the state has observed.
        state: The state of the decode policy.
        rows: Largest number of rows that will be appended.
    """
    if not (isinstance(state, LfpsState) and state.params.split):
        return None
    if cache.states or any(not kind.plain or kind.packed for kind in model.kinds):
        return None
    stays = state.params.sinks + state.params.split
    return SplitContext(model, cache, state, rows) if max(cache.lengths) > stays else None
