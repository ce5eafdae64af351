"""LangChain's chat model over a ragkv service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import PrivateAttr

from ragkv.client import ChatAnswer, ChatMessage, Said
from ragkv.integrations.connection import given, passage_metadata
from ragkv.integrations.langchain_service import FORBID, AnswerFields


class ChatRagkv(AnswerFields, BaseChatModel):
    """Answers the last message of a chat from the documents of a ragkv service (`POST /v1/chat/completions`).

    Earlier messages are turns before the question. `response_metadata` of the answer has `citations` (passages with
    their text) and `report`. The service refuses tools, structured output and images.

    Attributes:
        model: Name of the loaded model, or NAME:METHOD; by default the loaded model.
        temperature: 0 takes the likeliest token.
        top_p: Share of the probability that is sampled from.
        seed: Seed of the sampling.
        stop: Strings at which the answer ends, four at most.
        streaming: Whether `invoke` streams too, so that callbacks get the tokens.
    """

    model_config = FORBID

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    streaming: bool = False

    _loaded: str = PrivateAttr("")

    @property
    def _llm_type(self) -> str:
        return "ragkv"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {"url": self.url, "model": self.model, **self._options(None, {})}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(stop=stop or self.stop, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        client, model = self.connection.client, kwargs.pop("model", "") or self.model or self._loaded
        if not model:
            model = self._loaded = client.models()[0]
        return _result(client.chat(model, _messages(messages), **self._options(stop, kwargs)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        model = kwargs.pop("model", "") or self.model or self._loaded
        async with self.connection.open() as client:
            if not model:
                model = self._loaded = (await client.models())[0]
            return _result(await client.chat(model, _messages(messages), **self._options(stop, kwargs)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        client, model = self.connection.client, kwargs.pop("model", "") or self.model or self._loaded
        if not model:
            model = self._loaded = client.models()[0]
        for event in client.stream_chat(model, _messages(messages), **self._options(stop, kwargs)):
            chunk = _chunk(event)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        model = kwargs.pop("model", "") or self.model or self._loaded
        async with self.connection.open() as client:
            if not model:
                model = self._loaded = (await client.models())[0]
            async for event in client.stream_chat(model, _messages(messages), **self._options(stop, kwargs)):
                chunk = _chunk(event)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _options(self, stop: list[str] | None, options: Mapping[str, Any]) -> Any:
        fields = self.request_options(("temperature", "top_p", "seed"), options)
        return fields | given(stop=stop or self.stop or None)


def _messages(messages: Sequence[BaseMessage]) -> list[ChatMessage]:
    """Convert messages. The service tells which contents and roles it refuses."""
    converted: Any = convert_to_openai_messages(messages, text_format="string")
    return [{"role": message["role"], "content": message["content"]} for message in converted]


def _result(answer: ChatAnswer) -> ChatResult:
    message = AIMessage(answer.text, usage_metadata=_usage(answer), response_metadata=_metadata(answer))
    return ChatResult(generations=[ChatGeneration(message=message)])


def _chunk(event: Said | ChatAnswer) -> ChatGenerationChunk:
    if isinstance(event, Said):
        return ChatGenerationChunk(message=AIMessageChunk(content=event.text))
    usage, metadata = _usage(event), _metadata(event)
    last = AIMessageChunk(content="", usage_metadata=usage, response_metadata=metadata, chunk_position="last")
    return ChatGenerationChunk(message=last)


def _usage(answer: ChatAnswer) -> UsageMetadata:
    usage = answer.usage
    cached = InputTokenDetails(cache_read=usage.cached)
    return UsageMetadata(
        input_tokens=usage.prompt,
        output_tokens=usage.completion,
        total_tokens=usage.prompt + usage.completion,
        input_token_details=cached,
    )


def _metadata(answer: ChatAnswer) -> dict[str, Any]:
    citations = [{**passage_metadata(citation), "text": citation.text} for citation in answer.citations]
    report = asdict(answer.report)
    return {
        "model_name": answer.model,
        "model_provider": "ragkv",
        "finish_reason": answer.finish_reason,
        "citations": citations,
        "report": report,
    }
