"""The requests of both clients as data: one function for each endpoint."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast
from urllib.parse import quote

import httpx2

from ragkv.client.chat import ChatAnswer, ChatMessage, chat_body, parse_completion, parse_models
from ragkv.client.document_models import (
    Collection,
    Listing,
    Page,
    RemoteChunks,
    RemoteDocument,
    RemotePicture,
    RemoteText,
)
from ragkv.client.job_models import Job
from ragkv.client.models import AnswerMap, Briefs, Conversation, Recalled
from ragkv.client.responses import ignore_body, member_parser, parse_job_id, parse_picture, parse_prometheus, parser
from ragkv.client.text_models import Embeddings, HandedQuestion, RankedTexts
from ragkv.locality import HEADER, affinity
from ragkv.passages import SearchResult
from ragkv.report import Answer
from ragkv.types import Filter

T = TypeVar("T")

TIMEOUT = 120.0
"""Seconds to wait for an answer, or for the next event of a stream."""
RETRIES = 2
"""How often a request to a busy service is retried."""


@cache
def tls_context() -> ssl.SSLContext:
    """Return the TLS context of all clients. Reading the certificates takes longer than a search."""
    return httpx2.create_ssl_context()


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request and the parser of its response.

    Attributes:
        method: HTTP method.
        path: Path of the endpoint.
        parse: Turns a successful response into the result.
        params: Query parameters.
        json: JSON body, or None.
        data: Form fields, or None.
        files: Uploaded files as (form field, (name, contents)), or None.
        about: Collection and conversation of the request, by which proxies choose a replica; None for neither.
    """

    method: str
    path: str
    parse: Callable[[httpx2.Response], T]
    params: Mapping[str, str | int] = field(default_factory=dict)
    json: Any = None
    data: Mapping[str, str] | None = None
    files: Sequence[tuple[str, tuple[str, bytes]]] | None = None
    about: tuple[str, str | None] | None = None

    def arguments(self, key: str) -> dict[str, Any]:
        """Return the keyword arguments for httpx2. key: API key of the client; "" for none."""
        arguments: dict[str, Any] = {"params": dict(self.params)}
        if self.about is not None:
            arguments["headers"] = {HEADER: affinity(key, *self.about)}
        for name in ("json", "data", "files"):
            if getattr(self, name) is not None:
                arguments[name] = getattr(self, name)
        return arguments


# Documents and jobs


def put(id: str, text: str, title: str, metadata: Mapping[str, Any] | None, collection: str) -> Call[RemoteDocument]:
    """PUT one document and wait until it is ingested."""
    body = {"text": text, "title": title, "metadata": dict(metadata or {})}
    params = {"collection": collection, "wait": "true"}
    return Call("PUT", f"/v1/documents/{_quote_id(id)}", parser(RemoteDocument), params, body, about=(collection, None))


def send(documents: Sequence[Mapping[str, Any]], collection: str) -> Call[str]:
    """POST several documents; the result is the id of the job."""
    body = {"documents": [{**document, "collection": collection} for document in documents]}
    return Call("POST", "/v1/documents", parse_job_id, json=body, about=(collection, None))


def upload(
    paths: Sequence[Path],
    names: Sequence[str],
    metadata: Mapping[str, Any] | None,
    collection: str,
    sources: Sequence[str] | None = None,
) -> Call[str]:
    """POST files; the result is the id of the job. Raises OSError for a file that cannot be read."""
    files = [("files", (name, path.read_bytes())) for path, name in zip(paths, names, strict=True)]
    data = {"collection": collection}
    if metadata is not None:
        data["metadata"] = json.dumps(dict(metadata))
    if sources is not None:
        data["sources"] = json.dumps(list(sources))
    return Call("POST", "/v1/documents", parse_job_id, data=data, files=files, about=(collection, None))


def page(collection: str, limit: int, after: str, filter: Filter | None, listing: Listing) -> Call[Page]:
    """GET a page of documents."""
    params: dict[str, str | int] = {"collection": collection, "limit": limit, "after": after}
    if filter is not None:
        params["filter"] = json.dumps(dict(filter))
    return Call("GET", "/v1/documents", parser(Page), {**params, **cast("Mapping[str, str]", listing)})


def document(id: str, collection: str, text: bool) -> Call[RemoteDocument]:
    """GET one document."""
    params = {"collection": collection, "text": "true" if text else "false"}
    return Call("GET", f"/v1/documents/{_quote_id(id)}", parser(RemoteDocument), params)


def document_text(id: str, collection: str, start: int, end: int | None) -> Call[RemoteText]:
    """GET the text of a document, or a part of it."""
    params: dict[str, str | int] = {"collection": collection, "start": start}
    if end is not None:
        params["end"] = end
    return Call("GET", f"/v1/documents/{_quote(id)}/text", parser(RemoteText), params)


def picture(id: str, number: int, collection: str, start: int, end: int | None) -> Call[RemotePicture]:
    """GET a page of a document as a picture."""
    params: dict[str, str | int] = {"collection": collection, "start": start}
    if end is not None:
        params["end"] = end
    return Call("GET", f"/v1/documents/{_quote(id)}/pages/{number}", parse_picture, params)


def chunks(id: str, collection: str, limit: int, after: int) -> Call[RemoteChunks]:
    """GET a page of the chunks of a document."""
    params: dict[str, str | int] = {"collection": collection, "limit": limit, "after": after}
    return Call("GET", f"/v1/documents/{_quote(id)}/chunks", parser(RemoteChunks), params)


def remove(id: str, collection: str) -> Call[None]:
    """DELETE one document."""
    return Call("DELETE", f"/v1/documents/{_quote_id(id)}", ignore_body, {"collection": collection})


def job(id: str, all: bool) -> Call[Job]:
    """GET a job."""
    return Call("GET", f"/v1/jobs/{_quote(id)}", parser(Job), {"documents": "all" if all else "failed"})


def jobs(limit: int) -> Call[tuple[Job, ...]]:
    """GET the latest jobs."""
    return Call("GET", "/v1/jobs", member_parser(tuple[Job, ...], "jobs"), {"limit": limit})


def cancel(id: str) -> Call[Job]:
    """POST the cancellation of a job."""
    return Call("POST", f"/v1/jobs/{_quote(id)}/cancel", parser(Job))


def follow(id: str) -> Call[None]:
    """GET the events of a job."""
    return Call("GET", f"/v1/jobs/{_quote(id)}/events", ignore_body)


def collections() -> Call[tuple[Collection, ...]]:
    """GET all collections."""
    return Call("GET", "/v1/collections", member_parser(tuple[Collection, ...], "collections"))


def remove_collection(name: str) -> Call[None]:
    """DELETE a collection."""
    return Call("DELETE", f"/v1/collections/{_quote(name)}", ignore_body)


# Answers and conversations


def ask(question: str, stream: bool, options: Mapping[str, Any]) -> Call[Answer]:
    """POST a question. options: further fields of the request; those that are None are left out."""
    body = {"question": question, "stream": stream, **{k: v for k, v in options.items() if v is not None}}
    about = body.get("collection", "default"), body.get("conversation_id")
    return Call("POST", "/v1/answers", parser(Answer), json=body, about=about)


def models() -> Call[tuple[str, ...]]:
    """GET the names of the models."""
    return Call("GET", "/v1/models", parse_models)


def chat(model: str, messages: Sequence[ChatMessage], stream: bool, options: Mapping[str, Any]) -> Call[ChatAnswer]:
    """POST a chat. options: those of `ragkv.client.chat.ChatOptions`."""
    body, about = chat_body(model, messages, stream, options), (options.get("collection") or "default", None)
    return Call("POST", "/v1/chat/completions", parse_completion, json=body, about=about)


def search(
    query: str, collection: str, top_k: int | None, filter: Filter | None, documents: Sequence[str] | None
) -> Call[SearchResult]:
    """POST a search for passages."""
    body: dict[str, Any] = {"query": query, "collection": collection}
    named = None if documents is None else list(documents)
    given = {"top_k": top_k, "filter": filter, "documents": named}
    body.update({name: value for name, value in given.items() if value is not None})
    return Call("POST", "/v1/search", parser(SearchResult), json=body, about=(collection, None))


def embed(texts: Sequence[str], model: str, input_type: str) -> Call[Embeddings]:
    """POST texts to embed."""
    body = {"model": model, "input": list(texts), "input_type": input_type}
    return Call("POST", "/v1/embeddings", parser(Embeddings), json=body)


def rerank(query: str, documents: Sequence[str], top_n: int | None) -> Call[RankedTexts]:
    """POST texts to order by a query."""
    body = {"query": query, "documents": list(documents), "top_n": top_n}
    return Call("POST", "/v1/rerank", parser(RankedTexts), json=body)


def hand_over(question: str, options: Mapping[str, Any]) -> Call[HandedQuestion]:
    """POST a question that another server answers. options: further fields; those that are None are left out."""
    body = {"question": question, **{k: v for k, v in options.items() if v is not None}}
    about = body.get("collection", "default"), None
    return Call("POST", "/v1/handovers", parser(HandedQuestion), json=body, about=about)


def handed_rows(asked: Mapping[str, Any]) -> Call[bytes]:
    """POST what a hand-over names; the result is in the format of safetensors."""
    return Call("POST", "/v1/handovers/rows", lambda response: response.content, json=dict(asked))


def answers(limit: int, before: float | None) -> Call[Briefs]:
    """GET a page of recorded answers."""
    params: dict[str, str | int] = {"limit": limit}
    if before is not None:
        params["before"] = repr(before)  # repr keeps every digit, so that the time compares exactly
    return Call("GET", "/v1/answers", parser(Briefs), params)


def recall(id: str) -> Call[Recalled]:
    """GET a recorded answer."""
    return Call("GET", f"/v1/answers/{quote(id, safe='')}", parser(Recalled))


def answer_map(id: str) -> Call[AnswerMap]:
    """GET the KV map of a recorded answer."""
    return Call("GET", f"/v1/answers/{quote(id, safe='')}/map", parser(AnswerMap))


def conversation(id: str, collection: str) -> Call[Conversation]:
    """GET a conversation."""
    path = f"/v1/conversations/{_quote(id)}"
    return Call("GET", path, parser(Conversation), {"collection": collection}, about=(collection, id))


def forget(id: str, collection: str) -> Call[None]:
    """DELETE a conversation."""
    path = f"/v1/conversations/{_quote(id)}"
    return Call("DELETE", path, ignore_body, {"collection": collection}, about=(collection, id))


def metrics() -> Call[str]:
    """GET the metrics in the Prometheus text format."""
    return Call("GET", "/metrics", parse_prometheus)


def _quote(name: str) -> str:
    return quote(name, safe="/")


def _quote_id(id: str) -> str:
    """Quote the id of a document at the end of a path, where `/text`, `/chunks` and `/pages/7` would mean a part."""
    front, slash, last = id.rpartition("/")
    numbered = last.isascii() and last.isdigit() and f"/{front}".endswith("/pages")
    return f"{_quote(front)}%2F{last}" if slash and (last in ("text", "chunks") or numbered) else _quote(id)
