"""Attention in bfloat16 on a CPU: products of whole tiles of queries. Tensors are those of `attention.py`.

torch's fused CPU kernel multiplies small blocks and reaches a fifth of the rate that the CPU has in bfloat16. Here a
tile of queries is multiplied by all keys that it can see, so the scores of one tile are the only ones in memory. They
are rounded to bfloat16, as those of a model's eager attention are; the softmax computes in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 128
"""Queries of a tile. Their scores over 4,096 keys are a few MB, which fits into the caches of a core."""
MIN_ROWS = 128
"""Fewest queries that are tiled. Below it torch's kernel takes no noticeable time, and it rounds no scores."""


def supports_tiles(q: Tensor) -> bool:
    """Return whether tiles compute the attention of q [T, Hq, d] faster than torch's kernel."""
    return q.dtype == torch.bfloat16 and q.device.type == "cpu" and q.shape[0] >= MIN_ROWS


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> Tensor:
    """Compute exact attention [T, Hq, d] for positions in any order.

    Every query must see at least one key.
    """
    rows, q_heads, d = q.shape
    kv_heads, group = k.shape[1], q_heads // k.shape[1]
    keys, values = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    out = torch.empty_like(q)
    for start in range(0, rows, TILE):
        tile = slice(start, min(start + TILE, rows))
        count = tile.stop - start
        first, last = visible_span(q_pos[tile], k_pos)
        # The query heads of a key/value head become rows of one product, so keys are read once.
        folded = (q[tile] * scale).view(count, kv_heads, group, d).permute(1, 2, 0, 3).reshape(kv_heads, -1, d)
        scores = torch.bmm(folded, keys[:, :last].transpose(1, 2))
        if first < last:
            hidden = k_pos[None, first:last] > q_pos[tile, None]
            scores.view(kv_heads, group, count, last)[..., first:].masked_fill_(hidden, float("-inf"))
        torch.softmax(scores, -1, out=scores)
        part = torch.bmm(scores, values[:, :last])
        out[tile] = part.view(kv_heads, group, count, d).permute(2, 0, 1, 3).reshape(count, q_heads, d)
    return out


def visible_span(q_pos: Tensor, k_pos: Tensor) -> tuple[int, int]:
    """Return (first, last): all queries see the keys before `first`, and none sees a key from `last` on."""
    early, late = k_pos <= q_pos.min(), k_pos <= q_pos.max()
    seen = late.nonzero()
    return int(early.long().cumprod(0).sum()), int(seen[-1]) + 1 if seen.shape[0] else 0
