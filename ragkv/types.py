"""The nouns of ragkv, frozen and without behaviour. Words as in docs/architecture.md.

Axis letters used in every docstring of the project:
    L layers · Hq query heads · Hkv key/value heads · d head size · n tokens of a chunk · B blocks of a chunk
    D chunks in one request · P retrieval (layer, kv head) pairs · T rows of one model pass
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NewType

if TYPE_CHECKING:
    # Naming a document must not cost loading torch: `ragkv ls` answers at once.
    from torch import Tensor

LANDMARKS = 4
"""Most attended tokens of a block that a digest remembers; InfLLM represents a block by as many."""

Key = NewType("Key", str)
"""Name of a stored chunk: hash of fingerprint, collection salt and token ids; safe as a file name."""

Blend = Callable[["Tensor", "Tensor"], "Tensor"]
"""`(new, old) -> kept`, rows [m, Hkv, d] each; applied to rotated K and to V separately."""

Scalar = str | int | float | bool | None
Filter = Mapping[str, Scalar | Sequence[Scalar]]
"""What the metadata of a document has to say: for each key the value, or one of the values (catalog/attributes.py)."""


@dataclass(frozen=True)
class Shape:
    """What a model's KV looks like."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Document:
    """What a user gave us. `id` is unique inside its collection."""

    id: str
    title: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    collection: str = "default"


@dataclass(frozen=True)
class Chunk:
    """Unit of retrieval and of KV caching.

    tokens are those of the whole prompt piece (wrapper, title and text), so the KV of a chunk is the KV of `tokens`.
    """

    id: str
    document_id: str
    ordinal: int
    title: str
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Hit:
    """A retrieved chunk. score: fused rank score, larger is better · row: of the chunk in the catalogue, never used
    twice."""

    chunk: Chunk
    score: float
    row: int = 0


@dataclass(frozen=True)
class AskOptions:
    """How one question is asked. Every edge (HTTP, OpenAI, command line, Python) converts to it; nothing repeats it.

    Attributes:
        collection: Where to search.
        conversation: Name of a conversation of this collection. The question continues it, or starts it.
        top_k: Chunks to retrieve; None uses the setting.
        filter: Conditions on the metadata of documents (catalog/attributes.py); None searches all.
        method: NAME[:FIELD=VALUE,...]; None uses the setting.
        prefill: Prefill policy, written likewise; None uses the setting.
        decode: Decode policy, written likewise; None uses the setting.
        max_tokens: Longest answer; None uses the setting.
        temperature: 0 decodes greedily.
        top_p: Samples from the smallest set of tokens that holds this share of the probability.
        stop: Strings that end the answer. They are not part of it.
        seed: Seed of the sampler.
    """

    collection: str = "default"
    conversation: str | None = None
    top_k: int | None = None
    filter: Filter | None = None
    method: str | None = None
    prefill: str | None = None
    decode: str | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    seed: int = 0


@dataclass(frozen=True)
class Digest:
    """What is kept per chunk to choose blocks without loading them (algorithms: SamKV 2.3, scout).

    mean_keys      [L, B, Hkv, d]  mean of the block's pre-RoPE keys; a partial last block over its real tokens
    local_query    [L, Hq, d]      mean of the pre-RoPE queries of the local blocks' tokens
    alpha          [L, B] float32  importance exponent, smaller = more important; +inf where it cannot be fitted
    unimportance   [L, B] float32  salience of the representative, smaller = less important
    landmarks      [L, B, R] int32 the block's most attended tokens, best first, as token indices inside the chunk;
                               R = min(LANDMARKS, block), a last block with fewer tokens repeats its best
    retrieval_keys [P, n, d]       pre-RoPE keys of the model's calibrated retrieval (layer, kv head) pairs
    """

    mean_keys: Tensor
    local_query: Tensor
    alpha: Tensor
    unimportance: Tensor
    landmarks: Tensor
    retrieval_keys: Tensor

    @property
    def representative(self) -> Tensor:
        """[L, B] int32, the most attended token of each block."""
        return self.landmarks[..., 0]


@dataclass(frozen=True)
class ChunkKV:
    """A chunk read once: keys before RoPE, values, and the digest.

    tokens [n] int · k, v [L, n, Hkv, d] in the model's compute dtype.
    """

    tokens: tuple[int, ...]
    k: Tensor
    v: Tensor
    digest: Digest
