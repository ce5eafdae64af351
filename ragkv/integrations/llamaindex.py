"""LlamaIndex: a retriever of nodes, and a query engine that answers with its sources.

    from ragkv.integrations.llamaindex import RagkvNodeRetriever, RagkvQueryEngine

    nodes = RagkvNodeRetriever("http://127.0.0.1:8000", top_k=4).retrieve("Who built the harbour?")
    response = RagkvQueryEngine(streaming=True, collection="notes").query("Who built the harbour?")
    response.print_response_stream()

Both work with `await` as well (`aretrieve`, `aquery`), and report to callbacks and to LlamaIndex's instrumentation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypedDict, Unpack

from ragkv.errors import MissingPackage

try:
    from llama_index.core.base.base_query_engine import BaseQueryEngine
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.base.llms.generic_utils import get_from_param_or_env
    from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, Response, StreamingResponse
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.callbacks.schema import CBEventType, EventPayload
    from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode
    from llama_index.core.vector_stores.types import FilterCondition, MetadataFilters
except ImportError as error:
    raise MissingPackage("the extra llamaindex is not installed: pip install 'llama-index-core>=0.14,<0.15'") from error

from ragkv.client import Done, Event, Retrieved, Said
from ragkv.client.calls import RETRIES, TIMEOUT
from ragkv.client.models import Options
from ragkv.integrations.connection import KEY, URL, Connection, given, passage_metadata
from ragkv.integrations.filters import filter_of, unsupported
from ragkv.passages import Citation, FoundPassage
from ragkv.report import Answer
from ragkv.types import Filter

SHOWN = ("title", "heading", "page")
"""The metadata that LlamaIndex puts into prompts and embeddings, beside the text."""


class SearchOptions(TypedDict, total=False):
    """Options of a search. The service's settings apply to those that are left out.

    Attributes:
        collection: Collection to search.
        top_k: Number of passages.
        documents: Only the documents with these ids.
        filter: Only documents whose metadata matches; LlamaIndex's own `filters` are preferred.
    """

    collection: str
    top_k: int | None
    documents: Sequence[str] | None
    filter: Filter | None


class RagkvNodeRetriever(BaseRetriever):
    """Retrieves passages from a ragkv service (`POST /v1/search`) as nodes. Nothing is generated.

    The metadata of a node has `document_id`, `chunk_id`, `title`, `heading`, `page`, `version`, `similarity` and
    `word_score`. Its place in the text of its document is `start_char_idx` and `end_char_idx`.
    """

    def __init__(
        self,
        url: str = URL,
        api_key: str | None = None,
        filters: MetadataFilters | None = None,
        callback_manager: CallbackManager | None = None,
        timeout: float = TIMEOUT,
        max_retries: int = RETRIES,
        **options: Unpack[SearchOptions],
    ):
        """Create a retriever.

        Args:
            url: Address of the service.
            api_key: API key, if the service requires one; by default that of the environment, `RAGKV_KEY`.
            filters: Only documents whose metadata matches: `==` and `in`, joined by AND.
            callback_manager: Callbacks of LlamaIndex.
            timeout: Seconds to wait for a response, or for the next event of a stream.
            max_retries: How often a request to a busy service is retried.
            **options: See `SearchOptions`.

        Raises:
            InputError: A filter cannot be expressed.
        """
        super().__init__(callback_manager=callback_manager)
        self._connection = _connection(url, api_key, timeout, max_retries)
        self._options: Any = given(**{**options, **_filter(filters)})

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return nodes_of(self._connection.client.search(query_bundle.query_str, **self._options).passages)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        async with self._connection.open() as client:
            return nodes_of((await client.search(query_bundle.query_str, **self._options)).passages)


class RagkvQueryEngine(BaseQueryEngine):
    """Answers questions from the documents of a ragkv service (`POST /v1/answers`).

    `source_nodes` of a response are the citations of the answer, and `metadata` has the report. A node's metadata has
    `marks`: where the words of the answer occur. While a response is streamed, `source_nodes` are the retrieved nodes.
    """

    def __init__(
        self,
        url: str = URL,
        api_key: str | None = None,
        filters: MetadataFilters | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
        timeout: float = TIMEOUT,
        max_retries: int = RETRIES,
        **options: Unpack[Options],
    ):
        """Create a query engine.

        Args:
            url: Address of the service.
            api_key: API key, if the service requires one; by default that of the environment, `RAGKV_KEY`.
            filters: Only documents whose metadata matches: `==` and `in`, joined by AND.
            streaming: Whether responses are streamed.
            callback_manager: Callbacks of LlamaIndex.
            timeout: Seconds to wait for a response, or for the next event of a stream.
            max_retries: How often a request to a busy service is retried.
            **options: See `ragkv.client.models.Options`.

        Raises:
            InputError: A filter cannot be expressed.
        """
        super().__init__(callback_manager=callback_manager)
        self._connection, self._streaming = _connection(url, api_key, timeout, max_retries), streaming
        self._options: Any = given(**{**options, **_filter(filters)})

    def _get_prompt_modules(self) -> dict[str, Any]:
        """Return nothing: the prompt is the service's."""
        return {}

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        question = query_bundle.query_str
        with self.callback_manager.event(CBEventType.QUERY, payload={EventPayload.QUERY_STR: question}) as running:
            if self._streaming:
                response = self._stream(question)
            else:
                response = _response(self._connection.client.ask(question, **self._options))
            running.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        question = query_bundle.query_str
        with self.callback_manager.event(CBEventType.QUERY, payload={EventPayload.QUERY_STR: question}) as running:
            if self._streaming:
                response = await self._astream(question)
            else:
                async with self._connection.open() as client:
                    response = _response(await client.ask(question, **self._options))
            running.on_end(payload={EventPayload.RESPONSE: response})
        return response

    def _stream(self, question: str) -> RESPONSE_TYPE:
        events = self._events(question)
        nodes, metadata = _first_nodes(next(events)), dict[str, Any]()

        def texts() -> Generator[str, None, None]:
            for event in events:
                yield from _texts(event, nodes, metadata)

        return StreamingResponse(texts(), nodes, metadata)

    async def _astream(self, question: str) -> RESPONSE_TYPE:
        events = self._aevents(question)
        nodes, metadata = _first_nodes(await anext(events)), dict[str, Any]()

        async def texts() -> AsyncGenerator[str, None]:
            async for event in events:
                for text in _texts(event, nodes, metadata):
                    yield text

        return AsyncStreamingResponse(texts(), nodes, metadata)

    def _events(self, question: str) -> Iterator[Event]:
        """Stream an answer. The engine, and with it the connection, stays until the end of the stream."""
        yield from self._connection.client.stream(question, **self._options)

    async def _aevents(self, question: str) -> AsyncIterator[Event]:
        async with self._connection.open() as client:
            async for event in client.stream(question, **self._options):
                yield event


def nodes_of(passages: Iterable[FoundPassage | Citation]) -> list[NodeWithScore]:
    """Convert passages."""
    found = []
    for passage in passages:
        metadata = passage_metadata(passage)
        place = {"start_char_idx": metadata.pop("start"), "end_char_idx": metadata.pop("end")}
        score = metadata.pop("score")
        hidden = [name for name in metadata if name not in SHOWN or metadata[name] in (None, "")]
        node = TextNode(
            id_=passage.chunk_id,
            text=passage.text,
            metadata=metadata,
            excluded_llm_metadata_keys=hidden,
            excluded_embed_metadata_keys=hidden,
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=passage.document_id)},
            **place,
        )
        found.append(NodeWithScore(node=node, score=score))
    return found


def _connection(url: str, api_key: str | None, timeout: float, max_retries: int) -> Connection:
    return Connection(url, get_from_param_or_env("api_key", api_key, KEY, ""), timeout, max_retries)


def _filter(filters: MetadataFilters | None) -> dict[str, Filter]:
    """Return the option of a request; none without filters."""
    return {} if filters is None else {"filter": filter_of(_conditions(filters))}


def _conditions(filters: MetadataFilters) -> Iterator[tuple[str, str, Any]]:
    if filters.condition not in (None, FilterCondition.AND) and len(filters.filters) > 1:
        raise unsupported(f"the condition {filters.condition.value!r}")
    for condition in filters.filters:
        if isinstance(condition, MetadataFilters):
            yield from _conditions(condition)
        else:
            yield condition.key, condition.operator.value, condition.value


def _response(answer: Answer) -> Response:
    return Response(answer.answer, nodes_of(answer.citations), _metadata(answer))


def _metadata(answer: Answer) -> dict[str, Any]:
    return {"report": asdict(answer.report)}


def _first_nodes(event: Event) -> list[NodeWithScore]:
    return nodes_of(event.citations) if isinstance(event, Retrieved) else []


def _texts(event: Event, nodes: list[NodeWithScore], metadata: dict[str, Any]) -> Iterator[str]:
    """Yield the text of an event. The last event completes nodes and metadata, which the response holds, too."""
    if isinstance(event, Said):
        yield event.text
    elif isinstance(event, Done):
        nodes[:] = nodes_of(event.answer.citations)
        metadata.update(_metadata(event.answer))
