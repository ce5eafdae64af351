"""Bodies of the routes that speak Anthropic's API.

Each request is read as one of OpenAI's chat completions. Blocks of a message that are about tools or thinking are
accepted and not read, as there. Unknown parameters are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from ragkv.api.schemas.common import DESCRIBED
from ragkv.api.schemas.openai import MAX_STOPS, Chat, Extension, Grounds, ResponseFormat, Stop, only, with_question
from ragkv.api.schemas.openai_messages import LENIENT, MAX_CALLS, MAX_MESSAGES, Message, Text

REFUSED_BLOCKS = ("image", "document", "search_result", "container_upload")
TOOL_BLOCKS = (
    *("tool_use", "tool_result", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result"),
    *("code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result"),
    *("tool_search_tool_result", "mcp_tool_use", "mcp_tool_result"),
)
UNREAD_BLOCKS = (*TOOL_BLOCKS, "thinking", "redacted_thinking")


class MessageText(BaseModel):
    """A text."""

    model_config = LENIENT

    type: Literal["text"]
    text: Text


class UnreadBlock(BaseModel):
    """A call of a tool, its result, or a thought."""

    model_config = LENIENT

    type: Literal[UNREAD_BLOCKS]  # type: ignore[valid-type]  # the names have a list of their own


def _only_text(content: Any) -> Any:
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else "text"
        if kind != "text" and kind not in UNREAD_BLOCKS:
            what = f"{kind} blocks" if kind in REFUSED_BLOCKS else "blocks of other types than text"
            raise ValueError(f"{what} are not supported; this service reads text only")
    return content


Blocks = Annotated[
    list[Annotated[MessageText | UnreadBlock, Field(discriminator="type")]], Field(max_length=MAX_MESSAGES)
]
System = Annotated[list[MessageText], Field(max_length=MAX_MESSAGES)]


class AnthropicMessage(BaseModel):
    """A message."""

    model_config = LENIENT

    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | Blocks, BeforeValidator(_only_text)]
    """A text or blocks."""

    @property
    def text(self) -> str:
        """The whole text; "" of an assistant's message that calls a tool."""
        if isinstance(self.content, str):
            return self.content
        if self.role == "assistant" and any(block.type in TOOL_BLOCKS for block in self.content):
            return ""
        return _joined([block for block in self.content if isinstance(block, MessageText)])


def _joined(blocks: list[MessageText]) -> str:
    return "\n".join(block.text for block in blocks)


def _with_question(messages: list[AnthropicMessage]) -> list[AnthropicMessage]:
    with_question([_converted(message) for message in messages])
    return messages


def _converted(message: AnthropicMessage) -> Message:
    return Message.model_construct(role=message.role, content=message.text)


class ToolChoice(BaseModel):
    """Which tools may be called: none is."""

    model_config = LENIENT

    type: Annotated[Literal["auto", "none"], only("auto and none")] = "auto"


class OutputFormat(BaseModel):
    """The form of the answer: JSON that follows a schema."""

    model_config = LENIENT

    type: Annotated[Literal["json_schema"], only("json_schema")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    @property
    def response_format(self) -> ResponseFormat:
        """The same for a chat."""
        return ResponseFormat.model_validate({"type": self.type, "json_schema": {"schema": self.schema_}})


class OutputConfig(BaseModel):
    """The form of the answer; plain text without a format."""

    model_config = LENIENT

    format: OutputFormat | None = None


class TokenCountRequest(BaseModel):
    """Messages whose tokens are counted."""

    model_config = LENIENT

    model: Annotated[str, Field(min_length=1, max_length=512)]
    """Name of the loaded model, or NAME:METHOD."""
    messages: Annotated[
        list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_with_question)
    ]
    system: Text | System | None = None
    tools: Annotated[list[Any] | None, Field(max_length=MAX_CALLS)] = None
    """Accepted and never called."""
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The format of `output_config`, where earlier clients have it."""
    ragkv: Extension = Extension()
    """Parameters of this service: `collection`, `top_k`, `method` and others, as in `POST /v1/answers`."""

    def chat(self) -> Chat:
        """Convert to a chat request."""
        system = self.system if isinstance(self.system, str) else _joined(self.system or [])
        told = [Message(role="system", content=system)] if system else []
        messages = [*told, *map(_converted, self.messages)]
        wanted = (self.output_config and self.output_config.format) or self.output_format
        structure = wanted.response_format if wanted else None
        return Chat.model_construct(model=self.model, messages=messages, response_format=structure, ragkv=self.ragkv)


class MessageRequest(TokenCountRequest):
    """A request for a message."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    """An answer has at most 4096 tokens."""
    stream: bool | None = False
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    """0 by default."""
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    stop_sequences: Annotated[list[Stop] | None, Field(max_length=MAX_STOPS)] = None

    def chat(self) -> Chat:
        """Convert to a chat request."""
        named = {"max_tokens": self.max_tokens, "stream": self.stream, "temperature": self.temperature}
        return super().chat().model_copy(update={**named, "top_p": self.top_p, "stop": self.stop_sequences})


class PassageCitation(BaseModel):
    """A passage that the answer was read from."""

    model_config = DESCRIBED

    type: Literal["search_result_location"] = "search_result_location"
    cited_text: str
    """The passage."""
    search_result_index: int
    """Its place in `ragkv.citations`."""
    source: str
    """Id of the document."""
    title: str | None
    start_block_index: Literal[0] = 0
    end_block_index: Literal[1] = 1


class ReplyBlock(BaseModel):
    """The text of the answer."""

    type: Literal["text"] = "text"
    text: str
    citations: list[PassageCitation] | None


class AnthropicUsage(BaseModel):
    """Token counts."""

    model_config = DESCRIBED

    input_tokens: int
    """Tokens of the retrieved chunks and the question, without those of `cache_read_input_tokens`."""
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    """Tokens of chunks whose stored KV was used and not recomputed."""
    output_tokens: int


class MessageReply(BaseModel):
    """A message that is not streamed."""

    model_config = DESCRIBED

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ReplyBlock]
    stop_reason: Literal["end_turn", "max_tokens"]
    """`end_turn` also where one of the stop sequences ended the answer."""
    stop_sequence: None = None
    usage: AnthropicUsage
    ragkv: Grounds | None = None
    """Citations and report; missing where no document was asked."""


class TokenCount(BaseModel):
    """Tokens of the messages."""

    model_config = DESCRIBED

    input_tokens: int
    """Without the chunks that an answer retrieves."""


class AnthropicFault(BaseModel):
    """An error."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """The error response of these routes."""

    model_config = DESCRIBED

    type: Literal["error"] = "error"
    error: AnthropicFault
    request_id: str | None = None
    """As in the header `X-Request-ID`."""
