"""Blocks that a plan left out, and that may be fetched while the answer is decoded.

Each of them is known by a key: its mean key from the head record, rotated to the middle of the block's position. Blocks
in the cache have boxes over rotated keys instead (`sparse.blocks`). The rotated mean is an approximation of the mean of
rotated keys.

A block is fetched for one layer by `ChunkSource.load`, rotated to its position and appended to the cache. Its rows are
as they were stored: nothing repairs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragkv.engine.memory_source import ChunkSource
from ragkv.engine.passes import run_alone
from ragkv.engine.stitch import Stitch
from ragkv.model.decoder import DecoderModel
from ragkv.recompute.base import Blocks, Plan, Rows


class OffloadedBlocks:
    """The blocks of one request that are not in its cache. Implements the fetcher of `sparse.base`."""

    def __init__(self, model: DecoderModel, stitch: Stitch, sources: Sequence[ChunkSource], plan: Plan):
        """Collect what the plan, as it was carried out, does not keep, in the layers where a policy can read it."""
        self._model, self._stitch, self._sources, self._angle = model, stitch, sources, plan.key_positions
        self._blocks = [
            [(i, b) for i, source in enumerate(sources) for b in range(source.piece.blocks) if b not in kept[i]]
            if kind.plain
            else []
            for kept, kind in zip(plan.kept, model.kinds, strict=True)
        ]
        self._keys = [self._points(layer) for layer in range(len(plan.kept))]

    @property
    def remaining(self) -> list[list[tuple[int, int]]]:
        """Per layer the (chunk, block) pairs that were not fetched."""
        return self._blocks

    def keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys [Hkv, A, d] and sizes [A] of the blocks that were not fetched."""
        sizes = [len(self._sources[i].piece.span(block)) for i, block in self._blocks[layer]]
        return self._keys[layer], torch.tensor(sizes, dtype=torch.int64)

    @torch.inference_mode(False)
    def fetch(self, layer: int, which: Sequence[int]) -> Rows:
        """Append blocks to the cache; `which` numbers them as in `keys`, ascending. Returns their k, v [m, Hkv, d].

        This runs inside a model pass. Tensors that are allocated here, such as a cache that grows, are written outside
        of a pass later, which tensors made in inference mode would not allow.
        """
        cache, chosen = self._stitch.cache, [self._blocks[layer][number] for number in which]
        before = cache.lengths[layer]
        parts = []
        for i, source in enumerate(self._sources):
            blocks = tuple(block for chunk, block in chosen if chunk == i)
            if blocks:
                requested: list[Blocks] = [()] * len(self._blocks)
                requested[layer] = blocks
                # Inside a pass nothing can be yielded: a chunk that the store lost meanwhile is encoded here.
                rows = run_alone(self._model, source.load(requested))[layer]
                parts.append((i, source.piece.rows(blocks), rows))
        self._stitch.put(layer, parts, self._angle)
        left = torch.ones(len(self._blocks[layer]), dtype=torch.bool)
        left[list(which)] = False
        self._blocks[layer] = [self._blocks[layer][number] for number in left.nonzero()[:, 0].tolist()]
        self._keys[layer] = self._keys[layer][:, left.to(self._keys[layer].device)]
        kind = self._model.kinds[layer]
        return kind.unpack(cache.k(layer)[before:]), kind.unpack(cache.v(layer)[before:])

    def _points(self, layer: int) -> Tensor:
        """[Hkv, A, d]"""
        blocks, cache, kind = self._blocks[layer], self._stitch.cache, self._model.kinds[layer]
        device = cache.devices[layer]
        if not blocks:
            return kind.unpack(cache.k(layer)[:0]).transpose(0, 1)
        pieces = [self._sources[i].piece for i, _ in blocks]
        spans = [piece.span(block) for piece, (_, block) in zip(pieces, blocks, strict=True)]
        plain = self._model.profile.key_means == "plain"  # else they are rotated to their positions in the chunk
        middles = [(i, (span[len(span) // 2] if plain else 0,)) for (i, _), span in zip(blocks, spans, strict=True)]
        means = [piece.digest.mean_keys[layer, block] for piece, (_, block) in zip(pieces, blocks, strict=True)]
        stacked = torch.stack(means).to(device, cache.dtype)
        return kind.unpack(self._stitch.turned(layer, stacked, middles, self._angle)).transpose(0, 1)
