"""What SamKV compares: the question's mean query, local queries and mean keys, before RoPE or at their places after it.

Vectors after RoPE depend on where they are. The chunks are taken to lie back to back, from position 0 on, and the
question behind them; a product of two rotated vectors depends on their distance alone. A mean key is rotated to the
middle token of its block, a local query to that of the local blocks: the digest has no rows that could be rotated one
by one. Those of the question can be, and are. Where a digest has means of `rotated` keys, they are turned by the place
of their chunk alone, and are the means of the keys that a cache of the context has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ragkv.recompute.base import Piece

Rotate = Callable[[Tensor, Tensor], Tensor]
"""Maps x [L, T, heads, d] and positions [T] to x with the RoPE of each layer."""


def compared_vectors(
    pieces: Sequence[Piece],
    queries: Sequence[Tensor],
    local: int,
    rotate: Rotate | None,
    means: Literal["plain", "rotated"] = "plain",
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Collect the vectors of a question and its chunks, in the dtype and on the device of the queries.

    Args:
        pieces: The chunks.
        queries: Pre-RoPE queries [question tokens, Hq, d] per layer.
        local: Local blocks of a chunk.
        rotate: RoPE; None compares before it.
        means: What the mean keys are of, as `key_means` of a profile.

    Returns:
        Q_que [L, Hq, d], local queries [D, L, Hq, d], and the mean keys [L, B, Hkv, d] of every chunk.
    """
    start, q_loc, keys = 0, list[Tensor](), list[Tensor]()
    for piece in pieces:
        local_query, mean_keys = (x.to(queries[0]) for x in (piece.digest.local_query, piece.digest.mean_keys))
        if rotate is not None:
            first_local = piece.span(max(0, piece.blocks - local)).start
            middle = start + (first_local + piece.tokens - 1) // 2
            local_query = rotate(local_query[:, None], torch.tensor([middle]))[:, 0]
            spans = [piece.span(b) for b in range(piece.blocks)]
            middles = [(span.start + span.stop - 1) // 2 if means == "plain" else 0 for span in spans]
            mean_keys = rotate(mean_keys, torch.tensor(middles) + start)
        q_loc.append(local_query)
        keys.append(mean_keys)
        start += piece.tokens
    asked = torch.stack(list(queries))
    if rotate is not None:
        asked = rotate(asked, torch.arange(start, start + asked.shape[1]))
    return asked.mean(1), torch.stack(q_loc), keys
