"""Responses that belong to no document: conversations, health, queued jobs, and the form of every error."""

from __future__ import annotations

from pydantic import BaseModel

from ragkv.api.schemas.common import DESCRIBED


class TurnOut(BaseModel):
    """A turn of a conversation."""

    model_config = DESCRIBED

    question: str
    answer: str
    """Empty where it was removed."""
    removed: bool
    """Whether the answer was removed, because it may quote a document that was deleted or replaced since."""
    method: str
    chunks: list[str]
    """Ids of the chunks that were added with the question, including those of deleted documents."""
    created: float
    """Unix seconds."""


class ConversationOut(BaseModel):
    """A conversation with its turns in order."""

    conversation_id: str
    collection: str
    turns: list[TurnOut]


class HealthCheck(BaseModel):
    """State of one thing that the service depends on."""

    model_config = DESCRIBED

    status: str
    """`ok`, `degraded` (answers take longer, or some are refused) or `failed`."""
    detail: str = ""


class Readiness(BaseModel):
    """Whether the service can answer questions now."""

    model_config = DESCRIBED

    status: str
    """`ready` or `not_ready`."""
    checks: dict[str, HealthCheck]
    queue: dict[str, int]
    """Requests that wait, places in the queue and answers being decoded. Since the start: questions cancelled,
    questions expired, and requests refused because the queue was full or the API key was not valid."""


class Queued(BaseModel):
    """The job that was queued."""

    job_id: str


class Problem(BaseModel):
    """RFC 9457 problem details."""

    model_config = DESCRIBED

    type: str
    title: str
    status: int
    detail: str
    code: str
    """A stable word for programs."""
    request_id: str = ""
    """As in the header `X-Request-ID`."""
    errors: list[dict[str, str]] = []
    """Validation errors: {"at", "message"}."""
