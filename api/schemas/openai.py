"""Bodies of the OpenAI-compatible routes.

OpenAI's parameters that would change the answer and are not supported are refused, unless their value asks for what
happens anyway (`n: 1`, `logprobs: false`). Tools that the model may call, and need not, are accepted: it calls none.
All other unknown parameters are ignored, as OpenAI's own servers do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from ragkv.api.schemas.common import DESCRIBED, AnswerChoices, check_storable
from ragkv.api.schemas.log_probabilities import ChatLogprobs, MostLikely
from ragkv.api.schemas.openai_messages import LENIENT, MAX_MESSAGES, Message
from ragkv.passages import Citation
from ragkv.report import Report

MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_TOKENS = 4096
"""Longest answer. Chat programs ask for more, and the answer then ends here with `length`."""
MAX_TOOLS = 1024
NO_LIMIT = -1
"""Stands for the longest answer of the settings."""

Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS), AfterValidator(check_storable)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def only(supported: str) -> WrapValidator:
    """Refuse other values than the supported ones by saying so."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(f"other values than {supported} are not supported") from None

    return WrapValidator(check)


def _some(count: int) -> int:
    if not count:
        raise ValueError(f"must be at least 1, or {NO_LIMIT} for the limit of the service")
    return count


def with_question(messages: list[Message]) -> list[Message]:
    """Return the messages. Raise ValueError if there is no question among them."""
    if not any(message.role == "user" and message.text.strip() for message in messages):
        raise ValueError("one of them must be a question of the user")
    return messages


Longest = Annotated[int, Field(ge=NO_LIMIT, le=2**31), AfterValidator(_some)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = LENIENT

    include_usage: bool = False
    """Add a last chunk with `usage` and no choices."""


class JsonSchema(BaseModel):
    """A schema with the name that the client gives it."""

    model_config = LENIENT

    name: Annotated[str, Field(max_length=64)] = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}


class ResponseFormat(BaseModel):
    """What an answer looks like: words, any JSON object, or JSON that follows a schema."""

    model_config = LENIENT

    type: Annotated[Literal["text", "json_object", "json_schema"], only("text, json_object and json_schema")]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _with_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The schema that the answer follows; None for words."""
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class Extension(AnswerChoices):
    """Parameters of this service that OpenAI's API does not have; see `POST /v1/answers`."""


class Chat(BaseModel):
    """A chat request."""

    model_config = LENIENT

    model: Annotated[str, Field(min_length=1, max_length=512)]
    """Name of the loaded model, or NAME:METHOD."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(with_question)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    max_tokens: Longest | None = None
    """-1 stands for the limit of the service."""
    max_completion_tokens: Longest | None = None
    """In place of `max_tokens`. An answer has at most 4096 tokens."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    user: Any = None
    n: Annotated[Literal[1] | None, only("1")] = None
    logprobs: bool | None = False
    """Return the log probability of each token, by the model's own distribution."""
    top_logprobs: MostLikely | None = None
    """Return so many of the most likely tokens in place of each, too. It needs `logprobs`."""
    tools: Annotated[list[Any] | None, Field(max_length=MAX_TOOLS)] = None
    """Accepted and never called."""
    tool_choice: Annotated[Literal["none", "auto"] | None, only("none and auto")] = None
    functions: Annotated[list[Any] | None, Field(max_length=MAX_TOOLS)] = None
    function_call: Annotated[Literal["none", "auto"] | None, only("none and auto")] = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]] | None, Field(max_length=1), only("text")] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Any] | None, Field(max_length=0), only("an empty object")] = None
    audio: Annotated[None, only("null")] = None
    web_search_options: Annotated[None, only("null")] = None
    ragkv: Extension = Extension()

    @model_validator(mode="after")
    def _with_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
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
    logprobs: ChatLogprobs | None = None
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
