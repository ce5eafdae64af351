"""The head of a store entry: its bytes, its verification, and the key that names it.

    frame   magic 8s, schema u32, length of the record u64, tag of the record 16s
    record  safetensors: the digest, the token ids, one tag per (layer, block) [L, B, T] and one of the states [T] if
            there are any; sizes, dtype, body and fingerprint as JSON metadata

All numbers are little-endian. seal.py describes the tags and what they protect against.

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.errors import EntryCorrupt
from ragkv.store.format.layout import Layout
from ragkv.store.format.seal import CHECKSUMS, RECORD_BYTES, Seal
from ragkv.types import LANDMARKS, Digest, Key, Shape

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
        state_tag: [T] uint8, the tag of the states; [0] where there are none.
    """

    tokens: tuple[int, ...]
    digest: Digest
    layout: Layout
    tags: NDArray[np.uint8]
    seal: Seal
    fingerprint: str
    bytes: int
    state_tag: NDArray[np.uint8]


def chunk_key(fingerprint: str, salt: str, tokens: Sequence[int]) -> Key:
    """Return the key of a chunk. It is the same in every process and differs when one of the arguments differs.

    Each string is hashed after its length, so that no two triples have the same encoding.
    """
    digest = hashlib.sha256(b"ragkv chunk key 1\n")
    for text in (fingerprint, salt):
        data = text.encode()
        digest.update(struct.pack("<Q", len(data)) + data)
    digest.update(struct.pack(f"<{len(tokens)}q", *tokens))  # half the time of numpy's conversion
    return Key(digest.hexdigest())


def pack_head(
    tokens: Sequence[int],
    digest: Mapping[str, Tensor],
    layout: Layout,
    tags: NDArray[np.uint8],
    fingerprint: str,
    seal: Seal,
    state_tag: bytes = b"",
) -> bytes:
    """Return the head of a chunk.

    Args:
        tokens: Its token ids.
        digest: Its digest, see `digest_tensors`, on the CPU.
        layout: The layout of its body.
        tags: [L, B, T], the tags of its blocks.
        fingerprint: Of the model and settings that made it.
        seal: Computes the tag of the record.
        state_tag: Tag of its states; empty for none.

    Raises:
        ValueError: The sizes of the digest do not match the layout.
    """
    tensors = {**digest, "tokens": torch.tensor(tokens, dtype=torch.int32), "tags": torch.from_numpy(tags)}
    if state_tag:
        tensors["state_tag"] = torch.frombuffer(bytearray(state_tag), dtype=torch.uint8)
    _check_tensors(tensors, layout, seal)
    record = safetensors.torch.save(tensors, {"ragkv": _metadata(layout, fingerprint)})
    return FRAME.pack(MAGIC, SCHEMA, len(record), seal.record(record)) + record


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
    state_tag = tensors.pop("state_tag", torch.empty(0, dtype=torch.uint8)).numpy()
    if layout.dtype == torch.float32:
        # numpy, not torch, because this may be the prefetch thread: see Tier._copy.
        tensors.update({name: torch.from_numpy(tensors[name].numpy().astype(np.float32)) for name in ROUNDED})
    return Head(tokens, Digest(**tensors), layout, tags, seal, fingerprint, len(data), state_tag)


def _digest_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.float32 else dtype


def digest_tensors(digest: Digest, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a digest as they are stored for a model of this dtype, each on its device."""
    tensors = {
        "alpha": digest.alpha.to(torch.float32),
        "unimportance": digest.unimportance.to(torch.float32),
        "landmarks": digest.landmarks.to(torch.int32),
    }
    limit = torch.finfo(_digest_dtype(dtype)).max
    for name in ROUNDED:
        # Clamped, because an infinite key would make the scores of its block infinite or NaN.
        tensors[name] = getattr(digest, name).clamp(-limit, limit).to(_digest_dtype(dtype))
    return {name: tensor.detach() for name, tensor in tensors.items()}


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
    if layout.state_bytes:
        expected["state_tag"] = (torch.uint8, (seal.block_bytes,))
    actual = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    wrong = sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name))
    if wrong:
        raise ValueError("; ".join(f"{name} is {actual.get(name)}, not {expected.get(name)}" for name in wrong))


def _metadata(layout: Layout, fingerprint: str) -> str:
    # One JSON string, because safetensors does not keep the order of metadata, and equal chunks should be equal bytes.
    sizes = {"tokens": layout.tokens, "block": layout.block, **asdict(layout.shape)}
    forms = {"dtype": str(layout.dtype).removeprefix("torch."), "body": layout.body}
    if layout.state_bytes:
        sizes["state_bytes"] = layout.state_bytes
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
    sizes, state_bytes = [metadata[name] for name in SIZES], metadata.get("state_bytes", 0)
    if any(type(number) is not int or number < 1 for number in sizes) or type(metadata["fingerprint"]) is not str:
        raise ValueError("sizes must be numbers above 0")
    if type(state_bytes) is not int or state_bytes < 0:
        raise ValueError("states have a size")
    tokens, block, *shape = sizes
    layout = Layout(Shape(*shape), tokens, block, DTYPES[metadata["dtype"]], metadata["body"], state_bytes)
    return layout, metadata["fingerprint"]


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
