"""What the service returns for texts of a request, and for vLLM. Unknown fields of a newer service are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from ragkv.passages import Citation

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


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class HandedQuestion:
    """A question as vLLM answers it over KV of the service (`ragkv.integrations.vllm`).

    Attributes:
        prompt: Token ids.
        cache_salt: Keeps these rows apart in vLLM's cache of prefixes.
        kv_transfer_params: What the connector asks for; None where vLLM prefills the whole prompt.
        stop: Strings that end an answer.
        method: The method that chose what is read.
        citations: The passages.
    """

    prompt: tuple[int, ...]
    cache_salt: str
    kv_transfer_params: Mapping[str, Any] | None
    stop: tuple[str, ...]
    method: str
    citations: tuple[Citation, ...]

    def request(
        self, model: str, key: str = "", messages: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Return a body for vLLM: of `POST /v1/completions`, or with messages of `POST /v1/chat/completions`.

        Args:
            model: Name of the model in vLLM.
            key: API key of ragkv, with which the connector asks; "" where it has one of its own.
            messages: The chat that the question is from. vLLM demands it and reads the prompt of the hand-over.
            **options: Further members, such as `max_tokens`.
        """
        handed = dict(self.kv_transfer_params or {})
        if "ragkv" in handed and key:
            handed["ragkv"] = {**handed["ragkv"], "api_key": key}
        body: dict[str, Any] = {"model": model, "cache_salt": self.cache_salt, "stop": list(self.stop)}
        if messages is None:
            body["prompt"] = list(self.prompt)
        else:
            body["messages"], handed["prompt_token_ids"] = list(messages), list(self.prompt)
        return {**body, **({"kv_transfer_params": handed} if handed else {}), **options}
