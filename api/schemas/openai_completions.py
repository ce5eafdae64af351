"""Bodies of `POST /v1/completions`, OpenAI's older route: a text in place of messages.

What is not supported is refused as in `schemas/openai.py`, and unknown parameters are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from ragkv.api.schemas.common import DESCRIBED
from ragkv.api.schemas.log_probabilities import CompletionLogprobs, MostLikely
from ragkv.api.schemas.openai import (
    MAX_STOPS,
    Chat,
    Extension,
    Grounds,
    Longest,
    Penalty,
    Stop,
    StreamOptions,
    Usage,
    only,
)
from ragkv.api.schemas.openai_messages import LENIENT, Message, Text


def _one_text(prompt: Any) -> Any:
    if isinstance(prompt, list) and (len(prompt) > 1 or any(isinstance(part, int | list) for part in prompt)):
        raise ValueError("several prompts and token ids are not supported; send one text")
    return prompt


def _not_blank(prompt: str | list[str]) -> str | list[str]:
    if not "".join(prompt).strip():
        raise ValueError("must not be blank")
    return prompt


Prompts = Annotated[list[Text], Field(min_length=1, max_length=1)]


class CompletionRequest(BaseModel):
    """A request to complete a prompt."""

    model_config = LENIENT

    model: Annotated[str, Field(min_length=1, max_length=512)]
    """Name of the loaded model, or NAME:METHOD."""
    prompt: Annotated[Text | Prompts, BeforeValidator(_one_text), AfterValidator(_not_blank)]
    """The question, or a list of one."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    """0 by default."""
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    max_tokens: Longest | None = None
    """-1 stands for the limit of the service. An answer has at most 4096 tokens."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    n: Annotated[Literal[1] | None, only("1")] = None
    best_of: Annotated[Literal[1] | None, only("1")] = None
    echo: Annotated[Literal[False] | None, only("false")] = None
    logprobs: MostLikely | None = None
    """Return the log probability of each token, and so many of the most likely tokens in its place."""
    suffix: Annotated[Literal[""] | None, only("an empty text")] = None
    logit_bias: Annotated[dict[str, Any] | None, Field(max_length=0), only("an empty object")] = None
    ragkv: Extension = Extension()

    def chat(self) -> Chat:
        """Convert to a chat request."""
        named = ("model", "stream", "temperature", "top_p", "max_tokens", "stop", "seed", "ragkv")
        fields = {name: getattr(self, name) for name in (*named, "presence_penalty", "frequency_penalty")}
        fields |= {"logprobs": self.logprobs is not None, "top_logprobs": self.logprobs}
        message = Message(role="user", content="".join(self.prompt))
        return Chat.model_construct(messages=[message], **fields)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionChoice(BaseModel):
    """The only choice of a response."""

    model_config = DESCRIBED

    text: str
    index: Literal[0] = 0
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    """`length` if the answer reached its longest length."""


class TextCompletion(BaseModel):
    """A response that is not streamed."""

    model_config = DESCRIBED

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    ragkv: Grounds | None = None
    """Citations and report; missing where no document was asked."""
