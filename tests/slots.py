"""The invariants of a pool of KV blocks between two steps."""

from __future__ import annotations

import torch

from ragkv.kernels.slots import FREE, LISTED
from ragkv.model.execution.kv_pool import KVPool


def check_slots(pool: KVPool) -> None:
    """Check that every slot is free, listed once, or holds exactly the block that both maps name."""
    slots, grid = pool.pool, pool.pool.grid
    cells, count = slots.slot_of.shape[0] - 1, len(slots.slots)
    untaken = slots.free[int(slots.taken) :]
    listed = untaken[untaken < count].tolist()
    assert len(set(listed)) == len(listed), "a slot is listed twice"
    owners = slots.block_of[:-1].tolist()
    held = {cell: slot for slot, cell in enumerate(owners) if cell < cells}
    assert held == {cell: slot for cell, slot in enumerate(slots.slot_of[:-1].tolist()) if slot >= 0}
    for slot, (cell, used) in enumerate(zip(owners, slots.last_used.tolist(), strict=False)):
        assert (used in (FREE, LISTED)) == (cell == cells)
        assert (used == LISTED) == (slot in listed)
    for cell, slot in held.items():
        layer, place, head, block = (int(each) for each in torch.unravel_index(torch.tensor(cell), grid))
        cache, rows = pool.caches[place], slice(block * pool.size, (block + 1) * pool.size)
        assert cache is not None, "a slot holds a block of a request that has left"
        assert rows.stop <= cache.lengths[layer]
        for side, x in enumerate((cache.k(layer), cache.v(layer))):
            assert torch.equal(slots.slots[slot, side].cpu(), x[rows, head].cpu()), "a slot holds something else"
