"""What the HTTP edge accepts: unknown fields and wrong types are refused, every size has a bound.

Responses are the report contract (ragkv/report.py) and the job (ingest/jobs.py) themselves.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    TypeAdapter,
    ValidationError,
)

from ingest.loader import MAX_NAME
from ragkv.catalog.attributes import MAX_KEYS, MAX_VALUES

MAX_QUESTION_CHARS = 200_000  # far above any token limit, so that the engine can answer with token counts
MAX_DOCUMENTS = 1000
MAX_METADATA_KEYS = 16
MAX_METADATA_BYTES = 16 * 1024


def _unicode(text: str) -> str:
    # JSON may spell half a surrogate pair; such a string has no UTF-8 form, so no store could keep it.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not contain lone surrogates") from None
    return text


def clean(text: str) -> str:
    """`text`, if it can be kept anywhere."""
    if "\0" in text:
        raise ValueError("must not contain NUL characters")
    return _unicode(text)


def _printable(name: str) -> str:
    if not name.strip() or not name.isprintable():
        raise ValueError("must be printable and not blank")
    return name


def _small(metadata: dict[str, Any]) -> dict[str, Any]:
    size = len(_unicode(json.dumps(metadata, ensure_ascii=False, allow_nan=False)).encode())
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"must not be larger than {MAX_METADATA_BYTES} bytes of JSON, is {size}")
    return metadata


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME), AfterValidator(_printable)]
Metadata = Annotated[dict[str, JsonValue], Field(max_length=MAX_METADATA_KEYS), AfterValidator(_small)]
Scalar = Annotated[str, Field(max_length=512)] | bool | int | float | None
Filter = Annotated[
    dict[str, Scalar | Annotated[list[Scalar], Field(min_length=1, max_length=MAX_VALUES)]],
    Field(
        max_length=MAX_KEYS,
        description="What the metadata of a document has to say: all keys, each by its value or one of its values. An "
        "attribute that is a list says each of its elements.",
        examples=[{"kind": "report", "year": [2023, 2024]}],
    ),
    AfterValidator(_small),
]
Edge = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _read_as(kind: Any) -> AfterValidator:
    """JSON in the text of a query or a form, checked as if it stood in a body."""
    adapter = TypeAdapter[Any](kind, config=ConfigDict(strict=True, allow_inf_nan=False))

    def read(text: str) -> Any:
        try:
            return adapter.validate_json(text)
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, each['loc']))} {each['msg']}".strip() for each in error.errors()[:3])
            raise ValueError("; ".join(faults)) from None

    return AfterValidator(read)


FilterText = Annotated[str, _read_as(Filter)]
MetadataText = Annotated[str, _read_as(Metadata)]
"""The two as JSON texts; they come out as what they say, which their type cannot tell."""


_DOCUMENT: dict[str, JsonValue] = {
    "id": "yard",
    "title": "Calloway Yard",
    "text": "Calloway Yard was founded by Edda Calloway.",
    "metadata": {"kind": "history", "year": 1911},
    "collection": "default",
}


class DocumentIn(BaseModel):
    """One document. Its text is judged when the job runs: an empty one fails alone and holds nothing up."""

    model_config = Edge | ConfigDict(json_schema_extra={"examples": [_DOCUMENT]})

    id: Name
    text: Annotated[str, AfterValidator(_unicode)]
    title: Annotated[str, Field(max_length=512), AfterValidator(clean)] = ""
    metadata: Metadata = Field(default_factory=dict)
    collection: Name = "default"


class DocumentsIn(BaseModel):
    """Several documents, ingested in order as one job."""

    model_config = Edge | ConfigDict(json_schema_extra={"examples": [{"documents": [_DOCUMENT]}]})

    documents: Annotated[list[DocumentIn], Field(min_length=1, max_length=MAX_DOCUMENTS)]


def _form(body: Any) -> str:
    several = isinstance(body, DocumentsIn) or (isinstance(body, dict) and "documents" in body)
    return "documents" if several else "document"


Documents = Annotated[
    Annotated[DocumentIn, Tag("document")] | Annotated[DocumentsIn, Tag("documents")],
    Discriminator(_form),
]


class QuestionIn(BaseModel):
    """A question. Whatever is left out takes the service's settings."""

    model_config = Edge

    question: Annotated[str, Field(min_length=1, max_length=MAX_QUESTION_CHARS), AfterValidator(clean)]
    collection: Name = "default"
    conversation_id: Name | None = None
    top_k: Annotated[int | None, Field(ge=1, le=64)] = None
    filter: Filter | None = None
    method: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    prefill: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    decode: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=4096)] = None
    stream: Annotated[bool, Field(description="Answer as server-sent events.")] = False
    deadline_s: Annotated[
        float | None, Field(gt=0, le=86_400, description="Seconds the answer may take; the service's limit holds, too.")
    ] = None


class TurnOut(BaseModel):
    """A turn of a conversation. chunks: ids of those that came with the question; a deleted document's stay named ·
    created: Unix seconds."""

    question: str
    answer: str
    method: str
    chunks: list[str]
    created: float


class ConversationOut(BaseModel):
    """A conversation, its turns in order."""

    conversation_id: str
    collection: str
    turns: list[TurnOut]


class HealthCheck(BaseModel):
    """One thing the service stands on. status: ok · degraded: answers take longer, or some are refused · failed."""

    status: str
    detail: str = ""


class Readiness(BaseModel):
    """Whether the service can answer questions now. status: ready or not_ready · queue: requests that wait, places for
    them, answers being decoded; since the start: questions given up, not answered in time, and refused for want of a
    place or of a key."""

    status: str
    checks: dict[str, HealthCheck]
    queue: dict[str, int]


class Queued(BaseModel):
    """The job that was made."""

    job_id: str


class Problem(BaseModel):
    """RFC 9457 problem details. code: a stable word for programs · request_id: as in the header `X-Request-ID` ·
    errors: of validation, {"at", "message"}."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str = ""
    errors: list[dict[str, str]] = []
