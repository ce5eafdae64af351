"""Log probabilities of an answer's tokens, as the APIs of OpenAI and Ollama have them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from ragkv.api.schemas.common import DESCRIBED
from ragkv.engine.logits import MOST_LIKELY

INCLUDED = "message.output_text.logprobs"
"""What a request for a response includes for log probabilities."""
MostLikely = Annotated[int, Field(ge=0, le=MOST_LIKELY)]


class LikelyToken(BaseModel):
    """A token and its log probability."""

    model_config = DESCRIBED

    token: str
    """Its text; the escapes of its bytes where it is a part of a character."""
    logprob: float
    bytes: list[int]


class ScoredToken(LikelyToken):
    """A token of the answer."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    """Log probabilities of the tokens of a message."""

    content: list[ScoredToken]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Log probabilities of the tokens of a text, one entry a token in each list."""

    model_config = DESCRIBED

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    """The chosen token is always among them."""
    text_offset: list[int]
