"""The inputs of a recorded decode step: one tensor [2 + 3 L, W] with tokens, positions and the table of caches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ragkv.model.kv_cache import ContextCache


def pack_inputs(
    caches: Sequence[ContextCache], tokens: Sequence[int], positions: Sequence[int], spare_k: int, spare_v: int
) -> Tensor:
    """Return the inputs of a step [2 + 3 L, W] int64 on the CPU; W is padded to a power of two.

    Args:
        caches: the cache of each row, grown to hold its rows. A later row of a cache attends to the earlier ones.
        tokens: the token of each row.
        positions: its position.
        spare_k: address of one row of K, where rows that pad the step write.
        spare_v: likewise, of V.
    """
    count, layers = len(tokens), caches[0].shape.layers
    host = np.zeros((2 + 3 * layers, 1 << (count - 1).bit_length()), dtype=np.int64)
    host[0, :count], host[1, :count] = tokens, positions
    table = host[2:].reshape(3, layers, -1)
    table[:2] = np.array([spare_k, spare_v])[:, None, None]
    for cache, rows in _rows_of(caches):
        table[:2, :, rows] = cache.addresses(len(rows))[:, :, None]
        table[2][:, rows] = np.array(cache.lengths)[:, None] + np.arange(len(rows))
    return torch.from_numpy(host)


def table_of(inputs: Tensor) -> Tensor:
    """View the table of caches [3, L, W]: addresses of K and of V, and numbers of rows (`CachePointers`)."""
    return inputs[2:].view(3, -1, inputs.shape[1])


def _rows_of(caches: Sequence[ContextCache]) -> list[tuple[ContextCache, list[int]]]:
    """Return the different caches, each with the numbers of its rows."""
    rows: dict[int, tuple[ContextCache, list[int]]] = {}
    for row, cache in enumerate(caches):
        rows.setdefault(id(cache), (cache, []))[1].append(row)
    return list(rows.values())
