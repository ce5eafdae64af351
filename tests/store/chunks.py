"""Random chunks as a model would encode them, and helpers that read them back from a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragkv.store.base import Arrived, KVStore, Range, ignore
from ragkv.store.format.codec import offsets, pack, unpack
from ragkv.store.format.head import Head, chunk_key
from ragkv.store.format.layout import Layout, block_ranges
from ragkv.store.format.seal import CHECKSUMS, Seal
from ragkv.store.tier import fetch_blocks
from ragkv.types import LANDMARKS, ChunkKV, Digest, Key, Shape

BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
FINGERPRINT, SALT = "model 1", "collection"
SHAPE = Shape(layers=3, q_heads=4, kv_heads=2, head_dim=8)


def random_kv(
    tokens: int = 22,
    block: int = 4,
    shape: Shape = SHAPE,
    dtype: torch.dtype = torch.float32,
    pairs: int = 2,
    seed: int = 0,
) -> ChunkKV:
    """Return a ChunkKV whose K and V are random bits, with infinities, NaNs and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-tokens // block)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)

    def bits(*sizes: int) -> Tensor:
        raw = torch.randint(0, 256, (*sizes, dtype.itemsize), generator=generator, dtype=torch.uint8)
        return raw.view(dtype).squeeze(-1)

    digest = Digest(
        mean_keys=normal(shape.layers, blocks, shape.kv_heads, shape.head_dim),
        local_query=normal(shape.layers, shape.q_heads, shape.head_dim),
        alpha=torch.rand((shape.layers, blocks), generator=generator),
        unimportance=torch.rand((shape.layers, blocks), generator=generator),
        landmarks=torch.randint(
            0, tokens, (shape.layers, blocks, min(LANDMARKS, block)), generator=generator, dtype=torch.int32
        ),
        retrieval_keys=normal(pairs, tokens, shape.head_dim),
    )
    digest.alpha[0, 0] = torch.inf
    ids = torch.randint(0, 50_000, (tokens,), generator=generator).tolist()
    size = (shape.layers, tokens, shape.kv_heads, shape.head_dim)
    return ChunkKV(tuple(ids), bits(*size), bits(*size), digest)


def finite_kv(
    tokens: int = 22,
    block: int = 4,
    shape: Shape = SHAPE,
    dtype: torch.dtype = torch.float32,
    pairs: int = 2,
    seed: int = 0,
) -> ChunkKV:
    """Return a ChunkKV whose K and V are ordinary numbers, which any body can hold."""
    kv = random_kv(tokens, block, shape, dtype, pairs, seed)
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn((2, *kv.k.shape), generator=generator, dtype=torch.float64).mul(3).to(dtype)
    return replace(kv, k=k, v=v)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal in dtype, size and every bit. NaN equals itself; 0 differs from -0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(BITS[one.dtype]), other.contiguous().view(BITS[other.dtype]))


def packed(
    kv: ChunkKV, block: int = 4, form: str = "exact", seal: Seal = CHECKSUMS
) -> tuple[Key, bytes, list[memoryview]]:
    """Return the key under FINGERPRINT and SALT, the head and the body of a chunk."""
    return chunk_key(FINGERPRINT, seal.salt(SALT), kv.tokens), *pack(kv, block, FINGERPRINT, form, seal)


def read_ranges(store: KVStore, key: Key, *ranges: Range) -> bytes:
    """Read ranges into a new buffer."""
    out = bytearray(sum(part.size for part in ranges))
    store.read(key, ranges, memoryview(out))
    return bytes(out)


def read_blocks(
    store: KVStore, key: Key, head: Head, requested: Sequence[Sequence[int]]
) -> list[tuple[Tensor, Tensor]]:
    """Load blocks from a store without tiers. `wanted` holds per layer the block ids, ascending."""
    ranges = block_ranges(head.layout, requested)
    return unpack(fetch_blocks(store, key, head, ranges), offsets(ranges), ranges, head.layout)


def wanted_bytes(layout: Layout, requested: Sequence[Sequence[int]]) -> int:
    """Return the bytes that `read_blocks` reads for `wanted`: the sum of the blocks and nothing else."""
    return sum(size for *_, size in block_ranges(layout, requested))


class MemoryBody:
    """A store that only reads a body in memory, for tests of the codec.

    Attributes:
        ranges: The ranges that were read.
    """

    def __init__(self, body: Sequence[memoryview]) -> None:
        self.body = body
        self.ranges: list[Range] = []

    def read(self, key: Key, ranges: Sequence[Range], out: memoryview, arrived: Arrived = ignore) -> None:
        self.ranges += ranges
        out[:] = b"".join(self.body[part.layer][part.offset : part.offset + part.size] for part in ranges)
        for number in reversed(range(len(ranges))):  # in any order, as the contract allows
            arrived(number)
