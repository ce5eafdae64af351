"""Haystack: a retriever, and a component that answers with its documents.

    from haystack import Pipeline
    from ragkv.integrations.haystack import RagkvGenerator, RagkvPassageRetriever

    pipeline = Pipeline()
    pipeline.add_component("answerer", RagkvGenerator("http://127.0.0.1:8000", collection="notes"))
    answer = pipeline.run({"answerer": {"query": "Who built the harbour?"}})["answerer"]["answers"][0]
    print(answer.data, answer.documents[0].meta["document_id"])

Both run in asynchronous pipelines, and pipelines with them can be saved and loaded. `filters` are Haystack's, with the
operators `==` and `in` joined by AND.
"""

from __future__ import annotations

from functools import cached_property
from inspect import isawaitable
from typing import Any, Unpack

from ragkv.errors import MissingPackage

try:
    from haystack import Document, GeneratedAnswer, component, default_from_dict, default_to_dict
    from haystack.dataclasses import ComponentInfo, StreamingCallbackT, select_streaming_callback
    from haystack.utils import Secret, deserialize_callable, serialize_callable
except ImportError as error:
    raise MissingPackage("the extra haystack is not installed: pip install 'haystack-ai>=3.4,<4'") from error

from ragkv.client.calls import RETRIES, TIMEOUT
from ragkv.client.models import Options
from ragkv.integrations.connection import KEY, URL, Connection, given
from ragkv.integrations.haystack_values import AnswerPieces, document_of, haystack_filter, output_of

API_KEY = Secret.from_env_var(KEY, strict=False)
"""By default the key of the environment, if there is one."""


@component
class RagkvPassageRetriever:
    """Retrieves passages from a ragkv service (`POST /v1/search`). Nothing is generated.

    The meta of a document has `document_id`, `chunk_id`, `title`, `heading`, `page`, `start` and `end` (offsets into
    the text of the document), `version`, `similarity` and `word_score`.
    """

    def __init__(
        self,
        url: str = URL,
        api_key: Secret = API_KEY,
        collection: str = "default",
        top_k: int | None = None,
        filters: dict[str, Any] | None = None,
        timeout: float = TIMEOUT,
        max_retries: int = RETRIES,
    ):
        """Create a retriever.

        Args:
            url: Address of the service.
            api_key: API key, if the service requires one.
            collection: Collection to search.
            top_k: Number of passages; None uses the setting of the service.
            filters: Only documents whose metadata matches.
            timeout: Seconds to wait for a response.
            max_retries: How often a request to a busy service is retried.
        """
        self.url, self.api_key, self.collection, self.top_k, self.filters = url, api_key, collection, top_k, filters
        self.timeout, self.max_retries = timeout, max_retries

    @cached_property
    def _connection(self) -> Connection:
        return _connection(self.url, self.api_key, self.timeout, self.max_retries)

    def close(self) -> None:
        """Close the connections. The next run opens new ones."""
        _close(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the component as JSON values."""
        return default_to_dict(
            self,
            url=self.url,
            api_key=self.api_key,
            collection=self.collection,
            top_k=self.top_k,
            filters=self.filters,
            timeout=self.timeout,
            max_retries=self.max_retries,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RagkvPassageRetriever:
        """Return the component that `to_dict` described."""
        return default_from_dict(cls, data)

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Retrieve passages.

        Args:
            query: Words, or a question.
            filters: Filters of this query, in place of those of the component.
            top_k: Number of passages of this query.

        Returns:
            `documents`, best first.

        Raises:
            InputError: A filter cannot be expressed.
            ServiceError: The service refused the request or cannot be reached.
        """
        found = self._connection.client.search(query, **self._options(filters, top_k))
        return {"documents": [document_of(passage) for passage in found.passages]}

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Retrieve passages. See `run`."""
        async with self._connection.open() as client:
            found = await client.search(query, **self._options(filters, top_k))
        return {"documents": [document_of(passage) for passage in found.passages]}

    def _options(self, filters: dict[str, Any] | None, top_k: int | None) -> Any:
        chosen = self.filters if filters is None else filters
        top_k = self.top_k if top_k is None else top_k
        return given(collection=self.collection, top_k=top_k, filter=haystack_filter(chosen))


@component
class RagkvGenerator:
    """Answers questions from the documents of a ragkv service (`POST /v1/answers`), which retrieves as well.

    An answer has the citations as `documents`, whose meta has `marks` (where the words of the answer occur), and the
    report as `meta["report"]`.
    """

    def __init__(
        self,
        url: str = URL,
        api_key: Secret = API_KEY,
        filters: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        timeout: float = TIMEOUT,
        max_retries: int = RETRIES,
        **options: Unpack[Options],
    ):
        """Create a generator.

        Args:
            url: Address of the service.
            api_key: API key, if the service requires one.
            filters: Only documents whose metadata matches.
            streaming_callback: Called with each piece of an answer.
            timeout: Seconds to wait for an answer, or for its next piece.
            max_retries: How often a request to a busy service is retried.
            **options: See `ragkv.client.models.Options`.
        """
        self.url, self.api_key, self.filters, self.streaming_callback = url, api_key, filters, streaming_callback
        self.timeout, self.max_retries = timeout, max_retries
        self.options: Any = options

    @cached_property
    def _connection(self) -> Connection:
        return _connection(self.url, self.api_key, self.timeout, self.max_retries)

    def close(self) -> None:
        """Close the connections. The next run opens new ones."""
        _close(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the component as JSON values."""
        return default_to_dict(
            self,
            url=self.url,
            api_key=self.api_key,
            filters=self.filters,
            streaming_callback=serialize_callable(self.streaming_callback) if self.streaming_callback else None,
            timeout=self.timeout,
            max_retries=self.max_retries,
            **self.options,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RagkvGenerator:
        """Return the component that `to_dict` described."""
        parameters = dict(data["init_parameters"])
        if parameters.get("streaming_callback"):
            parameters["streaming_callback"] = deserialize_callable(parameters["streaming_callback"])
        return default_from_dict(cls, {**data, "init_parameters": parameters})

    @component.output_types(answers=list[GeneratedAnswer], documents=list[Document])
    def run(
        self,
        query: str,
        filters: dict[str, Any] | None = None,
        top_k: int | None = None,
        conversation_id: str | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> dict[str, Any]:
        """Answer a question.

        Args:
            query: The question.
            filters: Filters of this question, in place of those of the component.
            top_k: Number of passages for this question.
            conversation_id: Conversation that the question continues or starts.
            streaming_callback: Called with each piece of the answer, in place of that of the component.

        Returns:
            `answers`, with one answer, and its `documents`.

        Raises:
            InputError: A filter cannot be expressed.
            ServiceError: The service refused the request or cannot be reached.
        """
        call = select_streaming_callback(self.streaming_callback, streaming_callback, requires_async=False)
        options = self._options(filters, top_k, conversation_id)
        if call is None:
            return output_of(self._connection.client.ask(query, **options))
        pieces = AnswerPieces(ComponentInfo.from_component(self))
        for event in self._connection.client.stream(query, **options):
            for chunk in pieces.of(event):
                call(chunk)
        return output_of(pieces.whole())

    @component.output_types(answers=list[GeneratedAnswer], documents=list[Document])
    async def run_async(
        self,
        query: str,
        filters: dict[str, Any] | None = None,
        top_k: int | None = None,
        conversation_id: str | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> dict[str, Any]:
        """Answer a question. See `run`."""
        call = select_streaming_callback(self.streaming_callback, streaming_callback, requires_async=True)
        options = self._options(filters, top_k, conversation_id)
        async with self._connection.open() as client:
            if call is None:
                return output_of(await client.ask(query, **options))
            pieces = AnswerPieces(ComponentInfo.from_component(self))
            async for event in client.stream(query, **options):
                for chunk in pieces.of(event):
                    called = call(chunk)
                    if isawaitable(called):
                        await called
        return output_of(pieces.whole())

    def _options(self, filters: dict[str, Any] | None, top_k: int | None, conversation_id: str | None) -> Any:
        chosen = self.filters if filters is None else filters
        return {**self.options, **given(filter=haystack_filter(chosen), top_k=top_k, conversation_id=conversation_id)}


def _connection(url: str, api_key: Secret, timeout: float, max_retries: int) -> Connection:
    return Connection(url, api_key.resolve_value() or "", timeout, max_retries)


def _close(made: RagkvPassageRetriever | RagkvGenerator) -> None:
    connection = vars(made).pop("_connection", None)
    if connection is not None:
        connection.client.close()
