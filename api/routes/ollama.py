"""`/api/…`: Ollama's API with retrieval built in, and Ollama's errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ragkv import __version__
from ragkv.api.error_forms import ollama_error
from ragkv.api.errors import Fault
from ragkv.api.routes.chat_exchange import ChatExchangeDep, ChatOutcome
from ragkv.api.routes.dependencies import EngineThreadDep, SettingsDep, errors_as
from ragkv.api.routes.log_probabilities import token_entries
from ragkv.api.routes.openai import model_names
from ragkv.api.routes.openai_chat import method_of, method_of_name
from ragkv.api.schemas.ollama import (
    OllamaChat,
    OllamaChatReply,
    OllamaError,
    OllamaGenerate,
    OllamaGenerateReply,
    OllamaRequest,
)
from ragkv.api.schemas.ollama_models import OllamaModels, OllamaRunning, OllamaShow, OllamaShown, OllamaVersion
from ragkv.api.schemas.openai_messages import Message
from ragkv.engine.token_scores import TokenScore

router = APIRouter()

_ERRORS = errors_as(OllamaError, 400, 401, 403, 404, 409, 413, 414, 415, 429, 431, 503, 504)
_LISTING: dict[int | str, dict[str, Any]] = {status: _ERRORS[status] for status in (400, 401, 403, 414, 415, 429, 431)}
_LINES = "application/x-ndjson"
_FAMILY = "ragkv"
_DETAILS = {"parent_model": "", "format": "", "family": _FAMILY, "families": [_FAMILY]}
_DETAILS |= {"parameter_size": "", "quantization_level": ""}
_NEVER = "9999-12-31T23:59:59+00:00"
_NANOSECONDS = 1_000_000
"""In a millisecond."""


def _described(example: str) -> dict[int | str, dict[str, Any]]:
    stream = {"itemSchema": {"type": "object", "description": "A line of JSON; the last one has `done`: true."}}
    return {**_ERRORS, 200: {"description": "The answer", "content": {_LINES: stream | {"example": example}}}}


@router.post(
    "/api/chat",
    response_model=OllamaChatReply,
    response_model_exclude_none=True,
    responses=_described('{"model":"tiny","message":{"role":"assistant","content":"Ada"},"done":false}\n'),
)
async def chat(body: OllamaChat, exchange: ChatExchangeDep) -> Response:
    """Answer what the user said last from the documents of a collection, as Ollama answers a chat.

    The reply comes as lines of JSON unless `stream` is false. The last line has the token counts, and citations and
    report under `ragkv`. `ragkv` in the request names collection and method, as in `POST /v1/chat/completions`.
    Histories are read as there. Images are refused, tools are never called.
    """
    return await _respond(body, list[Message](body.messages), exchange, as_chat=True)


@router.post(
    "/api/generate",
    response_model=OllamaGenerateReply,
    response_model_exclude_none=True,
    responses=_described('{"model":"tiny","response":"Ada","done":false}\n'),
)
async def generate(body: OllamaGenerate, exchange: ChatExchangeDep) -> Response:
    """Answer a prompt from the documents of a collection, as Ollama generates a text. See `POST /api/chat`."""
    return await _respond(body, body.messages, exchange, as_chat=False)


async def _respond(body: OllamaRequest, messages: list[Message], exchange: ChatExchangeDep, as_chat: bool) -> Response:
    form = _OllamaForm(body.model, as_chat)
    if messages:
        return await exchange.respond(body.chat_with(messages), form)
    asked = Message(role="user", content="?")
    method_of(body.chat_with([asked]), exchange.engine_thread.model)  # raises for a model that is not there
    return JSONResponse(form.line("", done=True, done_reason="unload" if body.unloads else "load"))


@router.get("/api/tags", response_model=OllamaModels, responses=_LISTING)
async def tags(request: Request, engine_thread: EngineThreadDep) -> Response:
    """List the valid values of `model`: the loaded model, alone or with a method."""
    return JSONResponse({"models": [_model(name, _started(request)) for name in model_names(engine_thread)]})


@router.get("/api/ps", response_model=OllamaRunning, responses=_LISTING)
async def running(request: Request, engine_thread: EngineThreadDep, settings: SettingsDep) -> Response:
    """Show the loaded model."""
    own = {"expires_at": _NEVER, "size_vram": 0, "context_length": settings.max_question_tokens}
    return JSONResponse({"models": [_model(model_names(engine_thread)[0], _started(request)) | own]})


@router.post("/api/show", response_model=OllamaShown, responses=_ERRORS)
async def show(body: OllamaShow, request: Request, engine_thread: EngineThreadDep, settings: SettingsDep) -> Response:
    """Show what there is to know of a model: what it can do, and how long a question may be."""
    method_of_name(body.wanted, engine_thread.model)  # raises for a model that is not there
    known = {"general.architecture": _FAMILY, "general.basename": body.wanted}
    return JSONResponse(
        {
            "license": "",
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": _DETAILS,
            "model_info": {**known, f"{_FAMILY}.context_length": settings.max_question_tokens},
            "capabilities": ["completion"],
            "modified_at": _started(request),
        }
    )


@router.get("/api/version", response_model=OllamaVersion, responses=_LISTING)
async def version() -> Response:
    """Return the version of this service."""
    return JSONResponse({"version": __version__})


def _model(name: str, started: str) -> dict[str, Any]:
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return {"name": name, "model": name, "modified_at": started, "size": 0, "digest": digest, "details": _DETAILS}


def _started(request: Request) -> str:
    return datetime.fromtimestamp(request.app.state.started, UTC).isoformat()


class _OllamaForm:
    """The form of a reply (chat_exchange.ChatForm).

    Args:
        model: As the request named it.
        as_chat: Whether the text is the content of a message, or stands alone.
    """

    media_type = _LINES

    def __init__(self, model: str, as_chat: bool):
        self._model, self._as_chat = model, as_chat

    def line(self, text: str, **more: Any) -> dict[str, Any]:
        """Build a reply or a line of one."""
        said = {"message": {"role": "assistant", "content": text}} if self._as_chat else {"response": text}
        return {"model": self._model, "created_at": datetime.now(UTC).isoformat(), **said, **more}

    def whole(self, outcome: ChatOutcome) -> dict[str, Any]:
        """Build the reply that is not streamed."""
        return self._ended(outcome, outcome.text, outcome.tokens)

    def first(self) -> Iterable[bytes]:
        """Return nothing: a stream begins with its first piece."""
        return ()

    def piece(self, text: str, tokens: Sequence[TokenScore] = ()) -> bytes:
        """Encode the next piece."""
        return _encoded(self.line(text, done=False, **_logprobs(tokens)))

    def last(self, outcome: ChatOutcome) -> Iterable[bytes]:
        """Encode the last line."""
        return (_encoded(self._ended(outcome, "")),)

    def fault(self, fault: Fault) -> bytes:
        """Encode the line that reports a fault."""
        return _encoded(ollama_error(fault))

    def _ended(self, outcome: ChatOutcome, text: str, tokens: Sequence[TokenScore] | None = None) -> dict[str, Any]:
        total = first_token = decode = 0.0
        if outcome.answer is not None:
            timings = outcome.answer.report.timings_ms
            total, first_token, decode = timings.total, timings.ttft, timings.decode
        return self.line(
            text,
            done=True,
            done_reason=outcome.finish_reason,
            total_duration=int(total * _NANOSECONDS),
            load_duration=0,
            prompt_eval_count=outcome.usage["prompt_tokens"],
            prompt_eval_duration=int(first_token * _NANOSECONDS),
            eval_count=outcome.usage["completion_tokens"],
            eval_duration=int(decode * _NANOSECONDS),
            **_logprobs(tokens or ()),
            **outcome.extension,
        )


def _logprobs(tokens: Sequence[TokenScore]) -> dict[str, Any]:
    return {"logprobs": token_entries(tokens)} if tokens else {}


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
