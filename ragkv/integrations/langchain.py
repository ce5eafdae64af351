"""LangChain: a retriever, a chain that answers with citations, and a chat model.

    from ragkv.integrations.langchain import ChatRagkv, RagkvAnswers, RagkvRetriever

    documents = RagkvRetriever(url="http://127.0.0.1:8000", top_k=4).invoke("Who built the harbour?")
    answer = RagkvAnswers(collection="notes").invoke("Who built the harbour?")
    print(answer["answer"], answer["citations"][0].metadata["document_id"])

All of them have `invoke`, `stream` and `batch`, and the same to be awaited. The fields of an object apply to every
call. A call may name others, as in `retriever.invoke(question, top_k=8)` or `answers.bind(method="full")`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from ragkv.errors import MissingPackage

try:
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import AddableDict, RunnableConfig, RunnableSerializable
except ImportError as error:
    raise MissingPackage("the extra langchain is not installed: pip install 'langchain-core>=1.7,<2'") from error

from ragkv.client import Done, Event, Said
from ragkv.integrations.connection import passage_metadata
from ragkv.integrations.langchain_chat import ChatRagkv
from ragkv.integrations.langchain_service import FORBID, AnswerFields, ServiceFields
from ragkv.passages import Citation, FoundPassage
from ragkv.report import Answer

__all__ = ["ChatRagkv", "RagkvAnswers", "RagkvRetriever"]


class RagkvRetriever(ServiceFields, BaseRetriever):
    """Retrieves passages from a ragkv service (`POST /v1/search`). Nothing is generated.

    The metadata of a document has `document_id`, `chunk_id`, `title`, `heading`, `page`, `start` and `end` (offsets
    into the text of the document), `version`, `score`, `similarity` and `word_score`.

    Attributes:
        documents: Search only documents with these ids.
    """

    model_config = FORBID

    documents: Sequence[str] | None = None

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        found = self.connection.client.search(query, **self._options(options))
        return [document_of(passage) for passage in found.passages]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        async with self.connection.open() as client:
            found = await client.search(query, **self._options(options))
        return [document_of(passage) for passage in found.passages]

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return self.request_options(("documents",), options)


class RagkvAnswers(AnswerFields, RunnableSerializable[str, dict[str, Any]]):
    """Answers a question from the documents of a ragkv service (`POST /v1/answers`).

    The output is `{"question", "answer", "citations", "report"}`. Citations are documents with the metadata of a
    retrieved one, and `marks`: where the words of the answer occur. Added together, the parts of a stream are the
    output of `invoke`; parts with `answer` hold the next piece of it.

    Attributes:
        conversation_id: Conversation that the questions continue or start.
    """

    model_config = FORBID

    conversation_id: str | None = None

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        """Answer a question.

        Args:
            input: The question.
            config: Callbacks, tags and metadata of the run.
            **kwargs: Options of this question, in place of those of the object.
        """

        def ask(question: str) -> dict[str, Any]:
            return output_of(self.connection.client.ask(question, **self._options(kwargs)))

        return self._call_with_config(ask, input, config)

    async def ainvoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        """Answer a question. See `invoke`."""

        async def ask(question: str) -> dict[str, Any]:
            async with self.connection.open() as client:
                return output_of(await client.ask(question, **self._options(kwargs)))

        return await self._acall_with_config(ask, input, config)

    def stream(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[dict[str, Any]]:
        """Answer a question; yield parts of the output while it is decoded. See `invoke`."""
        yield from self.transform(iter([input]), config, **kwargs)

    async def astream(
        self, input: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Answer a question; yield parts of the output while it is decoded. See `invoke`."""

        async def one() -> AsyncIterator[str]:
            yield input

        async for part in self.atransform(one(), config, **kwargs):
            yield part

    def transform(
        self, input: Iterator[str], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        """Answer the question that the parts of the input are together. See `stream`."""

        def parts(texts: Iterator[str]) -> Iterator[dict[str, Any]]:
            for event in self.connection.client.stream("".join(texts), **self._options(kwargs)):
                yield from parts_of(event)

        yield from self._transform_stream_with_config(input, parts, config)

    async def atransform(
        self, input: AsyncIterator[str], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Answer the question that the parts of the input are together. See `stream`."""

        async def parts(texts: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
            question = "".join([text async for text in texts])
            async with self.connection.open() as client:
                async for event in client.stream(question, **self._options(kwargs)):
                    for part in parts_of(event):
                        yield part

        async for part in self._atransform_stream_with_config(input, parts, config):
            yield part

    def _options(self, options: Mapping[str, Any]) -> Any:
        return self.request_options(("conversation_id",), options)


def document_of(passage: FoundPassage | Citation) -> Document:
    """Convert a passage."""
    return Document(id=passage.chunk_id, page_content=passage.text, metadata=passage_metadata(passage))


def output_of(answer: Answer) -> dict[str, Any]:
    """Convert an answer."""
    citations = [document_of(citation) for citation in answer.citations]
    return {
        "question": answer.question,
        "answer": answer.answer,
        "citations": citations,
        "report": asdict(answer.report),
    }


def parts_of(event: Event) -> Iterator[dict[str, Any]]:
    """Convert an event of a stream. The citations come with the end, because they have their marks only then."""
    if isinstance(event, Said):
        yield AddableDict(answer=event.text)
    elif isinstance(event, Done):
        whole = output_of(event.answer)
        del whole["answer"]
        yield cast("dict[str, Any]", AddableDict(whole))
