"""The codec: how a chunk's KV becomes the bytes of a store entry, and back. No other file knows this format.

An entry is a head and a body.

    body    per layer one byte string as `Layout` describes it: K and V exactly, or quantised (quantise.py)
    head    frame   magic 8s, schema u32, length of the record u64, tag of the record 16s
            record  safetensors: the digest, the token ids, one tag per (layer, block) [L, B, T]; sizes, dtype, body and
                    fingerprint as JSON metadata

All numbers are little-endian. seal.py describes the tags and what they protect against. Whoever wrote an entry, and
whatever its tags say, it cannot run code, because nothing is pickled. Nor can it make a process allocate more memory
than in proportion to the bytes of the entry.

Digests only rank blocks, and every question reads the digests of all retrieved chunks. So for a float32 model
mean_keys, local_query and retrieval_keys are stored in float16: half the bytes, and the rounding changes scores far
less than blocks differ. float16, bfloat16 and float64 are stored as they are; the float64 oracles compare bits. All of
them are restored in the model's own dtype.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.errors import EntryCorrupt
from ragkv.store.base import KVStore
from ragkv.store.format.layout import BlockRanges, Layout, Part, block_ranges, merge_adjacent
from ragkv.store.format.quantise import dequantise, quantise
from ragkv.store.format.seal import CHECKSUMS, RECORD_BYTES, Seal
from ragkv.types import LANDMARKS, ChunkKV, Digest, Key, Shape

__all__ = [
    *("Head", "Layout", "as_stored", "chunk_key", "fetch_blocks", "made_by", "offsets", "pack", "unpack"),
    "unpack_head",
]

MAGIC = b"ragkvhd\n"
SCHEMA = 3
FRAME = struct.Struct(f"<8sIQ{RECORD_BYTES}s")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
SIZES = ("tokens", "block", "layers", "q_heads", "kv_heads", "head_dim")
ROUNDED = ("mean_keys", "local_query", "retrieval_keys")


@dataclass(frozen=True, eq=False)
class Head:
    """A parsed and verified head record.

    Attributes:
        tokens: The chunk's token ids.
        digest: The chunk's digest; mean_keys, local_query and retrieval_keys are rounded (see the module).
        layout: The layout of the body.
        tags: [L, B, T] uint8, the tag of each block.
        seal: The seal that verified the record. It verifies the blocks too.
        fingerprint: Of the model and settings that made the entry.
        bytes: Size of the head as stored.
    """

    tokens: tuple[int, ...]
    digest: Digest
    layout: Layout
    tags: NDArray[np.uint8]
    seal: Seal
    fingerprint: str
    bytes: int


def chunk_key(fingerprint: str, salt: str, tokens: Sequence[int]) -> Key:
    """Return the key of a chunk. It is the same in every process and differs when one of the arguments differs.

    Each string is hashed after its length, so that no two triples have the same encoding.
    """
    digest = hashlib.sha256(b"ragkv chunk key 1\n")
    for text in (fingerprint, salt):
        data = text.encode()
        digest.update(struct.pack("<Q", len(data)) + data)
    digest.update(np.asarray(tokens, dtype="<i8").tobytes())
    return Key(digest.hexdigest())


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
        The head, and the body as one byte string per layer.

    Raises:
        ValueError: The sizes in `kv` disagree.
        NotQuantisable: The body cannot hold a number of the chunk.
    """
    layers, tokens, kv_heads, head_dim = kv.k.shape
    layout = Layout(Shape(layers, kv.digest.local_query.shape[1], kv_heads, head_dim), tokens, block, kv.k.dtype, form)
    if block < 1 or tokens < 1 or layout.dtype not in DTYPES.values():
        raise ValueError(f"cannot store {tokens} tokens in blocks of {block} as {layout.dtype}")
    if kv.v.shape != kv.k.shape or kv.v.dtype != kv.k.dtype or len(kv.tokens) != tokens:
        raise ValueError(
            f"{len(kv.tokens)} tokens, K {tuple(kv.k.shape)} {kv.k.dtype}, V {tuple(kv.v.shape)} {kv.v.dtype}"
        )
    body = _body(kv, layout)
    tensors = _digest_tensors(kv.digest, layout.dtype)
    tensors["tokens"] = torch.tensor(kv.tokens, dtype=torch.int32)
    tensors["tags"] = torch.from_numpy(_tags(body, layout, seal))
    _check_tensors(tensors, layout, seal)
    record = safetensors.torch.save(tensors, {"ragkv": _metadata(layout, fingerprint)})
    return FRAME.pack(MAGIC, SCHEMA, len(record), seal.record(record)) + record, body


def unpack_head(data: bytes, key: Key, fingerprint: str, salt: str, seal: Seal = CHECKSUMS) -> Head:
    """Parse a head and verify it.

    Raises:
        EntryCorrupt: The head is damaged or inconsistent, has another schema or fingerprint, or is not that of `key`.
    """
    record = _record(data, key, seal)
    try:
        tensors = safetensors.torch.load(record)
        layout, made_with = _read_metadata(record)
        _check_tensors(tensors, layout, seal)
    except Exception as error:  # A forged record may make the parsers raise anything.
        raise EntryCorrupt(f"head of {key} is malformed: {error}") from error
    if made_with != fingerprint:
        raise EntryCorrupt(f"head of {key} was made by {made_with[:80]}, not by {fingerprint}")
    tokens = tuple(tensors.pop("tokens").tolist())
    if chunk_key(fingerprint, salt, tokens) != key:
        raise EntryCorrupt(f"head of {key} belongs to another chunk")
    low, high = tensors["landmarks"].aminmax()
    if low < 0 or high >= layout.tokens:
        raise EntryCorrupt(f"head of {key} names a landmark outside the chunk")
    tags = tensors.pop("tags").numpy()
    if layout.dtype == torch.float32:
        # numpy, not torch, because this may be the prefetch thread: see Tier._copy.
        tensors.update({name: torch.from_numpy(tensors[name].numpy().astype(np.float32)) for name in ROUNDED})
    return Head(tokens, Digest(**tensors), layout, tags, seal, fingerprint, len(data))


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
    for layer, data in enumerate(body):
        (k[layer], v[layer]), *_ = unpack(
            torch.frombuffer(data, dtype=torch.uint8), offsets(ranges), ranges, head.layout
        )
    return replace(kv, digest=head.digest, k=k, v=v)


def offsets(ranges: BlockRanges) -> NDArray[np.int64]:
    """Return where each block begins in the bytes that `fetch_blocks` returns."""
    return ranges.size.cumsum() - ranges.size


def fetch_blocks(store: KVStore, key: Key, head: Head, ranges: BlockRanges) -> Tensor:
    """Read blocks from a store and verify each of them. No other bytes are read.

    Returns:
        The bytes of the blocks, one after another, uint8.

    Raises:
        EntryMissing: The entry, or a part of it, is not in the store.
        EntryCorrupt: A block is damaged.
        StoreUnavailable: The store does not answer.
    """
    raw = torch.empty(ranges.bytes, dtype=torch.uint8)
    view = memoryview(raw.numpy())  # type: ignore[arg-type]  # numpy declares its buffer from Python 3.12 on
    reads = merge_adjacent(ranges)
    tags, (_, blocks, tag_bytes) = memoryview(head.tags.tobytes()), head.tags.shape
    blocks_of = _blocks_by_read(ranges, [read.size for read in reads])

    def verify(number: int) -> None:
        for layer, block, start, size in blocks_of[number]:
            at = (layer * blocks + block) * tag_bytes
            if not hmac.compare_digest(head.seal.block(view[start : start + size]), tags[at : at + tag_bytes]):
                raise EntryCorrupt(f"{key}: layer {layer}, block {block} is damaged")

    if reads:
        store.read(key, reads, view, verify)
    return raw


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


def _blocks_by_read(ranges: BlockRanges, reads: Sequence[int]) -> list[list[Part]]:
    """Return the blocks that each read covers, as (layer, block, start and size in the output buffer).

    Args:
        ranges: The blocks.
        reads: The size of each read. Adjacent blocks are read at once and verified one by one.
    """
    by_read: list[list[Part]] = [[] for _ in reads]
    number, left, start = -1, 0, 0
    for layer, block, _, size in ranges:
        if left == 0:
            number += 1
            left = reads[number]
        by_read[number].append((layer, block, start, size))
        left -= size
        start += size
    return by_read


def _body(kv: ChunkKV, layout: Layout) -> list[memoryview]:
    rest = layout.tokens % layout.block
    whole = layout.tokens - rest
    body = torch.empty((layout.shape.layers, layout.layer_bytes), dtype=torch.uint8)
    for out, k, v in zip(body, kv.k.detach(), kv.v.detach(), strict=True):
        full, last = _blocks(k[:whole], v[:whole], layout.block, layout), _blocks(k[whole:], v[whole:], rest, layout)
        torch.cat([full, last], out=out)
    # numpy has no bfloat16, so the bytes leave torch as bytes.
    return [memoryview(layer) for layer in body.numpy()]


def _blocks(k: Tensor, v: Tensor, tokens: int, layout: Layout) -> Tensor:
    """Return the bytes of m blocks, one after another, from rows k, v [m · tokens, Hkv, d]."""
    k, v = (x.reshape(-1, max(1, tokens), *x.shape[1:]) for x in (k, v))
    if layout.body == "exact":
        return torch.stack([k, v], dim=1).view(-1).view(torch.uint8)
    return quantise(k, v, layout).view(-1)


def _tags(body: Sequence[memoryview], layout: Layout, seal: Seal) -> NDArray[np.uint8]:
    wanted = [range(layout.blocks)] * layout.shape.layers
    tags = [seal.block(body[layer][start : start + size]) for layer, _, start, size in block_ranges(layout, wanted)]
    return np.frombuffer(b"".join(tags), np.uint8).reshape(layout.shape.layers, layout.blocks, seal.block_bytes).copy()


def _digest_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.float32 else dtype


def _digest_tensors(digest: Digest, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {
        "alpha": digest.alpha.to(torch.float32),
        "unimportance": digest.unimportance.to(torch.float32),
        "landmarks": digest.landmarks.to(torch.int32),
    }
    limit = torch.finfo(_digest_dtype(dtype)).max
    for name in ROUNDED:
        # Clamped, because an infinite key would make the scores of its block infinite or NaN.
        tensors[name] = getattr(digest, name).clamp(-limit, limit).to(_digest_dtype(dtype))
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _check_tensors(tensors: dict[str, Tensor], layout: Layout, seal: Seal) -> None:
    """Raise an error unless these are a record's tensors, with the dtypes and sizes that `layout` and `seal` give."""
    shape, rounded = layout.shape, _digest_dtype(layout.dtype)
    blocks = (shape.layers, layout.blocks)
    expected = {
        "tokens": (torch.int32, (layout.tokens,)),
        "tags": (torch.uint8, (*blocks, seal.block_bytes)),
        "mean_keys": (rounded, (*blocks, shape.kv_heads, shape.head_dim)),
        "local_query": (rounded, (shape.layers, shape.q_heads, shape.head_dim)),
        "alpha": (torch.float32, blocks),
        "unimportance": (torch.float32, blocks),
        "landmarks": (torch.int32, (*blocks, min(LANDMARKS, layout.block))),
        "retrieval_keys": (rounded, (tensors["retrieval_keys"].shape[0], layout.tokens, shape.head_dim)),
    }
    actual = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    wrong = sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name))
    if wrong:
        raise ValueError("; ".join(f"{name} is {actual.get(name)}, not {expected.get(name)}" for name in wrong))


def _metadata(layout: Layout, fingerprint: str) -> str:
    # One JSON string, because safetensors does not keep the order of metadata, and equal chunks should be equal bytes.
    sizes = {"tokens": layout.tokens, "block": layout.block, **asdict(layout.shape)}
    forms = {"dtype": str(layout.dtype).removeprefix("torch."), "body": layout.body}
    return json.dumps({"fingerprint": fingerprint, **forms, **sizes})


def _record(data: bytes, key: Key, seal: Seal) -> bytes:
    """Return the record inside the frame. Raises EntryCorrupt when the frame or the tag does not match."""
    if len(data) < FRAME.size:
        raise EntryCorrupt(f"head of {key} has only {len(data)} bytes")
    magic, schema, size, tag = FRAME.unpack_from(data)
    if magic != MAGIC or schema != SCHEMA:
        raise EntryCorrupt(f"head of {key} is not of schema {SCHEMA}")
    record = data[FRAME.size :]
    if len(record) != size or not hmac.compare_digest(seal.record(record), tag):
        raise EntryCorrupt(f"head of {key} is damaged, or was made under another secret")
    return record


def _read_metadata(record: bytes) -> tuple[Layout, str]:
    """Return the layout and fingerprint of a record. A malformed record may raise any exception."""
    (size,) = struct.unpack_from("<Q", record)
    metadata = json.loads(json.loads(record[8 : 8 + size])["__metadata__"]["ragkv"])
    sizes = [metadata[name] for name in SIZES]
    if any(type(number) is not int or number < 1 for number in sizes) or type(metadata["fingerprint"]) is not str:
        raise ValueError("sizes must be numbers above 0")
    tokens, block, *shape = sizes
    return Layout(Shape(*shape), tokens, block, DTYPES[metadata["dtype"]], metadata["body"]), metadata["fingerprint"]


def made_by(data: bytes, key: Key) -> str:
    """Return the fingerprint that a head claims, or its schema when that is another one.

    The head is not verified, because a head under another secret cannot be verified and still has an owner.

    Raises:
        EntryCorrupt: The head cannot be parsed.
    """
    if len(data) >= FRAME.size:
        magic, schema, *_ = FRAME.unpack_from(data)
        if magic == MAGIC and schema != SCHEMA:
            return f"schema {schema}"
    try:
        return _read_metadata(data[FRAME.size :])[1]
    except Exception as error:  # As in unpack_head.
        raise EntryCorrupt(f"head of {key} is malformed: {error}") from error
