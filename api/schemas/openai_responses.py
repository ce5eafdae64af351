"""Bodies of `/v1/responses`, OpenAI's Responses API.

What is not supported is refused as in `schemas/openai.py`, and unknown parameters are ignored. Items of the input that
are no messages, such as calls of tools and reasoning, are accepted and not read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, Field, Tag

from ragkv.api.schemas.common import DESCRIBED
from ragkv.api.schemas.log_probabilities import INCLUDED, MostLikely, ScoredToken
from ragkv.api.schemas.openai import Chat, Extension, Grounds, Longest, ResponseFormat, only, with_question
from ragkv.api.schemas.openai_messages import KINDS, LENIENT, MAX_CALLS, MAX_MESSAGES, Message, Text

_TEXTS = ("input_text", "output_text", "text")


class ItemPart(BaseModel):
    """A part of a message: a text, or what an assistant refused to say, which is not read."""

    model_config = LENIENT

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: Text = ""


def _only_text(content: Any) -> Any:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else "text"
        if kind not in (*_TEXTS, "refusal"):
            what = next((f"{each} parts" for each in KINDS if each in str(kind)), "parts of other types than text")
            raise ValueError(f"{what} are not supported; this service reads text only")
    return content


class MessageItem(BaseModel):
    """A message."""

    model_config = LENIENT

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text | Annotated[list[ItemPart], Field(max_length=MAX_MESSAGES)], BeforeValidator(_only_text)]
    """A text or its parts."""

    @property
    def message(self) -> Message:
        """The message, as a chat has it."""
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in parts)
        return Message.model_construct(role=self.role, content=text)


class OtherItem(BaseModel):
    """An item that is no message."""

    model_config = LENIENT

    type: Annotated[str, Field(max_length=64)]


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return "message" if kind == "message" else "other"


def _no_references(items: Any) -> Any:
    given = items if isinstance(items, list) else []
    if any(isinstance(item, dict) and item.get("type") == "item_reference" for item in given):
        raise ValueError("references to items are not supported; continue with previous_response_id")
    return items


def _asking(items: list[MessageItem | OtherItem]) -> list[MessageItem | OtherItem]:
    with_question([item.message for item in items if isinstance(item, MessageItem)])
    return items


def _question(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


Item = Annotated[Annotated[MessageItem, Tag("message")] | Annotated[OtherItem, Tag("other")], Discriminator(_kind)]
Items = Annotated[
    list[Item],
    Field(min_length=1, max_length=MAX_MESSAGES),
    AfterValidator(_asking),
    BeforeValidator(_no_references, json_schema_input_type=list[Item]),
]


def _form(given: Any) -> str:
    return "text" if isinstance(given, str) else "items"


Input = Annotated[
    Annotated[Text, AfterValidator(_question), Tag("text")] | Annotated[Items, Tag("items")], Discriminator(_form)
]


class TextFormat(BaseModel):
    """What the text looks like, as in `response_format` of a chat, with the schema beside its name."""

    model_config = LENIENT

    type: Annotated[Literal["text", "json_object", "json_schema"], only("text, json_object and json_schema")]
    name: Annotated[str, Field(max_length=64)] = ""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @property
    def response_format(self) -> ResponseFormat:
        """The same for a chat."""
        given = {"name": self.name, "schema": self.schema_ or {}}
        return ResponseFormat.model_validate({"type": self.type, "json_schema": given})


class TextConfig(BaseModel):
    """The form of the text."""

    model_config = LENIENT

    format: TextFormat | None = None


class ResponseRequest(BaseModel):
    """A request for a response."""

    model_config = LENIENT

    model: Annotated[str, Field(min_length=1, max_length=512)]
    """Name of the loaded model, or NAME:METHOD."""
    input: Input
    """The question, or a conversation whose last message of the user it is."""
    instructions: Text | None = None
    previous_response_id: Annotated[str | None, Field(max_length=128)] = None
    """Continue the conversation of this response, in the same collection."""
    store: bool | None = None
    """Whether the response can be continued; true by default, where the method holds conversations and the input has no
    earlier answers."""
    stream: bool | None = False
    max_output_tokens: Longest | None = None
    """-1 stands for the limit of the service. An answer has at most 4096 tokens."""
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    """0 by default."""
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    text: TextConfig | None = None
    tools: Annotated[list[Any] | None, Field(max_length=MAX_CALLS)] = None
    """Accepted and never called."""
    tool_choice: Annotated[Literal["none", "auto"] | None, only("none and auto")] = None
    background: Annotated[Literal[False] | None, only("false")] = None
    conversation: Annotated[None, only("null")] = None
    prompt: Annotated[None, only("null")] = None
    include: Annotated[list[Annotated[str, Field(max_length=64)]] | None, Field(max_length=MAX_CALLS)] = None
    """`message.output_text.logprobs` returns the log probability of each token; other values are ignored."""
    top_logprobs: MostLikely | None = None
    """Return these, and so many of the most likely tokens in place of each."""
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None, Field(max_length=16)
    ] = None
    """Returned with the response."""
    ragkv: Extension = Extension()

    @property
    def form(self) -> TextFormat:
        """What the text looks like."""
        return (self.text and self.text.format) or TextFormat(type="text")

    def chat(self) -> Chat:
        """Convert to a chat request."""
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        told = [Message.model_construct(role="system", content=self.instructions)] if self.instructions else []
        messages = [*told, *(item.message for item in items if isinstance(item, MessageItem))]
        fields = {name: getattr(self, name) for name in ("model", "stream", "temperature", "top_p", "ragkv")}
        fields["response_format"] = self.form.response_format
        fields["logprobs"] = bool(self.top_logprobs) or INCLUDED in (self.include or ())
        fields["top_logprobs"] = self.top_logprobs
        return Chat.model_construct(messages=messages, max_tokens=self.max_output_tokens, **fields)


class CitedDocument(BaseModel):
    """A document that the answer was read from."""

    model_config = DESCRIBED

    type: Literal["file_citation"] = "file_citation"
    file_id: str
    """Id of the document."""
    filename: str
    """Its title, else its id."""
    index: int
    """Its place among the documents of the answer."""


class CitedAddress(BaseModel):
    """A document whose id is a web address."""

    type: Literal["url_citation"] = "url_citation"
    url: str
    title: str
    start_index: int
    end_index: int


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[CitedDocument | CitedAddress]
    logprobs: list[ScoredToken] = []


class OutputMessage(BaseModel):
    """The message of the assistant."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class InputDetails(BaseModel):
    """Details about the tokens of the prompt."""

    model_config = DESCRIBED

    cached_tokens: int
    """Tokens of chunks whose stored KV was used and not recomputed."""


class OutputDetails(BaseModel):
    """Details about the tokens of the answer."""

    reasoning_tokens: Literal[0] = 0


class ResponseUsage(BaseModel):
    """Token counts."""

    model_config = DESCRIBED

    input_tokens: int
    """Tokens of the retrieved chunks and the question."""
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why a text ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(BaseModel):
    """A response. One that is read again has neither usage nor citations."""

    model_config = DESCRIBED

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    store: bool
    """Whether the response can be continued."""
    temperature: float | None = None
    text: TextConfig
    tool_choice: Literal["none", "auto"]
    tools: list[Any]
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    ragkv: Grounds | None = None
    """Citations and report; missing where no document was asked, and where a response is read again."""


class ResponseDeleted(BaseModel):
    """A response that was deleted, with its conversation."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
