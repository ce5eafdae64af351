"""Bodies of `POST /v1/embeddings` (OpenAI's format) and `POST /v1/rerank` (the format of Cohere and Jina)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ragkv.api.schemas.common import DESCRIBED, check_storable
from ragkv.api.schemas.openai_messages import LENIENT
from ragkv.api.schemas.search import MAX_QUERY_CHARS

MAX_TEXTS = 2048
MAX_TEXT_CHARS = 32_768
"""About the 8192 tokens that OpenAI takes. Questions wait while a text is read."""

Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS), AfterValidator(check_storable)]


def _refuse_token_ids(given: Any) -> Any:
    """Return the input. Raise ValueError for token ids: they belong to the tokenizer of another model."""
    if isinstance(given, list) and given and isinstance(given[0], int | list):
        raise ValueError("send texts, not token ids; with LangChain, set check_embedding_ctx_length=False")
    return given


class EmbeddingsIn(BaseModel):
    """Texts to embed. Unknown parameters are ignored, as OpenAI's own servers do."""

    model_config = LENIENT | ConfigDict(
        json_schema_extra={"examples": [{"model": "all-MiniLM-L6-v2", "input": ["The harbour of Tarn"]}]}
    )

    model: Annotated[str, Field(min_length=1, max_length=512)]
    """Name of the embedder of the service."""
    input: Annotated[
        Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)], BeforeValidator(_refuse_token_ids)
    ]
    """A text, or several. Token ids are refused: they belong to another model's tokenizer."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    """Only the embedder's own number of dimensions."""
    input_type: Literal["query", "document", "passage"] | None = None
    """Whether the texts are questions or passages (the default). It makes a difference for some embedders."""
    user: Any = None

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input


class EmbeddingItem(BaseModel):
    """The embedding of a text."""

    model_config = DESCRIBED

    object: Literal["embedding"] = "embedding"
    index: int
    """Position of the text in the request."""
    embedding: list[float] | str
    """A unit vector: numbers, or the base64 of 32-bit floats, little-endian."""


class TextTokens(BaseModel):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(BaseModel):
    """The embeddings of the texts, in the order of the request."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: TextTokens


class RerankText(BaseModel):
    """A text as an object."""

    model_config = LENIENT

    text: Text


class RerankIn(BaseModel):
    """A query and the texts to order by how well they answer it. Unknown parameters are ignored."""

    model_config = LENIENT | ConfigDict(
        json_schema_extra={
            "examples": [{"query": "Who built it?", "documents": ["Ada Brook built it.", "It is green."], "top_n": 1}]
        }
    )

    model: Annotated[str | None, Field(max_length=512)] = None
    """Name of the reranker of the service; it may be left out."""
    query: Annotated[str, Field(min_length=1, max_length=MAX_QUERY_CHARS), AfterValidator(check_storable)]
    documents: Annotated[list[Text | RerankText], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int | None, Field(ge=1)] = None
    """How many results to return, best first; all by default."""
    return_documents: bool | None = False
    """Whether the results repeat the texts."""

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class RerankedText(BaseModel):
    """A text of the request."""

    text: str


class RerankResult(BaseModel):
    """How well a text answers the query."""

    model_config = DESCRIBED

    index: int
    """Position of the text in the request."""
    relevance_score: float
    """0 to 1; the larger, the better. Only the order of scores means something."""
    document: RerankedText | None = None
    """The text, with `return_documents`."""


class RerankReply(BaseModel):
    """The best texts, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: TextTokens
