"""Messages of a chat request.

Histories come from other programs and models, so their form is read as widely as OpenAI writes it: calls of tools and
their results, turns without content, instructions at any place. What is no text is refused by a sentence.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ragkv.api.schemas.common import MAX_QUESTION_CHARS, check_storable

MAX_MESSAGES = 1000
MAX_CALLS = 1024
LENIENT = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
KINDS = ("image", "audio", "video", "file")
"""What parts may be besides text, by the words in their types."""

Text = Annotated[str, Field(max_length=MAX_QUESTION_CHARS), AfterValidator(check_storable)]


class TextPart(BaseModel):
    """A part of a message."""

    model_config = LENIENT

    type: Literal["text"]
    text: Text


class RefusalPart(BaseModel):
    """What an assistant refused to say. It is not read."""

    model_config = LENIENT

    type: Literal["refusal"]
    refusal: Text


def _only_text(content: Any) -> Any:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in ("text", "refusal"):
            what = next((f"{each} parts" for each in KINDS if each in str(kind)), "parts of other types than text")
            raise ValueError(f"{what} are not supported; this service reads text only")
    return content


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Content = Annotated[Text | Annotated[list[Part], Field(max_length=MAX_MESSAGES)] | None, BeforeValidator(_only_text)]


class Message(BaseModel):
    """A message. Results of tools are accepted and not read: answers come from documents."""

    model_config = LENIENT

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    """A text or its parts."""
    tool_calls: Annotated[list[Any] | None, Field(max_length=MAX_CALLS)] = None
    """Calls of tools by an assistant. Such a message is not read."""
    function_call: Any = None
    """The same, in the form of older clients."""

    @property
    def text(self) -> str:
        """The whole text; "" of a message that is about tools."""
        if self.role in ("tool", "function") or self.tool_calls or self.function_call:
            return ""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if isinstance(part, TextPart))
        return self.content or ""
