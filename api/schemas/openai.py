"""What the OpenAI-compatible routes accept and answer.

Fields of OpenAI's that would change the answer and that we do not have are refused, unless they say what is so anyway
(`n: 1`, `logprobs: false`). All others are let pass, as OpenAI's own servers let pass what they have no use for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from api.schemas.common import MAX_QUESTION_CHARS, Edge, Filter, Name, clean
from ragkv.report import Citation, Report

MAX_MESSAGES = 1000
MAX_STOPS = 4
MAX_STOP_CHARS = 256

Loose = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)

Nothing = Annotated[list[Any], Field(max_length=0)]
Zero = Annotated[float, Field(ge=0, le=0)]
Text = Annotated[str, Field(max_length=MAX_QUESTION_CHARS), AfterValidator(clean)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS), AfterValidator(clean)]


class Part(BaseModel):
    """A piece of a message."""

    model_config = Loose

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """A message. content: a text, or its pieces; an assistant's may be null."""

    model_config = Loose

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[Part], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None

    @model_validator(mode="after")
    def _said(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        return self

    @property
    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(BaseModel):
    """include_usage: one more chunk at the end, with `usage` and no choices."""

    model_config = Loose

    include_usage: bool = False


class PlainText(BaseModel):
    """The only response format there is."""

    model_config = Loose

    type: Literal["text"]


class Extension(BaseModel):
    """What OpenAI's API has no place for; see `POST /v1/answers`."""

    model_config = Edge

    collection: Name = "default"
    top_k: Annotated[int | None, Field(ge=1, le=64)] = None
    filter: Filter | None = None
    method: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    prefill: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    decode: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    deadline_s: Annotated[float | None, Field(gt=0, le=86_400)] = None


class Chat(BaseModel):
    """A request. model: the name of the loaded model, or NAME:METHOD."""

    model_config = Loose

    model: Annotated[str, Field(min_length=1, max_length=512)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=4096)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=4096)] = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    user: str | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Nothing | None = None
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
    def _a_question(self) -> Chat:
        if self.messages[-1].role != "user" or not self.messages[-1].text.strip():
            raise ValueError("messages: the last one must be the user's question")
        return self


class PromptDetails(BaseModel):
    """cached_tokens: of the prompt, those of chunks whose stored KV was there and that were not computed again."""

    cached_tokens: int


class Usage(BaseModel):
    """prompt_tokens: of the retrieved chunks and the question."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Reply(BaseModel):
    """What was said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The only one there is. finish_reason: `length` where the answer might go on."""

    index: Literal[0] = 0
    message: Reply
    logprobs: None = None
    finish_reason: Literal["stop", "length"]


class Grounds(BaseModel):
    """What the answer was read from, and what that took."""

    citations: list[Citation]
    report: Report


class Completion(BaseModel):
    """An answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    ragkv: Grounds


class Model(BaseModel):
    """A model, or a model and a method to ask it with. created: Unix seconds, when the service started."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["ragkv"] = "ragkv"


class Models(BaseModel):
    """What may be named as `model`; a method's fields may follow it, as in NAME:epic:link=64."""

    object: Literal["list"] = "list"
    data: list[Model]


class OpenAIFault(BaseModel):
    """What went wrong. param: the field that is wrong, where it is one · code: as in the service's other errors."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(BaseModel):
    """An error, as OpenAI's routes tell it."""

    error: OpenAIFault
