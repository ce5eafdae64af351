"""What the service returns for texts of a request. Unknown fields of a newer service are ignored."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

_IGNORE_EXTRA = ConfigDict(extra="ignore")


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class Embedding:
    """The embedding of a text.

    Attributes:
        index: Position of the text in the request.
        embedding: A unit vector.
    """

    index: int
    embedding: tuple[float, ...]


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class TextUsage:
    """What a request with texts used.

    Attributes:
        total_tokens: Tokens of the texts.
    """

    total_tokens: int


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class Embeddings:
    """Embeddings of texts.

    Attributes:
        model: Name of the embedder.
        data: An embedding for each text, in the order of the request.
        usage: What the request used.
    """

    model: str
    data: tuple[Embedding, ...]
    usage: TextUsage


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class RankedText:
    """How well a text answers a query.

    Attributes:
        index: Position of the text in the request.
        relevance_score: The larger, the better. Only the order of scores means something.
    """

    index: int
    relevance_score: float


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class RankedTexts:
    """The best texts, best first.

    Attributes:
        model: Name of the reranker.
        results: The texts.
        usage: What the request used.
    """

    model: str
    results: tuple[RankedText, ...]
    usage: TextUsage
