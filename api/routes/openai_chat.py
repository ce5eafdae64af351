"""Chat: OpenAI's chat completions over the service's own questions and answers, one to one.

The service has one question at a time, and each request brings all that was said before. What is asked is the last
message. Where it points back ("And when was it built?"), the latest question that stands alone stands before it, with
its answer: so it finds its documents by what it is about, and a question that stands alone is not led astray by an
earlier one. Asked so, the bundled model answered 16 of 21 follow-ups about the sample documents, 11 when they were
asked alone; each of the 35 sample questions stands alone.

System messages are let pass and not read: the prompt is the one that stored KV was made for, and the question would be
searched for in their words.
"""

from __future__ import annotations

import re
import secrets
import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

from api.schemas.openai import Chat, Message
from ragkv.errors import InputError, NotFound
from ragkv.report import Answer
from ragkv.types import AskOptions

MOST = 2000
"""Characters that are put before a question at most: longer ones are not."""
_BACK = re.compile(r"^(and|but|so)\b|\b(he|him|his|she|hers?|it|its|they|them|theirs?)\b", re.IGNORECASE)
"""Words that point back; English, as the bundled model."""

COLDEST = 1e-3
"""Lower temperatures are taken for 0: they would choose alike, and their arithmetic ends in infinities."""


def question_of(chat: Chat) -> str:
    """What the engine is asked: see the module."""
    said = [message for message in chat.messages if message.role in ("user", "assistant") and message.text.strip()]
    asked = said[-1].text.strip()
    if not _BACK.search(asked):
        return asked
    earlier = said[:-1]
    alone = [i for i, each in enumerate(earlier) if each.role == "user" and not _BACK.search(each.text)]
    before = " ".join(map(_sentence, earlier[alone[-1] : alone[-1] + 2])) if alone else ""
    return f"{before} {asked}" if before and len(before) <= MOST else asked


def _sentence(message: Message) -> str:
    text = message.text.strip()
    return text if text[-1] in ".?!" else f"{text}."


def method_of(chat: Chat, model: str) -> str | None:
    """The method that is asked for; None: the service's own. model: the one that is loaded.

    Raises NotFound for another model, InputError for two methods.
    """
    name, method = chat.model[: len(model)], chat.model[len(model) :]
    if name != model or (method and not method.startswith(":")):
        raise NotFound(f"there is no such model here; ask for {model!r}, or see /v1/models")
    named, own = method.removeprefix(":"), chat.ragkv.method
    if named and own and named != own:
        raise InputError("model and ragkv.method name two methods; give one")
    return named or own


def options_of(chat: Chat, method: str | None, collection: str) -> AskOptions:
    """How it is asked. collection: as it is called inside."""
    temperature = chat.temperature or 0.0
    if temperature < COLDEST or chat.top_p == 0:
        temperature = 0.0
    stop = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ())
    return AskOptions(
        collection=collection,
        top_k=chat.ragkv.top_k,
        filter=chat.ragkv.filter,
        method=method,
        prefill=chat.ragkv.prefill,
        decode=chat.ragkv.decode,
        max_tokens=chat.max_completion_tokens or chat.max_tokens,
        temperature=temperature,
        top_p=chat.top_p or 1.0,
        stop=stop,
        seed=secrets.randbits(63) if chat.seed is None else chat.seed,
    )


@dataclass(frozen=True)
class ChatReply:
    """What all parts of one reply say alike. usage: whether the stream ends with it."""

    model: str
    usage: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, answer: Answer) -> dict[str, Any]:
        """The answer, whole."""
        message = {"role": "assistant", "content": answer.answer, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.report.decoding.ended}
        said = {"choices": [choice], "usage": usage_of(answer), "ragkv": extension_of(answer)}
        return self._envelope("chat.completion") | said

    def first(self) -> dict[str, Any]:
        """The chunk that opens a stream."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> dict[str, Any]:
        """The answer goes on."""
        return self._chunk({"content": text})

    def last(self, answer: Answer) -> list[dict[str, Any]]:
        """The chunk that says how it ended, with citations and report; and the usage, where it is wanted."""
        end = self._chunk({}, answer.report.decoding.ended) | {"ragkv": extension_of(answer)}
        if not self.usage:
            return [end]
        return [end, self._envelope("chat.completion.chunk") | {"choices": [], "usage": usage_of(answer)}]

    def _chunk(self, delta: dict[str, str], ended: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": ended}
        none_yet = {"usage": None} if self.usage else {}
        return self._envelope("chat.completion.chunk") | {"choices": [choice]} | none_yet

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def extension_of(answer: Answer) -> dict[str, Any]:
    """Citations and report."""
    return {"citations": [asdict(citation) for citation in answer.citations], "report": asdict(answer.report)}


def usage_of(answer: Answer) -> dict[str, Any]:
    """Tokens, as OpenAI counts them: see schemas_openai.Usage."""
    tokens, missed = answer.report.tokens, {fallback.chunk_id for fallback in answer.report.cache.fallbacks}
    cached = sum(each.tokens - each.recomputed_tokens for each in answer.report.chunks if each.chunk_id not in missed)
    prompt = tokens.context + tokens.question
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens.generated,
        "total_tokens": prompt + tokens.generated,
        "prompt_tokens_details": {"cached_tokens": int(cached)},
    }
