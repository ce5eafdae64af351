"""One pool of slots for blocks of KV, shared by all requests, layers and kv heads (PSA, section 3.4).

    block       `size` consecutive rows of one kv head in one layer of one request
    slot        memory for one block on the device: K [size, d] then V [size, d]. Any block may be in any slot
    cell        the number of a block among the blocks of all layers, places (requests) and kv heads
    free list   slots without a block, from which kernels take

A kernel takes slots from the free list and never evicts, so no block leaves its slot while a program reads it. Between
launches `refill` evicts the least recently used blocks, as in the paper, and lists their slots.

Blocks that their layer read in its latest step are not evicted (paper silent: LRU alone evicts them). With a pool
smaller than what a step reads, the least recently used block is the one that is needed next, and no block would ever be
found in its slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FREE, LISTED = -1, 2**62
"""Values of `SlotPool.last_used`: the slot holds no block; it holds none, and is in the free list."""
LISTED_PART, LEAST_LISTED = 16, 16
"""Length of the free list: this part of all slots, and at least so many if there are."""


@dataclass(frozen=True)
class SlotPool:
    """S slots and the map between them and C cells, changed in place.

    The entry behind the last of `slot_of`, `block_of` and `last_used` belongs to nothing: writes that shall have no
    effect go there.

    Attributes:
        slots: [S, 2, size, d].
        slot_of: [C + 1] int32. Slot of a cell; -1 where the block is on the host only.
        block_of: [S + 1] int64. Cell of a slot; C where it holds none.
        last_used: [S + 1] int64. Number of the latest launch that read the slot, or FREE or LISTED.
        free: [F] int64. Slots for the next blocks, in order; S where there is none.
        taken: [1] int32. Entries of `free` that were taken since they were listed. May be larger than F.
        evicted: [1] int64. Blocks that were evicted so far.
        grid: (L, P, Hkv, B), the layers, places, kv heads and blocks that cells are numbered by.
    """

    slots: Tensor
    slot_of: Tensor
    block_of: Tensor
    last_used: Tensor
    free: Tensor
    taken: Tensor
    evicted: Tensor
    grid: tuple[int, int, int, int]

    @property
    def cells(self) -> Tensor:
        """`slot_of` by layer, place, kv head and block: [L, P, Hkv, B] int32, a view."""
        return self.slot_of[:-1].view(self.grid)


@torch.inference_mode(False)
def make_slot_pool(
    slots: int, block: tuple[int, int], grid: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> SlotPool:
    """Allocate a pool whose slots are all free. It can be changed inside and outside of inference mode.

    Args:
        slots: number of slots, at least 1.
        block: rows of a block, and head size.
        grid: as in `SlotPool`.
        dtype: dtype of K and V.
        device: device of the slots.
    """
    cells, size, d = math.prod(grid), *block
    listed = min(slots, max(LEAST_LISTED, slots // LISTED_PART))
    pool = SlotPool(
        torch.zeros(slots, 2, size, d, dtype=dtype, device=device),
        torch.full((cells + 1,), -1, dtype=torch.int32, device=device),
        torch.full((slots + 1,), cells, dtype=torch.int64, device=device),
        torch.full((slots + 1,), FREE, dtype=torch.int64, device=device),
        torch.full((listed,), slots, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        grid,
    )
    refill(pool, torch.ones(1, dtype=torch.int64, device=device), 0)
    return pool


def refill(pool: SlotPool, clock: Tensor, layer: int) -> None:
    """Fill the free list: with slots that hold no block, then with those of the least recently used blocks.

    Blocks that were read in one of the latest L launches are not evicted. The host does not wait. A CUDA graph can
    record this: filling takes a number, where an assignment copies it from the host.

    Args:
        pool: the pool. No kernel may be using it.
        clock: [1] int64. Number of the step.
        layer: the layer whose launch was the latest.
    """
    layers, slots, cells = pool.grid[0], pool.slots.shape[0], pool.slot_of.shape[0] - 1
    taken = torch.arange(len(pool.free), device=pool.free.device) < pool.taken
    pool.last_used.index_fill_(0, pool.free.masked_fill(taken, slots), FREE)
    age, oldest = pool.last_used[:-1].topk(len(pool.free), largest=False)
    fits = age <= clock * layers + layer - layers
    chosen = oldest.masked_fill(~fits, slots)
    pool.evicted.add_((fits & (age != FREE)).sum())
    pool.slot_of.index_fill_(0, pool.block_of[chosen], -1)
    pool.block_of.index_fill_(0, chosen, cells)
    pool.last_used.index_fill_(0, chosen, LISTED)
    pool.free.copy_(chosen)
    pool.taken.zero_()
