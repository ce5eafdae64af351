"""Whole passes of few rows as recorded graphs: a question behind its context, and rows that are repaired with it.

A pass over a short context has as many launches as any other and little to compute, so a GPU waits for Python: it
worked for thirteen of forty milliseconds (docs/lab-notes.md). A graph finds everything by address or number:

    rows       T of them, padded at the front to a fixed width. A padded row precedes every key, so it attends to
               nothing, and it writes to scratch memory.
    keys       found by address; the slot of the last row gives their number (`kernels.decode_step.CachePointers`)
    mask       a block-sparse index (kernels/block_index.py), in tables as wide as the longest cache of the graph needs

What passes have in common is recorded. Everything else is a number, copied to the device in one transfer. The last row
is the question's last token and has the latest position. It alone continues after the attention of the last layer,
which is that of a decode step. There is a graph for each width and each power of two of key blocks (cuda_graphs.py).
Without a GPU the reference kernels run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ragkv.kernels.block_index import BlockSparseIndex, dense_index
from ragkv.kernels.block_sparse import attend_block_sparse_at
from ragkv.kernels.decode_step import CachePointers, splits_of
from ragkv.model.execution.cuda_graphs import CUDAGraphPool
from ragkv.model.execution.graph_layers import LayerStack, StackInputs, decode_layers
from ragkv.model.layer_pass import Pass

WIDEST = 1024
"""Largest number of rows of a pass. With more rows the GPU is busy while Python launches its kernels."""
LONG = 4096
"""Rows of a cache that is still being loaded, above which a pass should start with the layers that are ready."""
NARROW, WIDE = 64, 128
"""Widths are multiples of the first number up to half of the widest, and of the second above."""
MISSING_POSITION = 2**31 - 1
"""Position of a missing key."""


@dataclass(frozen=True)
class _InputLayout:
    """Sizes of the inputs of a graph.

    The inputs are int64 numbers in this order: tokens, positions, positions with -1 for padded rows, and slots, for
    each row; addresses of K and of V, for each layer; positions of keys; blocks, counts and clear counts of the index.

    Attributes:
        rows: the width.
        tile: rows of a tile of the index.
        block: keys of a block of the index.
        blocks: largest number of blocks of a tile.
        layers: layers of the model.
    """

    rows: int
    tile: int
    block: int
    blocks: int
    layers: int

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.rows // self.tile)

    @property
    def parts(self) -> tuple[int, ...]:
        """Count of numbers of each part."""
        index = (self.tiles * self.blocks, self.tiles, self.tiles)
        return (*[self.rows] * 4, 2 * self.layers, self.blocks * self.block, *index)


class GraphPrefill:
    """Recorded passes of one model. Not thread-safe."""

    def __init__(self, stack: LayerStack, graphs: CUDAGraphPool | None, scratch: Sequence[Tensor]):
        """Prepare.

        Args:
            stack: all layers of the model.
            graphs: keeps the graphs; None records nothing.
            scratch: K and V [1, Hkv, d] that padded rows are written to.
        """
        self._stack, self._graphs, self._scratch = stack, graphs, tuple(scratch)
        addresses = [[[each.data_ptr()]] for each in scratch]
        self._scratch_addresses = torch.tensor(addresses, device=stack.model.device)

    def supports(self, p: Pass) -> bool:
        """Return whether a pass can be replayed and benefits from it.

        It must have few rows, be dense, run through all layers with the same slots in each, and give logits of its last
        row alone.
        """
        plain = p.attention is None and p.capture is None and p.depth is None and p.start == 0
        rows = p.tokens.shape[0]
        if p.cache.pending and p.cache.lengths[0] > LONG:
            return False
        if not plain or not 0 < rows <= WIDEST or len(p.steps) != len(self._stack.layers):
            return False
        leaves = [each.leave for each in p.steps]
        if any(each is not None for each in leaves[:-1]) or any(each.blend for each in p.steps):
            return False
        last, slots, k_pos = leaves[-1], p.steps[0].slots.numpy(), p.cache.positions(0).numpy()
        if (last is None and rows > 1) or (last is not None and last.tolist() != [rows - 1]):
            return False
        if slots[-1] != len(k_pos) - 1 or p.positions[-1] < k_pos.max():
            return False  # the attention of the last layer reads everything up to the last row's slot
        same_slots = all(each is p.steps[0] or np.array_equal(each.slots.numpy(), slots) for each in p.steps)
        return same_slots and p.cache.alike and all(each.write is None for each in p.steps)

    @torch.inference_mode()
    def last_logits(self, p: Pass) -> Tensor:
        """Run a supported pass and return logits [vocabulary] of its last row. Its rows are then in the cache.

        The logits are those of `DecoderModel.forward`, up to the order of additions.
        """
        padding = _width(p.tokens.shape[0]) - p.tokens.shape[0]
        q_pos = torch.cat([torch.full((padding,), -1), p.positions])
        layout, host = self._inputs(p, q_pos)
        if self._graphs is not None:
            key = ("pass", layout)
            return self._graphs.run(key, host, lambda inputs: self._pass(layout, inputs))[0].clone()
        buffers = [p.cache.buffers(layer, 0) for layer in range(layout.layers)]
        k, v = ([[self._scratch[i]] * padding + [pair[i]] * len(p.tokens) for pair in buffers] for i in (0, 1))
        return self._pass(layout, host, k, v)[0]

    def _inputs(self, p: Pass, q_pos: Tensor) -> tuple[_InputLayout, Tensor]:
        """Build the inputs of a pass. q_pos: positions, with -1 for padded rows."""
        k_pos, padding, shape = p.cache.positions(0), q_pos.shape[0] - p.tokens.shape[0], self._stack.model.shape
        index = dense_index(q_pos, k_pos, shape.q_heads // shape.kv_heads)
        key_blocks = -(-k_pos.shape[0] // index.block)
        most = 1 << (key_blocks - 1).bit_length()
        layout = _InputLayout(q_pos.shape[0], index.tile, index.block, most, len(self._stack.layers))
        host = np.zeros(sum(layout.parts), dtype=np.int64)
        tokens, positions, mask_pos, slots, addresses, keys, blocks, counts, clear = np.split(
            host, np.cumsum(layout.parts)[:-1]
        )
        tokens[padding:], positions[padding:], mask_pos[:] = p.tokens.numpy(), p.positions.numpy(), q_pos.numpy()
        slots[padding:] = p.steps[0].slots.numpy()
        addresses[:] = p.cache.addresses(0).ravel()
        keys[: k_pos.shape[0]], keys[k_pos.shape[0] :] = k_pos.numpy(), MISSING_POSITION
        blocks.reshape(layout.tiles, layout.blocks)[:, : index.blocks.shape[2]] = index.blocks[0].numpy()
        counts[:], clear[:] = index.counts[0].numpy(), index.clear[0].numpy()
        return layout, torch.from_numpy(host)

    def _pass(
        self,
        layout: _InputLayout,
        inputs: Tensor,
        k: Sequence[Sequence[Tensor]] = (),
        v: Sequence[Sequence[Tensor]] = (),
    ) -> Tensor:
        """Return logits [1, vocabulary]. k, v [L][W]: the caches of rows as tensors, for the reference kernels."""
        stack, layers = self._stack, len(self._stack.layers)
        shape, scale, kernels = stack.model.shape, stack.model.scale, stack.kernels
        tokens, positions, q_pos, slots, addresses, *rest = inputs.split(layout.parts)
        k_pos, blocks, counts, clear = (each.int() for each in rest)
        blocks = blocks.view(1, layout.tiles, layout.blocks)
        index = BlockSparseIndex(layout.tile, layout.block, blocks, counts[None], clear[None])
        base = torch.where(q_pos >= 0, addresses.view(2, -1, 1), self._scratch_addresses)
        table = torch.cat([base, slots.expand(1, layers, -1)])
        pointers = CachePointers(table, k, v)
        last = CachePointers(table[:, :, -1:].contiguous(), [each[-1:] for each in k], [each[-1:] for each in v])
        splits = splits_of(1, shape.kv_heads, k_pos.shape[0])
        mask_pos = q_pos.int()

        def attend(layer: int, q: Tensor, qkv: Tensor) -> Tensor:
            if layer == layers - 1:
                return kernels.attend(q, last, layer, shape, scale=scale, splits=splits)
            return attend_block_sparse_at(q, pointers, layer, shape, mask_pos, k_pos, index, scale=scale)

        return decode_layers(stack, StackInputs(tokens, positions, pointers), attend, outputs=1)


def _width(rows: int) -> int:
    """Return the width of the graph for a number of rows."""
    step = NARROW if rows <= WIDEST // 2 else WIDE
    return -(-rows // step) * step
