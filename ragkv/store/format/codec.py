"""What the bytes of a stored chunk mean. No other file knows.

An entry is a head and a body.

    body    per layer one byte string, laid out as `Layout` says: K and V exactly, or quantised (quantise.py)
    head    frame   magic 8s · schema u32 · length of the record u64 · tag of the record 16s
            record  safetensors: the digest, the token ids, one tag per (layer, block) [L, B, T]; sizes, dtype, body and
                    fingerprint as JSON metadata

All numbers are little-endian. What tags are, and against whom they help, is the seal's matter (seal.py). Whoever wrote
an entry, and whatever its tags say, it cannot run code (nothing here is pickled), nor make a reader allocate more than
in proportion to the bytes it was given.

Digests only rank blocks, and every question reads them for every retrieved chunk. So where the model computes in
float32, mean_keys, local_query and retrieval_keys are stored in float16: half the bytes, and what rounding changes in a
score is far below the distance between blocks. float16 and bfloat16 stay as they are, and so does float64 (the oracles
compare bits). They come back in the model's own dtype.
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
from ragkv.store.format.layout import BlockRanges, Layout, block_ranges, joined
from ragkv.store.format.quantise import dequantise, quantise
from ragkv.store.format.seal import CHECKSUMS, RECORD_BYTES, Seal
from ragkv.types import LANDMARKS, ChunkKV, Digest, Key, Shape

__all__ = [
    *("Head", "Layout", "as_stored", "chunk_key", "fetch", "made_by", "offsets", "pack", "unpack"),
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
    """A head record, read and verified.

    digest: as in types.py, mean_keys, local_query and retrieval_keys rounded (see above) · tags [L, B, T] uint8, one of
    each block's bytes · seal: vouched for the record, and says whether a block has its tag · bytes: size as stored.
    """

    tokens: tuple[int, ...]
    digest: Digest
    layout: Layout
    tags: NDArray[np.uint8]
    seal: Seal
    fingerprint: str
    bytes: int


def chunk_key(fingerprint: str, salt: str, tokens: Sequence[int]) -> Key:
    """The name of a chunk: the same in every process, different whenever fingerprint, salt or tokens differ.

    Strings go in with their length in front, so that no two triples are encoded alike.
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
    """(head, body): the body has one byte string per layer, in the form `form` of BODIES.

    Raises ValueError when the sizes in `kv` disagree, NotQuantisable for numbers that the form cannot hold.
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
    """Read a head and check that it is whole, of this schema, consistent in itself, and the one that `key` names.

    Raises EntryCorrupt otherwise.
    """
    record = _record(data, key, seal)
    try:
        tensors = safetensors.torch.load(record)
        layout, maker = _read_metadata(record)
        _check_tensors(tensors, layout, seal)
    except Exception as error:  # A forged record may make its parsers raise anything; it is not a head all the same.
        raise EntryCorrupt(f"head of {key} is malformed: {error}") from error
    if maker != fingerprint:
        raise EntryCorrupt(f"head of {key} was made by {maker[:80]}, not by {fingerprint}")
    tokens = tuple(tensors.pop("tokens").tolist())
    if chunk_key(fingerprint, salt, tokens) != key:
        raise EntryCorrupt(f"head of {key} belongs to another chunk")
    low, high = tensors["landmarks"].aminmax()
    if low < 0 or high >= layout.tokens:
        raise EntryCorrupt(f"head of {key} names a landmark outside the chunk")
    tags = tensors.pop("tags").numpy()
    if layout.dtype == torch.float32:
        # By numpy, in this thread, which may be one that fetches ahead: see Tier._copy.
        tensors.update({name: torch.from_numpy(tensors[name].numpy().astype(np.float32)) for name in ROUNDED})
    return Head(tokens, Digest(**tensors), layout, tags, seal, fingerprint, len(data))


def as_stored(kv: ChunkKV, head: Head, body: Sequence[memoryview]) -> ChunkKV:
    """A chunk as it would come back from what it was packed into: its digest rounded, K and V too if quantised.

    So what a question is answered from does not depend on whether the chunk was found or had to be encoded again.
    """
    if head.layout.body == "exact":
        return replace(kv, digest=head.digest)
    k, v = torch.empty_like(kv.k), torch.empty_like(kv.v)
    # Layer by layer, to need no second copy of everything: each is laid out as the first is.
    found = block_ranges(head.layout, [range(head.layout.blocks), *[()] * (head.layout.shape.layers - 1)])
    for layer, data in enumerate(body):
        (k[layer], v[layer]), *_ = unpack(torch.frombuffer(data, dtype=torch.uint8), offsets(found), found, head.layout)
    return replace(kv, digest=head.digest, k=k, v=v)


def offsets(found: BlockRanges) -> NDArray[np.int64]:
    """Where each part begins in the bytes that `fetch` returns."""
    return found.size.cumsum() - found.size


def fetch(store: KVStore, key: Key, head: Head, found: BlockRanges) -> Tensor:
    """The bytes of the parts, one after another, uint8, every block verified; only these bytes are read.

    Raises EntryMissing, EntryCorrupt, StoreUnavailable.
    """
    raw = torch.empty(found.bytes, dtype=torch.uint8)
    view = memoryview(raw.numpy())  # type: ignore[arg-type]  # numpy declares its buffer from Python 3.12 on
    ranges = joined(found)
    tags, (_, blocks, wide) = memoryview(head.tags.tobytes()), head.tags.shape
    # Parts of each range, as (layer, block, start, end): neighbours are read as one and checked apart.
    inside: list[list[tuple[int, int, int, int]]] = [[] for _ in ranges]
    number, left, start = -1, 0, 0
    for layer, block, _, size in found:
        if left == 0:
            number += 1
            left = ranges[number].size
        inside[number].append((layer, block, start, start + size))
        left -= size
        start += size

    def verify(number: int) -> None:
        for layer, block, start, end in inside[number]:
            at = (layer * blocks + block) * wide
            if not hmac.compare_digest(head.seal.block(view[start:end]), tags[at : at + wide]):
                raise EntryCorrupt(f"{key}: layer {layer}, block {block} is damaged")

    if ranges:
        store.read(key, ranges, view, verify)
    return raw


def unpack(raw: Tensor, starts: NDArray[np.int64], found: BlockRanges, layout: Layout) -> list[tuple[Tensor, Tensor]]:
    """Blocks as stored -> per layer (k, v), each [m, Hkv, d] in the model's dtype on the device of `raw`, m = tokens of
    its blocks, in order; K is before RoPE.

    raw: bytes, uint8 · starts: where each of the parts `found` begins in them, a multiple of a row's bytes; parts may
    lie in any order and with anything between them.
    One copy for all layers: at these sizes torch calls cost more than bytes.
    """
    counts = np.minimum(layout.tokens - found.block * layout.block, layout.block)
    rows, begin = int(counts.sum()), starts // layout.row_bytes
    size = (2, rows, layout.shape.kv_heads, layout.shape.head_dim)
    both = torch.empty(size, dtype=layout.dtype, device=raw.device)
    if layout.body == "exact":
        # Token i of the result is row (its block's first row in raw) + (its number in the block); its V lies n_b on.
        k_rows = np.arange(rows) + (begin - (counts.cumsum() - counts)).repeat(counts)
        source = torch.from_numpy(np.concatenate([k_rows, k_rows + counts.repeat(counts)])).to(raw.device)
        # As bytes: measured four times quicker than as bfloat16.
        out = both.view(torch.uint8).view(2 * rows, layout.row_bytes)
        torch.index_select(raw.view(-1, layout.row_bytes), 0, source, out=out)
    else:
        dequantise(raw, begin, counts, layout, both)
    per_layer = np.bincount(found.layer, weights=counts, minlength=layout.shape.layers).astype(np.int64).tolist()
    return list(zip(torch.split(both[0], per_layer), torch.split(both[1], per_layer), strict=True))


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
    """Rows k, v [m · tokens, Hkv, d] -> the bytes of m blocks, one after another."""
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
        # Clamped: an outlier key must stay a large number; inf would make the scores of its block inf or NaN.
        tensors[name] = getattr(digest, name).clamp(-limit, limit).to(_digest_dtype(dtype))
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _check_tensors(tensors: dict[str, Tensor], layout: Layout, seal: Seal) -> None:
    """Raises unless these are the record's tensors, of the dtypes and sizes that `layout` and `seal` tell."""
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
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if wrong:
        raise ValueError("; ".join(f"{name} is {found.get(name)}, not {expected.get(name)}" for name in wrong))


def _metadata(layout: Layout, fingerprint: str) -> str:
    # One JSON string, because safetensors keeps no order among metadata and equal chunks should be equal bytes.
    sizes = {"tokens": layout.tokens, "block": layout.block, **asdict(layout.shape)}
    forms = {"dtype": str(layout.dtype).removeprefix("torch."), "body": layout.body}
    return json.dumps({"fingerprint": fingerprint, **forms, **sizes})


def _record(data: bytes, key: Key, seal: Seal) -> bytes:
    """The record inside the frame. Raises EntryCorrupt when the frame or the tag says that it is not what was put."""
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
    """(layout, fingerprint) of a record that safetensors has accepted. Raises what a malformed one makes it raise."""
    (size,) = struct.unpack_from("<Q", record)
    told = json.loads(json.loads(record[8 : 8 + size])["__metadata__"]["ragkv"])
    sizes = [told[name] for name in SIZES]
    if any(type(number) is not int or number < 1 for number in sizes) or type(told["fingerprint"]) is not str:
        raise ValueError("sizes must be numbers above 0")
    tokens, block, *shape = sizes
    return Layout(Shape(*shape), tokens, block, DTYPES[told["dtype"]], told["body"]), told["fingerprint"]


def made_by(data: bytes, key: Key) -> str:
    """Which fingerprint a head claims to be of; the schema, where that is another one. Raises EntryCorrupt.

    Nothing is verified: a head under another secret cannot be, and is somebody's all the same.
    """
    if len(data) >= FRAME.size:
        magic, schema, *_ = FRAME.unpack_from(data)
        if magic == MAGIC and schema != SCHEMA:
            return f"schema {schema}"
    try:
        return _read_metadata(data[FRAME.size :])[1]
    except Exception as error:  # As in unpack_head.
        raise EntryCorrupt(f"head of {key} is malformed: {error}") from error
