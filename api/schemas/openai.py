"""Bodies of the OpenAI-compatible routes.

OpenAI's parameters that would change the answer and are not supported are refused, unless their value asks for what
happens anyway (`n: 1`, `logprobs: false`). Tools that the model may call, and need not, are accepted: it calls none.
All other unknown parameters are ignored, as OpenAI's own servers do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ragkv.api.schemas.common import DESCRIBED, MAX_QUESTION_CHARS, AnswerChoices, check_storable
from ragkv.passages import Citation
from ragkv.report import Report

MAX_MESSAGES = 1000
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_TOKENS = 4096
"""Longest answer. Chat programs ask for more, and the answer then ends here with `length`."""
MAX_TOOLS = 1024

LENIENT = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

Zero = Annotated[float, Field(ge=0, le=0)]
Text = Annotated[str, Field(max_length=MAX_QUESTION_CHARS), AfterValidator(check_storable)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS), AfterValidator(check_storable)]


class Part(BaseModel):
    """A part of a message."""

    model_config = LENIENT

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """A message."""

    model_config = LENIENT

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[Part], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    """A text or its parts. Only an assistant's message may have null."""

    @model_validator(mode="after")
    def _require_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        return self

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = LENIENT

    include_usage: bool = False
    """Add a last chunk with `usage` and no choices."""


class PlainText(BaseModel):
    """The only supported response format."""

    model_config = LENIENT

    type: Literal["text"]


class Extension(AnswerChoices):
    """Parameters of this service that OpenAI's API does not have; see `POST /v1/answers`."""


class Chat(BaseModel):
    """A chat request."""

    model_config = LENIENT

    model: Annotated[str, Field(min_length=1, max_length=512)]
    """Name of the loaded model, or NAME:METHOD."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    """In place of `max_tokens`. An answer has at most 4096 tokens."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    user: Any = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    tools: Annotated[list[Any] | None, Field(max_length=MAX_TOOLS)] = None
    """Accepted and never called."""
    tool_choice: Literal["none", "auto"] | None = None
    functions: Annotated[list[Any] | None, Field(max_length=MAX_TOOLS)] = None
    function_call: Literal["none", "auto"] | None = None
    response_format: PlainText | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    audio: None = None
    web_search_options: None = None
    ragkv: Extension = Extension()

    @model_validator(mode="after")
    def _require_question(self) -> Chat:
        if self.messages[-1].role != "user" or not self.messages[-1].text.strip():
            raise ValueError("messages: the last one must be the user's question")
        return self


class PromptDetails(BaseModel):
    """Details about the tokens of the prompt."""

    model_config = DESCRIBED

    cached_tokens: int
    """Tokens of chunks whose stored KV was used and not recomputed."""


class Usage(BaseModel):
    """Token counts."""

    model_config = DESCRIBED

    prompt_tokens: int
    """Tokens of the retrieved chunks and the question."""
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Reply(BaseModel):
    """The message of the assistant."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The only choice of a response."""

    model_config = DESCRIBED

    index: Literal[0] = 0
    message: Reply
    logprobs: None = None
    finish_reason: Literal["stop", "length"]
    """`length` if the answer reached its longest length."""


class Grounds(BaseModel):
    """Citations and report of an answer."""

    citations: list[Citation]
    report: Report


class ChatCompletion(BaseModel):
    """A response that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    ragkv: Grounds | None = None
    """Missing where a chat program asked for a title or the like, which no document answers."""


class Model(BaseModel):
    """The loaded model, alone or with a method."""

    model_config = DESCRIBED

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix seconds at the start of the service."""
    owned_by: Literal["ragkv"] = "ragkv"


class Models(BaseModel):
    """Valid values of `model`. Fields of the method may follow it, as in NAME:epic:link=64."""

    object: Literal["list"] = "list"
    data: list[Model]


class OpenAIFault(BaseModel):
    """An error."""

    model_config = DESCRIBED

    message: str
    type: str
    param: str | None
    """The invalid field, if there is one."""
    code: str
    """As in the problem details of the other routes."""


class OpenAIError(BaseModel):
    """The error response of the OpenAI-compatible routes."""

    error: OpenAIFault
