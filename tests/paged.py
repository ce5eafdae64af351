"""Requests over a few stored chunks, twice: with blocks in place, and with all rows in caches of their own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ragkv.kernels.transfer import TransferFormat, decode_block
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.block_tables import BlockPoolMemory, PagedChunk, PagedContext, rows_in_blocks
from ragkv.model.kv_cache import ContextCache
from ragkv.model.rotary import rotate
from ragkv.store.format.layout import Layout
from ragkv.store.format.quantise import quantise

OWN = 5
"""Rows of a request before its first chunk."""


@dataclass
class PagedRequest:
    """One request. whole: a cache with all rows; cache and context: the same rows, some of them in place."""

    whole: ContextCache
    cache: ContextCache
    context: PagedContext
    end: int


class PagedChunks:
    """Chunks of random KV whose blocks lie in a pool, in a random order, and requests that keep some of them."""

    def __init__(self, model: DecoderModel, sizes: tuple[int, ...], block: int = 4, seed: int = 0, body: str = "exact"):
        self.model, self.sizes, self.block = model, sizes, block
        self._rng = np.random.default_rng(seed)
        shape, generator = model.shape, torch.Generator().manual_seed(seed)
        self.kv = [
            torch.randn(2, shape.layers, n, shape.kv_heads, shape.head_dim, generator=generator).to(
                model.device, model.dtype
            )
            for n in sizes
        ]
        layout = Layout(shape, block, block, model.dtype, body)
        places = [(c, i, b) for c, n in enumerate(sizes) for i in range(shape.layers) for b in range(-(-n // block))]
        slots = self._rng.permutation(len(places))
        data = torch.zeros(len(places), layout.full_bytes, dtype=torch.uint8, device=model.device)
        form = TransferFormat(body, block, shape.kv_heads, shape.head_dim, model.dtype)
        self.memory = BlockPoolMemory(data, form)
        self.addresses = [np.zeros((shape.layers, -(-n // block)), dtype=np.int64) for n in sizes]
        for slot, (c, layer, b) in zip(slots.tolist(), places, strict=True):
            rows = self.kv[c][:, layer, b * block : (b + 1) * block]
            raw = rows.contiguous().view(-1).view(torch.uint8)
            if body != "exact":
                raw = quantise(rows[0][None], rows[1][None], layout)[0][0]
            data[slot, : len(raw)] = raw
            rows.copy_(torch.stack(decode_block(data[slot], rows.shape[1], form)))  # as it is stored
            self.addresses[c][layer, b] = data[slot].data_ptr()

    def request(self, chunks: tuple[int, ...], share: float = 0.6) -> PagedRequest:
        """Make a request over some chunks that keeps a share of their blocks, others in each layer."""
        model, shape = self.model, self.model.shape
        size = OWN + sum(self.sizes[c] for c in chunks)
        whole = ContextCache(shape, size, model.dtype, model.device)
        cache = ContextCache(shape, OWN, model.dtype, model.device)
        own = torch.randn(2, shape.layers, OWN, shape.kv_heads, shape.head_dim).to(model.device, model.dtype)
        for layer in range(shape.layers):
            for each in (whole, cache):
                each.put(layer, own[0, layer], own[1, layer], torch.arange(OWN))
        start, paged = OWN, list[PagedChunk]()
        for c in chunks:
            kept = self._rng.random(self.addresses[c].shape) < share
            paged.append(PagedChunk(c, self.sizes[c], start, np.where(kept, self.addresses[c], 0)))
            for layer in range(shape.layers):
                rows = torch.from_numpy(np.flatnonzero(kept[layer].repeat(self.block)[: self.sizes[c]]))
                k, v = self.kv[c][:, layer, rows.to(model.device)]
                whole.put(layer, rotate(k, model.rotary(rows + start)), v, rows + start)
            start += self.sizes[c]
        rows = rows_in_blocks(paged, shape, self.block)
        return PagedRequest(whole, cache, PagedContext(paged, rows), start)
