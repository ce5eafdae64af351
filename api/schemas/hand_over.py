"""Bodies of `POST /v1/handovers` and `POST /v1/handovers/rows`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from ragkv.api.schemas.common import (
    DESCRIBED,
    MAX_QUESTION_CHARS,
    STRICT,
    Body,
    Filter,
    Name,
    check_storable,
    check_unicode,
)
from ragkv.engine.hand_over import HandOver, KeptChunk
from ragkv.types import AskOptions

MAX_CHUNKS = 64
MAX_TURNS = 128
MAX_BLOCKS = 65_536
MAX_ROW = 2**63 - 1


Said = Annotated[str, Field(max_length=MAX_QUESTION_CHARS), AfterValidator(check_storable)]


class TurnIn(Body):
    """An earlier question with its answer."""

    question: Said
    answer: Said


class HandOverIn(Body):
    """A question that another server answers. A field that is left out takes the value from the settings."""

    model_config = STRICT

    question: Annotated[Said, Field(min_length=1)]
    collection: Name = "default"
    top_k: Annotated[int | None, Field(ge=1, le=MAX_CHUNKS, description="Chunks to retrieve.")] = None
    filter: Filter | None = None
    method: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    history: Annotated[list[TurnIn], Field(max_length=MAX_TURNS, description="Earlier turns, in order.")] = Field(
        default_factory=list
    )
    instructions: Annotated[Said, Field(description="Text before the first turn, like a system message.")] = ""

    def options(self, collection: str) -> AskOptions:
        """Convert to AskOptions. collection: its name in the catalogue."""
        return AskOptions(
            collection,
            top_k=self.top_k,
            filter=self.filter,
            method=self.method,
            history=tuple((turn.question, turn.answer) for turn in self.history),
            instructions=self.instructions,
        )


class KeptChunkIn(Body):
    """What is read of a chunk."""

    row: Annotated[int, Field(ge=0, le=MAX_ROW)]
    blocks: Annotated[list[Annotated[int, Field(ge=0, le=MAX_BLOCKS)]], Field(max_length=MAX_BLOCKS)]


class RowsIn(Body):
    """The rows of a hand-over, as `kv_transfer_params.ragkv` names them, and its salt."""

    model_config = STRICT

    collection: Name = "default"
    chunks: Annotated[list[KeptChunkIn], Field(min_length=1, max_length=MAX_CHUNKS)]
    rows: Annotated[int | None, Field(ge=1, description="Tokens that are handed over. Not needed here.")] = None
    cache_salt: Annotated[str, Field(max_length=128), AfterValidator(check_unicode)]

    @property
    def kept(self) -> list[KeptChunk]:
        """The chunks as the engine knows them."""
        return [KeptChunk(chunk.row, tuple(chunk.blocks)) for chunk in self.chunks]


class HandOverOut(BaseModel):
    """A question as vLLM's `POST /v1/completions` takes it, and what it will be answered from."""

    model_config = DESCRIBED

    prompt: list[int]
    """Token ids."""
    cache_salt: str
    """Keeps these rows apart from others in vLLM's cache of prefixes. vLLM must get it."""
    kv_transfer_params: dict[str, Any] | None
    """What the connector asks for; null where vLLM prefills the whole prompt."""
    stop: list[str]
    """Strings that end an answer."""
    method: str
    """The method that chose what is read."""
    citations: list[dict[str, Any]]
    """The passages, as those of an answer."""


def told(over: HandOver, collection: str) -> dict[str, Any]:
    """Return the members of `HandOverOut` but the citations. collection: its name for the tenant."""
    chunks = [{"row": chunk.row, "blocks": list(chunk.blocks)} for chunk in over.chunks]
    rows = {"ragkv": {"collection": collection, "rows": over.rows, "chunks": chunks}} if over.rows else None
    return {
        "prompt": list(over.tokens),
        "cache_salt": over.salt,
        "kv_transfer_params": rows,
        "stop": list(over.stop),
        "method": over.method,
    }
