"""Whole passes of few rows as recorded graphs: a question behind its context, and the rows that are repaired with it.

A pass over a short context has as many launches as any other and little to compute, so a GPU waits for Python: of forty
milliseconds it worked thirteen (docs/lab-notes.md). A graph takes the same kernels' rows from wherever they are:

    rows       T of them, filled up to a width at the front; a row that is made up stands before all others, so it sees
               nothing, and it writes where nobody reads
    keys       found by address, as many as the last row's slot says (`Places` in kernels/steps.py)
    sight      who sees what as lists (kernels/lists.py), in tables as wide as the longest cache of this graph needs

What passes have in common is recorded, and all else is numbers: one copy to the device. The last row is the question's
last token, behind everything else; it alone goes on behind the last layer's attention, which is that of a decode step.
There is a graph for each width and each power of two of key blocks (recorder.py). Without a GPU the references run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ragkv.kernels.block_sparse import BlockSparseIndex, attend_block_sparse_at, dense_index
from ragkv.kernels.decode_step import CachePointers, StepKernels, splits_of
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.cuda_graphs import CUDAGraphPool
from ragkv.model.execution.graph_layers import decode_layers
from ragkv.model.execution.merged_weights import Layer
from ragkv.model.layer_pass import Pass

WIDEST = 1024
"""Rows of a pass; with more of them the GPU has enough to do while Python starts its kernels."""
LONG = 4096
"""Rows of a cache that is still being loaded, above which a pass had better begin with the layers that are there."""
NARROW, WIDE = 64, 128
"""Widths are multiples of the first up to half of the widest, and of the second above."""
LONGEST = 2**31 - 1
"""Position of a key that is not there."""


@dataclass(frozen=True)
class _Size:
    """rows: the width · tile, block: rows and keys of the lists · blocks: in a list, at most · layers: of the model.

    Inputs are int64 numbers, one behind another: tokens, positions, positions with -1 for made-up rows, and slots, by
    row; addresses of K and of V by layer; positions of keys; the lists' blocks, counts, and what is clear.
    """

    rows: int
    tile: int
    block: int
    blocks: int
    layers: int

    @property
    def tiles(self) -> int:
        """Of all rows."""
        return -(-self.rows // self.tile)

    @property
    def parts(self) -> tuple[int, ...]:
        """How many numbers of each."""
        lists = (self.tiles * self.blocks, self.tiles, self.tiles)
        return (*[self.rows] * 4, 2 * self.layers, self.blocks * self.block, *lists)


class GraphPrefill:
    """See the module. Not thread-safe."""

    def __init__(
        self,
        model: DecoderModel,
        layers: Sequence[Layer],
        kernels: StepKernels,
        graphs: CUDAGraphPool | None,
        nowhere: Sequence[Tensor],
    ):
        """layers: joined · recorder: None: nothing is recorded · nowhere: K and V [1, Hkv, d] that made-up rows are
        written to."""
        self._model, self._layers, self._kernels, self._graphs = model, layers, kernels, graphs
        self._nowhere = tuple(nowhere)
        self._lost = torch.tensor([[[each.data_ptr()]] for each in nowhere], device=model.device)

    def supports(self, p: Pass) -> bool:
        """Whether a pass can be replayed, and is worth it: few rows, dense, through all layers, with the same slots in
        each, and its last row alone gives logits."""
        plain = p.attention is None and p.capture is None and p.depth is None and p.start == 0
        rows, layers = p.tokens.shape[0], range(len(p.steps))
        if p.cache.pending and p.cache.lengths[0] > LONG:
            return False
        if not plain or not 0 < rows <= WIDEST or len(p.steps) != len(self._layers):
            return False
        leaves = [each.leave for each in p.steps]
        if any(each is not None for each in leaves[:-1]) or any(each.blend for each in p.steps):
            return False
        last, slots, known = leaves[-1], p.steps[0].slots.numpy(), p.cache.positions(0).numpy()
        if (last is None and rows > 1) or (last is not None and last.tolist() != [rows - 1]):
            return False
        if slots[-1] != len(known) - 1 or p.positions[-1] < known.max():
            return False  # the last layer's attention reads everything up to the last row's slot
        same = all(each is p.steps[0] or np.array_equal(each.slots.numpy(), slots) for each in p.steps)
        alike = all(np.array_equal(p.cache.positions(layer).numpy(), known) for layer in layers)
        return same and alike and all(each.write is None for each in p.steps)

    @torch.inference_mode()
    def last_logits(self, p: Pass) -> Tensor:
        """Logits [vocabulary] of the last row of a pass that is taken, as `DecoderModel.forward` gives them up to the
        order of additions; its rows are in the cache."""
        lacking = _width(p.tokens.shape[0]) - p.tokens.shape[0]
        stores = [p.cache.buffers(layer, 0) for layer in range(len(self._layers))]
        at = torch.cat([torch.full((lacking,), -1), p.positions])
        size, host = self._inputs(p, at, stores)
        if self._graphs is not None:
            key = ("pass", size)
            return self._graphs.run(key, host, lambda inputs: self._pass(size, inputs))[0].clone()
        k, v = ([[self._nowhere[i]] * lacking + [pair[i]] * len(p.tokens) for pair in stores] for i in (0, 1))
        return self._pass(size, host, k, v)[0]

    def _inputs(self, p: Pass, at: Tensor, stores: Sequence[tuple[Tensor, Tensor]]) -> tuple[_Size, Tensor]:
        """What `_Size` says. at: positions with those of made-up rows."""
        known, lacking = p.cache.positions(0), at.shape[0] - p.tokens.shape[0]
        lists = dense_index(at, known, self._model.shape.q_heads // self._model.shape.kv_heads)
        blocks_there = -(-known.shape[0] // lists.block)
        size = _Size(at.shape[0], lists.tile, lists.block, 1 << (blocks_there - 1).bit_length(), len(stores))
        host = np.zeros(sum(size.parts), dtype=np.int64)
        tokens, positions, seen, slots, addresses, keys, blocks, counts, clear = np.split(
            host, np.cumsum(size.parts)[:-1]
        )
        tokens[lacking:], positions[lacking:], seen[:] = p.tokens.numpy(), p.positions.numpy(), at.numpy()
        slots[lacking:] = p.steps[0].slots.numpy()
        addresses[:] = [each.data_ptr() for side in (0, 1) for each in (pair[side] for pair in stores)]
        keys[: known.shape[0]], keys[known.shape[0] :] = known.numpy(), LONGEST
        blocks.reshape(size.tiles, size.blocks)[:, : lists.blocks.shape[2]] = lists.blocks[0].numpy()
        counts[:], clear[:] = lists.counts[0].numpy(), lists.clear[0].numpy()
        return size, torch.from_numpy(host)

    def _pass(
        self, size: _Size, inputs: Tensor, k: Sequence[Sequence[Tensor]] = (), v: Sequence[Sequence[Tensor]] = ()
    ) -> Tensor:
        """Logits [1, vocabulary]. k, v [L][W]: the caches of rows as tensors, for the references."""
        model, kernels = self._model, self._kernels
        tokens, positions, at, slots, addresses, *rest = inputs.split(size.parts)
        keys, blocks, counts, clear = (each.int() for each in rest)
        blocks = blocks.view(1, size.tiles, size.blocks)
        lists = BlockSparseIndex(size.tile, size.block, blocks, counts[None], clear[None])
        base = torch.where(at >= 0, addresses.view(2, -1, 1), self._lost)
        table = torch.cat([base, slots.expand(1, len(self._layers), -1)])
        places = CachePointers(table, k, v)
        last = CachePointers(table[:, :, -1:].contiguous(), [each[-1:] for each in k], [each[-1:] for each in v])
        splits = splits_of(1, model.shape.kv_heads, keys.shape[0])
        seen = at.int()

        def attend(layer: int, q: Tensor) -> Tensor:
            if layer == len(self._layers) - 1:
                return kernels.attend(q, last, layer, model.shape, scale=model.scale, splits=splits)
            return attend_block_sparse_at(q, places, layer, model.shape, seen, keys, lists, scale=model.scale)

        return decode_layers(model, self._layers, kernels, tokens, positions, places, attend, outputs=1)


def _width(rows: int) -> int:
    """That of the graph for so many rows."""
    by = NARROW if rows <= WIDEST // 2 else WIDE
    return -(-rows // by) * by
