"""Bodies of the routes that speak Ollama's API.

Each request is read as one of OpenAI's chat completions. Parameters of this service (`ragkv`) stand beside the others
or, for clients that send nothing unknown, in `options`. As in Ollama, what `options` has besides is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from ragkv.api.schemas.common import DESCRIBED
from ragkv.api.schemas.log_probabilities import MostLikely, ScoredToken
from ragkv.api.schemas.ollama_models import LATEST
from ragkv.api.schemas.openai import (
    MAX_STOPS,
    NO_LIMIT,
    Chat,
    Extension,
    Grounds,
    Penalty,
    ResponseFormat,
    Stop,
    only,
    with_question,
)
from ragkv.api.schemas.openai_messages import LENIENT, MAX_CALLS, MAX_MESSAGES, Message, Text


def _no_images(images: list[Any]) -> list[Any]:
    if images:
        raise ValueError("images are not supported; this service reads text only")
    return images


NoImages = Annotated[list[Any], Field(max_length=MAX_CALLS), AfterValidator(_no_images)]


class OllamaMessage(Message):
    """A message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    images: NoImages | None = None


class OllamaOptions(BaseModel):
    """Options of the model."""

    model_config = LENIENT

    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    """0 by default."""
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    num_predict: Annotated[int | None, Field(ge=-(2**31), le=2**31)] = None
    """Longest answer, in tokens; 0 or less stands for the limit of the service."""
    stop: Annotated[list[Stop] | None, Field(max_length=MAX_STOPS)] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    ragkv: Extension | None = None
    """As beside `options`."""


class OllamaRequest(BaseModel):
    """What both kinds of requests have."""

    model_config = LENIENT

    model: Annotated[str, Field(min_length=1, max_length=512)]
    """Name of the loaded model, or NAME:METHOD. The tag `latest` is left out."""
    stream: bool | None = True
    """A stream is lines of JSON."""
    options: OllamaOptions | None = None
    format: Annotated[Literal["", "json"] | dict[str, Any] | None, only("json and a JSON schema")] = None
    logprobs: bool | None = False
    top_logprobs: MostLikely | None = None
    """It needs `logprobs`."""
    keep_alive: float | Annotated[str, Field(max_length=64)] | None = None
    """Ignored: the model is loaded as long as the service runs."""
    ragkv: Extension | None = None
    """Parameters of this service: `collection`, `top_k`, `method` and others, as in `POST /v1/answers`."""

    @model_validator(mode="after")
    def _refuse_two(self) -> OllamaRequest:
        if self.ragkv is not None and self.options is not None and self.options.ragkv is not None:
            raise ValueError("ragkv is there twice, also in options; give one")
        return self

    @property
    def unloads(self) -> bool:
        """Whether an empty request asks to unload the model, and not to load it."""
        return self.keep_alive in (0, "0")

    @property
    def _response_format(self) -> ResponseFormat | None:
        if not self.format:
            return None
        schema = {"type": "object"} if self.format == "json" else self.format
        return ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"schema": schema}})

    def chat_with(self, messages: list[Message]) -> Chat:
        """Convert to a chat request with these messages."""
        options = self.options or OllamaOptions()
        longest = options.num_predict
        return Chat(
            model=self.model.removesuffix(LATEST),
            messages=messages,
            stream=self.stream is not False,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            stop=options.stop,
            max_tokens=NO_LIMIT if longest is not None and longest <= 0 else longest,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            response_format=self._response_format,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            ragkv=self.ragkv or options.ragkv or Extension(),
        )


def _empty_or_asking(messages: list[OllamaMessage]) -> list[OllamaMessage]:
    if messages:
        with_question([*messages])
    return messages


class OllamaChat(OllamaRequest):
    """A chat. Without messages it only asks for the model to be loaded."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES), AfterValidator(_empty_or_asking)] = []
    tools: Annotated[list[Any] | None, Field(max_length=MAX_CALLS)] = None
    """Accepted and never called."""


class OllamaGenerate(OllamaRequest):
    """A single question. Without a prompt it only asks for the model to be loaded."""

    prompt: Text | None = None
    system: Text | None = None
    suffix: Annotated[Literal[""] | None, only("an empty text")] = None
    images: NoImages | None = None
    raw: Annotated[Literal[False] | None, only("false")] = None
    template: Annotated[Literal[""] | None, only("an empty text")] = None

    @property
    def messages(self) -> list[Message]:
        """The system's message and the question; none where there is no prompt."""
        if not (self.prompt or "").strip():
            return []
        system = [Message(role="system", content=self.system)] if self.system else []
        return [*system, Message(role="user", content=self.prompt)]


class OllamaReply(BaseModel):
    """What every reply has, also each line of a stream; what follows `done_reason` is in the last one."""

    model_config = DESCRIBED

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    """Nanoseconds."""
    load_duration: int | None = None
    """0: the model is loaded as long as the service runs."""
    prompt_eval_count: int | None = None
    """Tokens of the retrieved chunks and the question."""
    prompt_eval_duration: int | None = None
    """Nanoseconds to the first token, retrieval and loading included."""
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[ScoredToken] | None = None
    """Of the tokens of this piece, where they are asked for."""
    ragkv: Grounds | None = None
    """Citations and report; missing where no document was asked."""


class OllamaReplyMessage(BaseModel):
    """The message of the assistant, or a piece of it."""

    role: Literal["assistant"] = "assistant"
    content: str


class OllamaChatReply(OllamaReply):
    """Reply to a chat."""

    message: OllamaReplyMessage


class OllamaGenerateReply(OllamaReply):
    """Reply to a single question."""

    response: str


class OllamaError(BaseModel):
    """The error response of these routes, and the last line of a stream that fails."""

    error: str
