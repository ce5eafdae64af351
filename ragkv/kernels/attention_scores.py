"""Attention whose scores are computed one by one: windows, soft caps and sinks. Tensors are those of `attention.py`.

    window     a query sees the last `window` positions up to its own
    softcap    a score s becomes softcap · tanh(s / softcap)
    sinks      one logit a query head takes part in the softmax and has no value

Queries are taken in tiles, and a tile is multiplied by the keys that one of its queries sees, and by no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILE, TILE_ON_GPU = 128, 1024
"""Queries of a tile. On a GPU every tile costs launches."""


@dataclass(frozen=True)
class ScoreTile:
    """The keys of a tile of queries.

    Attributes:
        rows: the queries.
        keys: the keys that one of them sees, as a slice or as indices [m] on the device.
        hidden: whether a key is hidden from a query [rows, m], on the device; None where none is.
    """

    rows: slice
    keys: slice | Tensor
    hidden: Tensor | None


def score_tiles(q_pos: Tensor, k_pos: Tensor, window: int | None, device: torch.device) -> list[ScoreTile]:
    """Plan the tiles of queries at q_pos [T] over keys at k_pos [n], both on the CPU, for attention on a device."""
    size, tiles = TILE if device.type == "cpu" else TILE_ON_GPU, list[ScoreTile]()
    for start in range(0, q_pos.shape[0], size):
        rows = slice(start, min(start + size, q_pos.shape[0]))
        tile = q_pos[rows]
        seen = k_pos <= tile.max()
        if window is not None:
            seen &= k_pos > tile.min() - window
        index = seen.nonzero()[:, 0]
        first, last = int(index[0]), int(index[-1]) + 1
        keys = slice(first, last) if last - first == index.shape[0] else index.to(device)
        here = k_pos[index]
        hidden = here[None] > tile[:, None]
        if window is not None:
            hidden |= here[None] <= tile[:, None] - window
        tiles.append(ScoreTile(rows, keys, hidden.to(device) if bool(hidden.any()) else None))
    return tiles


def attend_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Sequence[ScoreTile],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention [T, Hq, d].

    Args:
        q: [T, Hq, d]. Queries.
        k: [n, Hkv, d]. Keys.
        v: [n, Hkv, d]. Values.
        tiles: of `score_tiles`.
        scale: factor of the scores.
        softcap: None for none.
        sinks: [Hq]; None for none.
    """
    (_, q_heads, d), kv_heads = q.shape, k.shape[1]
    group, out = q_heads // kv_heads, torch.empty_like(q)
    for tile in tiles:
        part = q[tile.rows]
        count = part.shape[0]
        # The query heads of a key/value head become rows of one product, so keys are read once.
        folded = (part * scale).view(count, kv_heads, group, d).permute(1, 2, 0, 3).reshape(kv_heads, -1, d)
        scores = torch.bmm(folded, k[tile.keys].permute(1, 2, 0)).view(kv_heads, group, count, -1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if tile.hidden is not None:
            scores = scores.masked_fill(tile.hidden, float("-inf"))
        shares = _softmax(scores, sinks).to(v.dtype).view(kv_heads, group * count, -1)
        mixed = torch.bmm(shares, v[tile.keys].transpose(0, 1))
        out[tile.rows] = mixed.view(kv_heads, group, count, d).permute(2, 0, 1, 3).reshape(count, q_heads, d)
    return out


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [Hkv, G, T, n] over keys, in float32 at least; sinks [Hq] take their share of it."""
    exact = scores.double() if scores.dtype == torch.float64 else scores.float()
    if sinks is None:
        return exact.softmax(-1)
    kv_heads, group, count, _ = exact.shape
    sunk = sinks.to(exact).view(kv_heads, group, 1, 1).expand(-1, -1, count, -1)
    return torch.cat([exact, sunk], -1).softmax(-1)[..., :-1]
