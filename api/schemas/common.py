"""Request bodies of the HTTP API. Unknown fields and wrong types are refused, and every size is limited.

Most responses are the dataclasses of the report (ragkv/report.py) and of the job (ingest/jobs.py).
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ragkv.api.schemas.faults import readable
from ragkv.catalog.attributes import MAX_KEYS, MAX_VALUES
from ragkv.catalog.limits import MAX_METADATA_KEYS, MAX_NAME, MAX_TITLE, check_metadata
from ragkv.normalisation import normal_id
from ragkv.types import AskOptions

MAX_QUESTION_CHARS = 200_000  # far above any token limit, so that the engine's error can state token counts
MAX_DOCUMENTS = 1000
MAX_SOURCE = 4096  # characters of a path, as long as one can be


def check_unicode(text: str) -> str:
    """Return the text. Raise ValueError if it has no UTF-8 form.

    JSON can escape half of a surrogate pair. No store could keep such a string.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not contain lone surrogates") from None
    return text


def check_storable(text: str) -> str:
    """Return the text. Raise ValueError if some store could not keep it."""
    if "\0" in text:
        raise ValueError("must not contain NUL characters")
    return check_unicode(text)


def _check_printable(name: str) -> str:
    if not name.strip() or not name.isprintable():
        raise ValueError("must be printable and not blank")
    return name


def _check_source(path: str) -> str:
    if not path.isprintable():
        raise ValueError("must be printable")
    return path


def _check_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    check_metadata(metadata)
    return metadata


def _at_most(count: int) -> BeforeValidator:
    """Refuse a larger object before its members are validated: each of them could be several errors."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > count:
            raise ValueError(f"must not have more than {count} members, has {len(given)}")
        return given

    return BeforeValidator(check)


_NAME: dict[str, JsonValue] = {"pattern": r"^ *[^\s\x00-\x1f\x7f-\xa0][^\x00-\x1f\x7f-\xa0]*$"}
"""For the schema: what `_check_printable` refuses and every dialect of regular expressions can say."""
Name = Annotated[
    str, Field(min_length=1, max_length=MAX_NAME, json_schema_extra=_NAME), AfterValidator(_check_printable)
]
DocumentId = Annotated[Name, BeforeValidator(lambda given: normal_id(given) if isinstance(given, str) else given)]
"""Ids that look alike are one (ragkv/normalisation.py)."""
Title = Annotated[str, Field(max_length=MAX_TITLE), AfterValidator(check_storable)]
Metadata = Annotated[
    dict[str, JsonValue],
    Field(max_length=MAX_METADATA_KEYS),
    AfterValidator(_check_metadata),
    _at_most(MAX_METADATA_KEYS),
]
Scalar = Annotated[str, Field(max_length=512)] | bool | int | float | None
Filter = Annotated[
    dict[str, Scalar | Annotated[list[Scalar], Field(min_length=1, max_length=MAX_VALUES)]],
    Field(
        max_length=MAX_KEYS,
        description="Conditions on the metadata of documents. A document matches if every key has the given value, or "
        "one of the given values. An attribute that is a list has each of its elements as a value.",
        examples=[{"kind": "report", "year": [2023, 2024]}],
    ),
    AfterValidator(_check_metadata),
    _at_most(MAX_KEYS),
]
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
"""Configuration of request bodies."""
UNKNOWN_SHOWN = 20
"""Most members beyond those of its schema that an object may have to be told each of them."""
DESCRIBED = ConfigDict(use_attribute_docstrings=True)
"""Configuration of models whose fields are described by the string below each of them."""


def _parse_json(kind: Any) -> AfterValidator:
    """Validate JSON in a query parameter or form field like JSON in a body."""
    adapter = TypeAdapter[Any](kind, config=ConfigDict(strict=True, allow_inf_nan=False))

    def parse(text: str) -> Any:
        try:
            return adapter.validate_json(text)
        except ValidationError as error:
            errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()[:20]]
            faults = [(each["at"][5:], each["message"]) for each in readable(errors, _loaded(text))]
            raise ValueError("; ".join(f"{at} {message}".strip() for at, message in faults[:3])) from None

    return AfterValidator(parse)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


FilterText = Annotated[str, _parse_json(Filter)]
MetadataText = Annotated[str, _parse_json(Metadata)]
SourcesText = Annotated[
    str, _parse_json(list[Annotated[str, Field(max_length=MAX_SOURCE), AfterValidator(_check_source)]])
]
"""Filter, metadata and sources as JSON text. Validation returns the parsed value, which the type does not show."""


_DOCUMENT: dict[str, JsonValue] = {
    "id": "yard",
    "title": "Calloway Yard",
    "text": "Calloway Yard was founded by Edda Calloway.",
    "metadata": {"kind": "history", "year": 1911},
    "collection": "default",
}


class Body(BaseModel):
    """An object of a request. Unknown members are refused, each by name; of very many, their number."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _refuse_many(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > len(cls.model_fields) + UNKNOWN_SHOWN:
            raise ValueError(f"must not have more than {len(cls.model_fields)} members, has {len(given)}")
        return given


class DocumentIn(Body):
    """One document. Its text is checked when the job runs, so that an empty document fails alone."""

    model_config = STRICT | ConfigDict(json_schema_extra={"examples": [_DOCUMENT]})

    id: DocumentId
    text: Annotated[str, AfterValidator(check_unicode)]
    title: Title = ""
    metadata: Metadata = Field(default_factory=dict)
    collection: Name = "default"


class DocumentsIn(Body):
    """Several documents, ingested in order as one job."""

    model_config = STRICT | ConfigDict(json_schema_extra={"examples": [{"documents": [_DOCUMENT]}]})

    documents: Annotated[list[DocumentIn], Field(min_length=1, max_length=MAX_DOCUMENTS)]


def _tag(body: Any) -> str:
    several = isinstance(body, DocumentsIn) or (isinstance(body, dict) and "documents" in body)
    return "documents" if several else "document"


Documents = Annotated[
    Annotated[DocumentIn, Tag("document")] | Annotated[DocumentsIn, Tag("documents")],
    Discriminator(_tag),
]


class AnswerChoices(Body):
    """How an answer is made, the same in every request that asks: of this API, OpenAI's, and MCP.

    A field that is left out takes the value from the settings of the service.
    """

    model_config = STRICT

    collection: Name = "default"
    top_k: Annotated[int | None, Field(ge=1, le=64, description="Chunks to retrieve.")] = None
    filter: Filter | None = None
    method: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    prefill: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    decode: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    deadline_s: Annotated[
        float | None,
        Field(gt=0, le=86_400, description="Seconds the answer may take. The limit of the service applies as well."),
    ] = None
    answer_schema: Annotated[
        dict[str, Any] | None, Field(description="JSON schema. The answer is JSON that follows it.")
    ] = None
    abstain_below: Annotated[
        float | None,
        Field(ge=0, le=1, description="Answer `unknown` where the confidence is lower. It needs a measured model."),
    ] = None
    speculation: Annotated[
        bool | None,
        Field(description="Draft tokens from the prompt, and verify several in a pass. The answer stays the same."),
    ] = None

    def options(self, collection: str) -> AskOptions:
        """Convert to AskOptions. Fields of the same name mean the same.

        Args:
            collection: Name of the collection in the catalogue.
        """
        names = {field.name for field in fields(AskOptions)} & type(self).model_fields.keys() - {"collection"}
        return AskOptions(collection, **{name: getattr(self, name) for name in names})


class QuestionFields(AnswerChoices):
    """A question. A field that is left out takes the value from the settings of the service."""

    model_config = STRICT

    question: Annotated[str, Field(min_length=1, max_length=MAX_QUESTION_CHARS), AfterValidator(check_storable)]
    conversation_id: Annotated[
        Name | None, Field(description="Continue the conversation of this name, or start it.")
    ] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=4096, description="Longest answer, in tokens.")] = None

    def options(self, collection: str) -> AskOptions:
        """Convert to AskOptions. See `AnswerChoices.options`."""
        return replace(super().options(collection), conversation=self.conversation_id)


class QuestionIn(QuestionFields):
    """A question. A field that is left out takes the value from the settings of the service."""

    stream: Annotated[bool, Field(description="Answer as server-sent events.")] = False
