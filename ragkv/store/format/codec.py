"""The codec: how a chunk's KV becomes the bytes of a store entry, and back.

An entry is a head (head.py) and a body. The body has one byte string per layer, as `Layout` describes it: K and V
exactly, or quantised (quantise.py). In a model with states one more follows: the states behind the chunk, exactly. Only
the files of this folder know the format, and tier.py the checksums of what it reads.

Whoever wrote an entry, and whatever its tags say, it cannot run code, because nothing is pickled. Nor can it make a
process allocate more memory than in proportion to the bytes of the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.kernels.host_copy import begin_host_copies
from ragkv.store.format.head import DTYPES, Head, digest_tensors, pack_head
from ragkv.store.format.layout import BlockRanges, Layout, block_ranges
from ragkv.store.format.quantise import dequantise, quantise, refuse_unless
from ragkv.store.format.seal import CHECKSUMS, Seal
from ragkv.types import ChunkKV, Shape

QUANTISED_AT_ONCE = 2**25
"""Numbers of K that a GPU quantises at a time, 128 MiB as float32. A CPU takes one layer at a time."""


def pack(
    kv: ChunkKV, block: int, fingerprint: str, form: str = "exact", seal: Seal = CHECKSUMS
) -> tuple[bytes, list[memoryview]]:
    """Pack a chunk into the head and body of an entry.

    Args:
        kv: The chunk.
        block: Tokens of a block.
        fingerprint: Of the model and settings that made it.
        form: One of `BODIES`.
        seal: Computes the tags.

    Returns:
        The head, and the body as one byte string per layer, and one of states where there are any.

    Raises:
        ValueError: The sizes in `kv` disagree.
        NotQuantisable: The body cannot hold a number of the chunk.
    """
    return pack_bytes(begin_packing(kv, block, form), fingerprint, seal)


@dataclass(frozen=True, eq=False)
class ChunkBytes:
    """A chunk as it is stored, in host memory, without its tags. Its copy from the device may be under way.

    Attributes:
        tokens: Token ids.
        digest: The stored tensors of its digest.
        layout: The layout of the body.
        body: [L, layout.layer_bytes] uint8.
        states: [layout.state_bytes] uint8.
        quantisable: [] bool, whether the body holds the chunk's numbers.
        wait: Waits until the tensors hold their content. Any thread may call it.
    """

    tokens: tuple[int, ...]
    digest: Mapping[str, Tensor]
    layout: Layout
    body: Tensor
    states: Tensor
    quantisable: Tensor
    wait: Callable[[], None]


def begin_packing(kv: ChunkKV, block: int, form: str = "exact") -> ChunkBytes:
    """Do the part of `pack` that its device does, and do not wait for it.

    Args:
        kv: The chunk, on one device.
        block: Tokens of a block.
        form: One of `BODIES`.

    Raises:
        ValueError: The sizes in `kv` disagree.
    """
    layers, tokens, kv_heads, head_dim = kv.k.shape
    states = torch.cat([each.detach().reshape(-1).view(torch.uint8) for each in (*kv.states, kv.k.new_empty(0))])
    shape = Shape(layers, kv.digest.local_query.shape[1], kv_heads, head_dim)
    layout = Layout(shape, tokens, block, kv.k.dtype, form, states.shape[0])
    if block < 1 or tokens < 1 or layout.dtype not in DTYPES.values():
        raise ValueError(f"cannot store {tokens} tokens in blocks of {block} as {layout.dtype}")
    if kv.v.shape != kv.k.shape or kv.v.dtype != kv.k.dtype or len(kv.tokens) != tokens:
        raise ValueError(
            f"{len(kv.tokens)} tokens, K {tuple(kv.k.shape)} {kv.k.dtype}, V {tuple(kv.v.shape)} {kv.v.dtype}"
        )
    body, quantisable = _body(kv, layout)
    digest = digest_tensors(kv.digest, layout.dtype)
    (*copied, body, states, quantisable), wait = begin_host_copies([*digest.values(), body, states, quantisable])
    return ChunkBytes(kv.tokens, dict(zip(digest, copied, strict=True)), layout, body, states, quantisable, wait)


def pack_bytes(chunk: ChunkBytes, fingerprint: str, seal: Seal = CHECKSUMS) -> tuple[bytes, list[memoryview]]:
    """Do the rest of `pack`, which needs no device. Waits for the copies from there. Raises NotQuantisable."""
    chunk.wait()
    refuse_unless(chunk.quantisable)
    # numpy has no bfloat16, so the bytes leave torch as bytes.
    body = [memoryview(layer) for layer in chunk.body.numpy()]
    tags, state_tag = _tags(body, chunk.layout, seal), b""
    if chunk.layout.state_bytes:
        body.append(memoryview(chunk.states.numpy()))  # type: ignore[arg-type]  # as in tier.py
        state_tag = seal.block(body[-1])
    return pack_head(chunk.tokens, chunk.digest, chunk.layout, tags, fingerprint, seal, state_tag), body


def as_stored(kv: ChunkKV, head: Head, body: Sequence[memoryview]) -> ChunkKV:
    """Return a chunk as it would be loaded from the head and body it was packed into.

    Its digest is rounded, and K and V too if the body is quantised. So an answer does not depend on whether the chunk
    was a hit or had to be encoded again.
    """
    if head.layout.body == "exact":
        return replace(kv, digest=head.digest)
    k, v = torch.empty_like(kv.k), torch.empty_like(kv.v)
    # One layer at a time, because all at once would need a second copy of everything. All layers have one layout.
    ranges = block_ranges(head.layout, [range(head.layout.blocks), *[()] * (head.layout.shape.layers - 1)])
    for layer, data in enumerate(body[: head.layout.shape.layers]):
        (k[layer], v[layer]), *_ = unpack(
            torch.frombuffer(data, dtype=torch.uint8), offsets(ranges), ranges, head.layout
        )
    return replace(kv, digest=head.digest, k=k, v=v)


def offsets(ranges: BlockRanges) -> NDArray[np.int64]:
    """Return where each block begins in the bytes that `fetch_blocks` returns."""
    return ranges.size.cumsum() - ranges.size


def unpack(raw: Tensor, starts: NDArray[np.int64], ranges: BlockRanges, layout: Layout) -> list[tuple[Tensor, Tensor]]:
    """Unpack blocks from their stored bytes.

    All layers are copied at once, because at these sizes a torch call costs more than the bytes.

    Args:
        raw: Bytes that hold the blocks, uint8. The blocks may lie in any order, with anything between them.
        starts: Where each block begins in `raw`, in multiples of a row's bytes.
        ranges: The blocks.
        layout: The chunk's layout.

    Returns:
        Per layer (k, v), each [m, Hkv, d], in the model's dtype, on the device of `raw`. m counts the tokens of the
        layer's blocks, in order. K is before RoPE.
    """
    counts = np.minimum(layout.tokens - ranges.block * layout.block, layout.block)
    rows, begin = int(counts.sum()), starts // layout.row_bytes
    size = (2, rows, layout.shape.kv_heads, layout.shape.head_dim)
    both = torch.empty(size, dtype=layout.dtype, device=raw.device)
    if layout.body == "exact":
        # K of a result token is at row (first row of its block in raw) + (its index in the block). V is n_b rows later.
        k_rows = np.arange(rows) + (begin - (counts.cumsum() - counts)).repeat(counts)
        source = torch.from_numpy(np.concatenate([k_rows, k_rows + counts.repeat(counts)])).to(raw.device)
        # Copied as bytes: measured four times as fast as copying bfloat16.
        out = both.view(torch.uint8).view(2 * rows, layout.row_bytes)
        torch.index_select(raw.view(-1, layout.row_bytes), 0, source, out=out)
    else:
        dequantise(raw, begin, counts, layout, both)
    per_layer = np.bincount(ranges.layer, weights=counts, minlength=layout.shape.layers).astype(np.int64).tolist()
    return list(zip(torch.split(both[0], per_layer), torch.split(both[1], per_layer), strict=True))


def _body(kv: ChunkKV, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the body [L, layout.layer_bytes] uint8 and whether it holds the numbers [] bool, on the device of kv."""
    k, v, whole = kv.k.detach(), kv.v.detach(), layout.tokens // layout.block * layout.block
    body = torch.empty((layout.shape.layers, layout.layer_bytes), dtype=torch.uint8, device=k.device)
    if layout.body == "exact":
        end = layout.layer_bytes * whole // layout.tokens
        for part, rows in ((body[:, :end], slice(0, whole)), (body[:, end:], slice(whole, None))):
            _copy_blocks(part, k[:, rows], v[:, rows], layout)
        return body, torch.ones((), dtype=torch.bool, device=k.device)
    fits = list[Tensor]()
    at_once = max(1, (QUANTISED_AT_ONCE if k.is_cuda else 0) // k[0].numel())
    for out, k_some, v_some in zip(*(each.split(at_once) for each in (body, k, v)), strict=True):
        end = whole // layout.block * layout.full_bytes
        for part, rows in ((out[:, :end], slice(0, whole)), (out[:, end:], slice(whole, None))):
            if part.shape[1]:
                quantised, fit = _quantised_blocks(k_some[:, rows], v_some[:, rows], layout)
                part.copy_(quantised)
                fits.append(fit)
    return body, torch.stack(fits).all()


def _copy_blocks(out: Tensor, k: Tensor, v: Tensor, layout: Layout) -> None:
    """Copy rows k, v [L, m · tokens, Hkv, d] as m blocks to out [L, bytes]: of each block K, then V.

    All layers at once, and each byte once: a large model's chunk has hundreds of megabytes.
    """
    tokens = min(layout.block, k.shape[1])
    if tokens:
        blocks = out.view(layout.dtype).view(k.shape[0], -1, 2, tokens, *k.shape[2:])
        for i, rows in enumerate((k, v)):
            blocks[:, :, i] = rows.unflatten(1, (-1, tokens))


def _quantised_blocks(k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Quantise rows k, v [L, m · tokens, Hkv, d] as m blocks. Returns the bytes [L, all], and as `quantise`."""
    tokens = min(layout.block, k.shape[1])
    k_blocks, v_blocks = (x.unflatten(1, (-1, tokens)).flatten(0, 1) for x in (k, v))
    quantised, fit = quantise(k_blocks, v_blocks, layout)
    return quantised.view(k.shape[0], -1), fit


def _tags(body: Sequence[memoryview], layout: Layout, seal: Seal) -> NDArray[np.uint8]:
    requested = [range(layout.blocks)] * layout.shape.layers
    tags = [seal.block(body[layer][start : start + size]) for layer, _, start, size in block_ranges(layout, requested)]
    return np.frombuffer(b"".join(tags), np.uint8).reshape(layout.shape.layers, layout.blocks, seal.block_bytes).copy()
