"""Conversion between OpenAI's chat completions and the questions and answers of this service.

The question is what the user said last. The messages before it keep their roles: each earlier question stands with its
answer as a turn of its own before the question, behind the chunks. System messages, wherever they stand, are
instructions before the first turn. A last message of the assistant is how the answer begins. Calls of tools and their
results are not read.
What is searched for when the question refers to an earlier one is decided by retrieval (ragkv/retrieval/follow_up.py).
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ragkv.api.schemas.openai import MAX_TOKENS, NO_LIMIT, Chat
from ragkv.errors import InputError, NotFound
from ragkv.report import Answer
from ragkv.types import AskOptions

MIN_TEMPERATURE = 1e-3
"""Lower temperatures count as 0. They would sample the same tokens, and their logits would overflow."""


NO_USAGE = {
    "prompt_tokens": 0,
    "completion_tokens": 0,
    "total_tokens": 0,
    "prompt_tokens_details": {"cached_tokens": 0},
}


@dataclass(frozen=True)
class ChatTurns:
    """The messages of a request, as the service reads them.

    Attributes:
        question: What the user said last.
        history: Earlier (question, answer). What a user wrote without getting an answer belongs to the next question.
        instructions: The system messages.
        beginning: The last message, where it is the assistant's: how the answer begins.
    """

    question: str
    history: tuple[tuple[str, str], ...] = ()
    instructions: str = ""
    beginning: str = ""


def turns_of(chat: Chat) -> ChatTurns:
    """Read the messages, as the module describes."""
    asked, said, history, instructions = list[str](), list[str](), list[tuple[str, str]](), list[str]()
    for message in chat.messages:
        text = message.text.strip()
        if not text:
            continue
        if message.role == "user":
            if said:
                history.append(("\n".join(asked), "\n".join(said)))
                asked, said = [], []
            asked.append(text)
        elif message.role != "assistant":
            instructions.append(text)
        elif asked:
            said.append(text)
    last = chat.messages[-1]
    beginning = last.text.lstrip() if last.role == "assistant" else ""
    return ChatTurns("\n".join(asked), tuple(history), "\n".join(instructions), beginning)


def id_of(name: str) -> str:
    """Return a model's name as clients can write it anywhere, in lists and addresses: without blanks."""
    return "-".join(name.replace("+", " ").split())


def method_of(chat: Chat, model: str) -> str | None:
    """Return the method that the request names; None for the default of the service.

    Args:
        chat: The request.
        model: Name of the loaded model; its id names it, too.

    Raises:
        NotFound: The request names another model.
        InputError: The request names two different methods.
    """
    from_model, from_extension = method_of_name(chat.model, model), chat.ragkv.method
    if from_model and from_extension and from_model != from_extension:
        raise InputError("model and ragkv.method name two methods; give one")
    return from_model or from_extension


def method_of_name(name: str, model: str) -> str:
    """Return the method that the name of a model ends with, "" for none.

    Args:
        name: As the client wrote it.
        model: Name of the loaded model; its id names it, too.

    Raises:
        NotFound: It is the name of another model.
    """
    suffixes = [name.removeprefix(own) for own in (model, id_of(model)) if name.startswith(own)]
    suffix = next((suffix for suffix in suffixes if not suffix or suffix.startswith(":")), None)
    if suffix is None:
        raise NotFound(f"there is no such model; use {id_of(model)!r}, or see /v1/models")
    return suffix.removeprefix(":")


def options_of(chat: Chat, turns: ChatTurns, method: str | None, collection: str) -> AskOptions:
    """Convert a request to AskOptions.

    Args:
        chat: The request.
        turns: Result of `turns_of`.
        method: Result of `method_of`.
        collection: Name of the collection in the catalogue.
    """
    temperature = chat.temperature or 0.0
    if temperature < MIN_TEMPERATURE or chat.top_p == 0:
        temperature = 0.0
    stop = (chat.stop,) if isinstance(chat.stop, str) else (chat.stop or ())
    options = chat.ragkv.options(collection)
    structure = chat.response_format.answer_schema if chat.response_format else None
    return replace(
        options,
        answer_schema=structure or options.answer_schema,
        history=turns.history,
        instructions=turns.instructions,
        beginning=turns.beginning.rstrip(),
        method=method,
        max_tokens=_longest(chat.max_completion_tokens or chat.max_tokens),
        temperature=temperature,
        top_p=chat.top_p or 1.0,
        presence_penalty=chat.presence_penalty or 0.0,
        frequency_penalty=chat.frequency_penalty or 0.0,
        stop=tuple(text for text in stop if text),
        seed=secrets.randbits(63) if chat.seed is None else chat.seed,
        top_log_probabilities=(chat.top_logprobs or 0) if chat.logprobs else None,
    )


def _longest(asked: int | None) -> int | None:
    return None if asked in (None, NO_LIMIT) else min(asked, MAX_TOKENS)


async def continued(pieces: AsyncIterator[str], beginning: str) -> AsyncIterator[str]:
    """Yield the pieces of an answer as `behind` returns the whole."""
    said, shown = "", 0
    async for piece in pieces:
        said += piece
        text = "" if beginning.startswith(said) else behind(said, beginning)
        yield text[shown:]
        shown = len(text)


def behind(answer: str, beginning: str) -> str:
    """Return what an answer says behind its beginning, which the client has; the whole of one that begins otherwise."""
    rest = answer.removeprefix(beginning.rstrip())
    return rest.lstrip() if beginning[-1:].isspace() else rest


def extension_of(answer: Answer) -> dict[str, Any]:
    """Build the `ragkv` member of a response: citations and report."""
    return {"citations": [asdict(citation) for citation in answer.citations], "report": asdict(answer.report)}


def usage_of(answer: Answer) -> dict[str, Any]:
    """Count tokens as OpenAI does (schemas/openai.py, Usage)."""
    tokens, missed = answer.report.tokens, {fallback.chunk_id for fallback in answer.report.cache.fallbacks}
    cached = sum(each.tokens - each.recomputed_tokens for each in answer.report.chunks if each.chunk_id not in missed)
    prompt = tokens.context + tokens.question
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens.generated,
        "total_tokens": prompt + tokens.generated,
        "prompt_tokens_details": {"cached_tokens": int(cached)},
    }
