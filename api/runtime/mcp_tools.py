"""The MCP tools: names, descriptions, arguments, results, and what each of them calls. Both transports offer these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from mcp import types
from pydantic import BaseModel, TypeAdapter

from ragkv.api.runtime.tool_backend import Progress, ToolBackend
from ragkv.api.schemas.common import QuestionFields
from ragkv.api.schemas.search import SearchIn
from ragkv.api.schemas.tools import (
    CollectionSummaries,
    DeletedDocument,
    DocumentName,
    DocumentSummaries,
    IngestArguments,
    IngestSummary,
    ListArguments,
    NoArguments,
)
from ragkv.passages import SearchResult
from ragkv.report import Answer

A = TypeVar("A", bound=BaseModel)

READS = types.ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
REPLACES = types.ToolAnnotations(
    read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
)
"""Of tools that replace or delete documents. The same call again changes nothing more."""


@dataclass(frozen=True)
class ToolSpec(Generic[A]):
    """A tool.

    Attributes:
        name: Name that clients call it by.
        title: Name that people read.
        description: What it does, for the model that chooses a tool.
        arguments: Model of its arguments.
        result: Type of its result.
        annotations: What it does to documents.
        call: Does the work, and returns the result.
    """

    name: str
    title: str
    description: str
    arguments: type[A]
    result: type[Any]
    annotations: types.ToolAnnotations
    call: Callable[[ToolBackend, A, Progress], Awaitable[Any]]

    @cached_property
    def input_schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments."""
        return self.arguments.model_json_schema()

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.result)

    def described(self) -> types.Tool:
        """Describe the tool to clients."""
        return types.Tool(
            name=self.name,
            title=self.title,
            description=self.description,
            input_schema=self.input_schema,
            output_schema=self._adapter.json_schema(mode="serialization"),
            annotations=self.annotations,
        )

    async def run(self, backend: ToolBackend, arguments: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Run the tool and return its result as JSON.

        Args:
            backend: Does the work.
            arguments: As the client sent them.
            progress: Receives the progress.

        Raises:
            ValidationError: The arguments do not fit the schema.
            Exception: What the backend raises.
        """
        result = await self.call(backend, self.arguments.model_validate(arguments), progress)
        content: dict[str, Any] = self._adapter.dump_python(result, mode="json")
        return content


async def _search(backend: ToolBackend, search: SearchIn, progress: Progress) -> SearchResult:
    return await backend.search(search)


async def _ask(backend: ToolBackend, question: QuestionFields, progress: Progress) -> Answer:
    return await backend.ask(question)


async def _ingest(backend: ToolBackend, arguments: IngestArguments, progress: Progress) -> IngestSummary:
    return await backend.ingest(arguments, progress)


async def _list_documents(backend: ToolBackend, arguments: ListArguments, progress: Progress) -> DocumentSummaries:
    return await backend.documents(arguments)


async def _list_collections(backend: ToolBackend, nothing: NoArguments, progress: Progress) -> CollectionSummaries:
    return await backend.collections()


async def _delete_document(backend: ToolBackend, document: DocumentName, progress: Progress) -> DeletedDocument:
    await backend.delete(document)
    return DeletedDocument(id=document.id, collection=document.collection)


_ALL: tuple[ToolSpec[Any], ...] = (
    ToolSpec(
        "search",
        "Search documents",
        "Search the documents of a collection for passages, by words and by meaning. Returns passages with their text, "
        "their document and their scores, best first. Nothing is generated.",
        SearchIn,
        SearchResult,
        READS,
        _search,
    ),
    ToolSpec(
        "ask",
        "Ask the documents",
        "Answer a question from the documents of a collection. Returns a short answer, citations with the text of each "
        "passage, and a report of what the answer reused, loaded and recomputed. The answer is `unknown` where the "
        "documents do not say.",
        QuestionFields,
        Answer,
        # With conversation_id it adds a turn to a conversation. It changes no document.
        types.ToolAnnotations(
            read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=False
        ),
        _ask,
    ),
    ToolSpec(
        "ingest",
        "Ingest documents",
        "Add documents to a collection so that `search` and `ask` can use them, and wait until they are in. A document "
        "whose id exists is replaced. A document that cannot be ingested fails alone and is listed with the reason.",
        IngestArguments,
        IngestSummary,
        REPLACES,
        _ingest,
    ),
    ToolSpec(
        "list_documents",
        "List documents",
        "List the documents of a collection in pages: id, title, metadata and size. `q` and `filter` select documents.",
        ListArguments,
        DocumentSummaries,
        READS,
        _list_documents,
    ),
    ToolSpec(
        "list_collections",
        "List collections",
        "List the collections that have documents. The other tools use the collection `default` unless they are told "
        "another one.",
        NoArguments,
        CollectionSummaries,
        READS,
        _list_collections,
    ),
    ToolSpec(
        "delete_document",
        "Delete a document",
        "Delete a document. No later answer cites it, and it cannot be restored.",
        DocumentName,
        DeletedDocument,
        REPLACES,
        _delete_document,
    ),
)

TOOLS = {tool.name: tool for tool in _ALL}
"""The tools by name, in the order in which clients see them."""
