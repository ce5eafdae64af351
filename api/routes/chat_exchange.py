"""Requests of the APIs that chat programs speak: each is read as a chat, and the reply takes the form of its API.

    body.chat() → Chat                       the schema of the API does this
    await exchange.respond(chat, form)       asks, and answers whole or as a stream

What a form has to say is in `ChatForm`. Questions, histories, models, collections, and requests for a title or tags are
read in one place for all of them (openai_chat.py, openai_tasks.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request
from starlette.responses import JSONResponse, Response

from ragkv.api.errors import Fault, Gone
from ragkv.api.routes.dependencies import EngineThreadDep, SettingsDep, TenantDep
from ragkv.api.routes.event_stream import EventStream, stream_fault
from ragkv.api.routes.openai_chat import (
    NO_USAGE,
    behind,
    continued,
    extension_of,
    method_of,
    options_of,
    turns_of,
    usage_of,
)
from ragkv.api.routes.openai_tasks import task_reply
from ragkv.api.runtime.answer_stream import AnswerStream
from ragkv.api.schemas.openai import Chat
from ragkv.engine.token_scores import TokenScore
from ragkv.passages import Citation
from ragkv.report import Answer
from ragkv.types import AskOptions


@dataclass(frozen=True)
class ChatOutcome:
    """What a chat program is told.

    Attributes:
        text: The text; where the client gave its beginning, what comes behind that.
        answer: The answer from documents; None for a title or the like, which a rule makes.
        tokens: Log probabilities of the tokens of the text; None where the client does not ask for them.
    """

    text: str
    answer: Answer | None = None
    tokens: Sequence[TokenScore] | None = None

    @property
    def at_limit(self) -> bool:
        """Whether the text ends because it reached its longest length."""
        return self.answer is not None and self.answer.report.decoding.ended == "length"

    @property
    def finish_reason(self) -> str:
        """Why the text ends, as OpenAI names it."""
        return "length" if self.at_limit else "stop"

    @property
    def usage(self) -> Mapping[str, Any]:
        """Token counts, as OpenAI names them."""
        return NO_USAGE if self.answer is None else usage_of(self.answer)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose stored KV was used."""
        cached: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    @property
    def citations(self) -> tuple[Citation, ...]:
        """Passages that the answer was read from."""
        return () if self.answer is None else tuple(self.answer.citations)

    @property
    def extension(self) -> dict[str, Any]:
        """The member `ragkv` of the response, if there is one: citations and report."""
        return {} if self.answer is None else {"ragkv": extension_of(self.answer)}


class ChatForm(Protocol):
    """The form that an API gives to a reply. An object of it is for one reply.

    Attributes:
        media_type: Of a stream.
    """

    media_type: str

    def whole(self, outcome: ChatOutcome) -> dict[str, Any]:
        """Build the response that is not streamed."""

    def first(self) -> Iterable[bytes]:
        """Encode what a stream begins with."""

    def piece(self, text: str, tokens: Sequence[TokenScore] = ()) -> bytes:
        """Encode the next piece of the text; "" where nothing has come for a while.

        Args:
            text: The piece.
            tokens: Log probabilities of its tokens, where the client asks for them.
        """

    def last(self, outcome: ChatOutcome) -> Iterable[bytes]:
        """Encode what a stream ends with."""

    def fault(self, fault: Fault) -> bytes:
        """Encode the fault that ends a stream."""


class ChatExchange:
    """One request of a chat program, and its reply."""

    def __init__(self, request: Request, engine_thread: EngineThreadDep, tenant: TenantDep, settings: SettingsDep):
        self.request, self.engine_thread, self.tenant, self.settings = request, engine_thread, tenant, settings

    async def respond(self, chat: Chat, form: ChatForm, conversation: str | None = None) -> Response:
        """Answer from the documents of a collection, in the form of an API.

        Args:
            chat: The request.
            form: Of the reply.
            conversation: Name of the conversation that keeps the turn.

        Raises:
            NotFound: The request names another model.
            RagkvError: As `AnswerStream` raises it.
        """
        turns, method = turns_of(chat), method_of(chat, self.engine_thread.model)
        told = task_reply(turns.question)
        if told is not None:
            return _by_rule(ChatOutcome(told, tokens=() if chat.logprobs else None), form, bool(chat.stream))
        options = options_of(chat, turns, method, self.tenant.inside(chat.ragkv.collection))
        stream = AnswerStream(
            self.engine_thread,
            self.request.receive,
            turns.question,
            replace(options, conversation=conversation),
            self.tenant.name,
            min(self.settings.deadline, chat.ragkv.deadline_s or self.settings.deadline),
            bool(chat.stream),
        )
        if not chat.stream:
            await stream.whole()
            return JSONResponse(form.whole(_outcome(stream, turns.beginning, options)))
        await stream.prefilled()
        return EventStream(stream, _events(stream, form, turns.beginning, options), form.media_type)


ChatExchangeDep = Annotated[ChatExchange, Depends()]


def _outcome(stream: AnswerStream, beginning: str, options: AskOptions) -> ChatOutcome:
    answer = stream.answer()
    tokens = None if options.top_log_probabilities is None else stream.tokens
    return ChatOutcome(behind(answer.answer, beginning), answer, tokens)


def _by_rule(outcome: ChatOutcome, form: ChatForm, stream: bool) -> Response:
    if not stream:
        return JSONResponse(form.whole(outcome))
    events = [*form.first(), form.piece(outcome.text), *form.last(outcome)]
    return Response(b"".join(events), media_type=form.media_type)


async def _events(stream: AnswerStream, form: ChatForm, beginning: str, options: AskOptions) -> AsyncIterator[bytes]:
    sent = 0
    try:
        for event in form.first():
            yield event
        async for piece in continued(stream.pieces(), beginning):
            tokens = stream.tokens[sent:] if piece else ()
            sent += len(tokens)
            yield form.piece(piece, tokens)
        for event in form.last(_outcome(stream, beginning, options)):
            stream.check()  # a slow client may take its time between two events
            yield event
    except Gone:
        raise
    except Exception as error:
        yield form.fault(stream_fault(error))
