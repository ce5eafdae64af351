"""Data types that the whole project shares. docs/architecture.md explains the terms.

Axis letters in shapes, used in every docstring of the project:
    L    layers                    n    tokens of a chunk
    Hq   query heads               B    blocks of a chunk
    Hkv  key/value heads           D    chunks in one request
    d    head size                 T    rows of one model pass
    P    retrieval (layer, kv head) pairs
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NewType

if TYPE_CHECKING:
    # Importing this module must not import torch, so that commands such as `ragkv ls` start quickly.
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

LANDMARKS = 4
"""Number of most attended tokens that a digest stores per block. InfLLM represents a block by as many tokens."""

GRACE_SECONDS = 3600.0
"""After so long a silent ingest counts as dead. It is longer than any model needs for one chunk, and than a machine is
likely to be suspended during an ingest."""

Key = NewType("Key", str)
"""Name of a chunk in the KV store: hash of fingerprint, collection salt and token ids. Safe as a file name."""

Blend = Callable[["Tensor", "Tensor"], "Tensor"]
"""A function `(new, old) -> result` on rows [m, Hkv, d]. It is applied to rotated K and to V separately."""

SEGMENT_BYTES = 64
"""Bytes of UTF-8 text of a segment: about 16 tokens of English, and 20 characters of Chinese."""

Scalar = str | int | float | bool | None
Filter = Mapping[str, Scalar | Sequence[Scalar]]
"""A condition on metadata: for each key the required value, or a list of allowed values (catalog/attributes.py)."""


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model's KV.

    Attributes:
        layers: Number of layers, L.
        q_heads: Number of query heads, Hq.
        kv_heads: Number of key/value heads, Hkv.
        head_dim: Head size, d.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Document:
    """A document as the user sent it.

    Attributes:
        id: Id of the document, unique inside its collection.
        title: Title of the document.
        text: Text of the document.
        metadata: Metadata that filters can select; JSON values.
        collection: Collection of the document.
        pages: (offset, number) of each page: where it begins in `text`, and its number from 1. Empty for formats
            without pages.
        source: Path of the file that it came from, on the machine that read it; "" if it came from none of its own.
        file: The bytes of that file, where they are kept so that its pages can be shown; b"" else.
    """

    id: str
    title: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    collection: str = "default"
    pages: tuple[tuple[int, int], ...] = ()
    source: str = ""
    file: bytes = field(default=b"", repr=False)


_PRICE = re.compile(r"(\d{1,7}(?:\.\d{1,4})?) ?([^\s\d]{0,8})")


@dataclass(frozen=True)
class HourPrice:
    """What an hour of the machine costs.

    Attributes:
        amount: More than 0.
        currency: At most 8 characters; "" where it is not told.
    """

    amount: float
    currency: str = ""

    @staticmethod
    def read(text: str) -> HourPrice | None:
        """Read `2.50 USD`; None for any other text, and for 0."""
        found = _PRICE.fullmatch(text.strip())
        return HourPrice(float(found[1]), found[2]) if found and float(found[1]) else None

    def of(self, seconds: float) -> float:
        """Return what so many seconds cost."""
        return self.amount * seconds / 3600

    def __str__(self) -> str:
        return f"{self.amount:g} {self.currency}".rstrip()


@dataclass(frozen=True)
class TextSpan:
    """The place of a chunk in the text of its document.

    Attributes:
        start: Offset of its first character.
        end: Offset after its last character.
        heading: The heading that it stands under; "" if there is none or the format has no headings.
        page: Number, from 1, of the page on which it begins; None for formats without pages.
        pages: (offset, number) of each page that begins inside of it.
    """

    start: int
    end: int
    heading: str = ""
    page: int | None = None
    pages: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class EmbeddedPassages:
    """Passages as an embedder read them.

    Attributes:
        vectors: Unit vectors [n, dimension] float32.
        segments: What each SEGMENT_BYTES of each passage's text say [S, dimension] int8 (retrieval/segments.py).
    """

    vectors: NDArray[np.float32]
    segments: tuple[NDArray[np.int8], ...]

    def part(self, start: int, stop: int) -> EmbeddedPassages:
        """Return the passages start..stop."""
        return EmbeddedPassages(self.vectors[start:stop], self.segments[start:stop])


@dataclass(frozen=True)
class Chunk:
    """A part of a document: the unit of retrieval and of KV caching.

    Attributes:
        id: Id of the chunk, "<document id>#<ordinal>".
        document_id: Id of its document.
        ordinal: Position in the document, from 0.
        title: Title that the prompt shows for the chunk.
        text: Text of the chunk.
        tokens: Token ids of the whole prompt piece, with what stands around title and text. The KV of a chunk is that
            of `tokens`.
        span: Where `text` stands in the document; None if that is not known.
        version: Number of the version of its document; 0 before the chunk is stored.
    """

    id: str
    document_id: str
    ordinal: int
    title: str
    text: str
    tokens: tuple[int, ...]
    span: TextSpan | None = None
    version: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Hit:
    """A retrieved chunk.

    Attributes:
        chunk: The chunk.
        score: Fused rank score; larger is better.
        row: Row of the chunk in the catalogue. A row number is never reused.
        similarity: Cosine similarity of question and chunk, by the embedder; 0.0 where it was not computed.
        word_score: BM25 score; None if the chunk was not among the candidates of the full-text search.
    """

    chunk: Chunk
    score: float
    row: int = 0
    similarity: float = 0.0
    word_score: float | None = None


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
        presence_penalty: Taken off the logit of every token that the answer has already; below 0 it is added.
        frequency_penalty: The same, as many times as the answer has the token.
        stop: Strings that end the answer. They are not part of it.
        seed: Seed of the sampler.
        history: Earlier (question, answer), in order, that come with the question; no conversation keeps them.
        instructions: Text that stands before the first question of the prompt, like a chat's system message.
        beginning: The answer begins with this text, and the model goes on from there.
        answer_schema: A JSON schema. The answer is JSON that follows it; None answers in words.
        abstain_below: An answer whose confidence is lower becomes `unknown`; None never does that.
        speculation: Draft tokens of the answer from its prompt and verify several in a pass; None uses the setting.
        top_log_probabilities: Keep the log probability of each token of the answer, and of as many of the most likely
            tokens in its place; None keeps none.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: Sequence[str] = ()
    seed: int = 0
    history: Sequence[tuple[str, str]] = ()
    instructions: str = ""
    beginning: str = ""
    answer_schema: Mapping[str, Any] | None = None
    abstain_below: float | None = None
    speculation: bool | None = None
    top_log_probabilities: int | None = None


@dataclass(frozen=True)
class Digest:
    """Summary of a chunk's KV, from which blocks are selected without loading them (SamKV 2.3, scout).

    Attributes:
        mean_keys: [L, B, Hkv, d], mean of each block's pre-RoPE keys. A partial last block averages its real tokens.
        local_query: [L, Hq, d], mean of the pre-RoPE queries of the local blocks' tokens.
        alpha: [L, B] float32, importance exponent. Smaller is more important; +inf if it cannot be fitted.
        unimportance: [L, B] float32, salience of the representative token. Smaller is less important.
        landmarks: [L, B, R] int32, each block's most attended tokens, best first, as token indices inside the chunk.
            R = min(LANDMARKS, block size); a last block with fewer tokens repeats its best one.
        retrieval_keys: [P, n, d], pre-RoPE keys of the model's calibrated retrieval (layer, kv head) pairs.
    """

    mean_keys: Tensor
    local_query: Tensor
    alpha: Tensor
    unimportance: Tensor
    landmarks: Tensor
    retrieval_keys: Tensor

    @property
    def representative(self) -> Tensor:
        """The most attended token of each block, [L, B] int32."""
        return self.landmarks[..., 0]


@dataclass(frozen=True)
class ChunkKV:
    """The KV of an encoded chunk, and its digest.

    Attributes:
        tokens: Token ids, n of them.
        k: Keys before RoPE, [L, n, Hkv, d] in the model's compute dtype.
        v: Values, [L, n, Hkv, d] in the model's compute dtype.
        digest: Summary for block selection.
        states: Of the layers without attention behind the last token, in the model's compute dtype; empty in a model
            that has none.
    """

    tokens: tuple[int, ...]
    k: Tensor
    v: Tensor
    digest: Digest
    states: tuple[Tensor, ...] = ()
