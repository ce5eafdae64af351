"""What both clients share: requests as data, and what to make of responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import TypeAdapter, ValidationError

from ragkv.client.models import (
    AnswerMap,
    Briefs,
    Cited,
    Collection,
    Conversation,
    Document,
    Done,
    Event,
    Job,
    Page,
    Recalled,
    Reported,
    Retrieved,
    Said,
)
from ragkv.errors import Refused, Unreachable
from ragkv.report import Answer, Citation, Report
from ragkv.types import Filter

T = TypeVar("T")

TIMEOUT = 120.0
"""Seconds for one answer or one step of a stream."""
RETRIES = 2
LONGEST_WAIT = 30.0
"""Seconds that a service which is busy is waited for at once, whatever it asks for."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and how its response is read."""

    method: str
    path: str
    read: Callable[[httpx2.Response], T]
    params: Mapping[str, str | int] = field(default_factory=dict)
    json: Any = None
    data: Mapping[str, str] | None = None
    files: Sequence[tuple[str, tuple[str, bytes]]] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of httpx2."""
        found: dict[str, Any] = {"params": dict(self.params)}
        for name in ("json", "data", "files"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        return found


def reading(kind: type[T]) -> Callable[[httpx2.Response], T]:
    """Of a JSON object."""
    adapter = TypeAdapter(kind)
    return lambda response: _valid(adapter, _json(response))


def put(id: str, text: str, title: str, metadata: Mapping[str, Any] | None, collection: str) -> Call[Document]:
    """PUT of one document, waited for."""
    body = {"text": text, "title": title, "metadata": dict(metadata or {})}
    params = {"collection": collection, "wait": "true"}
    return Call("PUT", f"/v1/documents/{_quoted(id)}", reading(Document), params, body)


def send(documents: Sequence[Mapping[str, Any]], collection: str) -> Call[str]:
    """POST of several documents; the job's id."""
    body = {"documents": [{**document, "collection": collection} for document in documents]}
    return Call("POST", "/v1/documents", _job_id, json=body)


def upload(
    paths: Sequence[Path], names: Sequence[str], metadata: Mapping[str, Any] | None, collection: str
) -> Call[str]:
    """POST of files; the job's id. Raises OSError for one that cannot be read."""
    files = [("files", (name, path.read_bytes())) for path, name in zip(paths, names, strict=True)]
    data = {"collection": collection}
    if metadata is not None:
        data["metadata"] = json.dumps(dict(metadata))
    return Call("POST", "/v1/documents", _job_id, data=data, files=files)


def page(collection: str, limit: int, after: str, filter: Filter | None) -> Call[Page]:
    """GET of a page of documents."""
    params: dict[str, str | int] = {"collection": collection, "limit": limit, "after": after}
    if filter is not None:
        params["filter"] = json.dumps(dict(filter))
    return Call("GET", "/v1/documents", reading(Page), params)


def document(id: str, collection: str, text: bool) -> Call[Document]:
    """GET of one document."""
    params = {"collection": collection, "text": _flag(text)}
    return Call("GET", f"/v1/documents/{_quoted(id)}", reading(Document), params)


def remove(id: str, collection: str) -> Call[None]:
    """DELETE of one document."""
    return Call("DELETE", f"/v1/documents/{_quoted(id)}", _nothing, {"collection": collection})


def job(id: str, all: bool) -> Call[Job]:
    """GET of a job."""
    return Call("GET", f"/v1/jobs/{_quoted(id)}", reading(Job), {"documents": "all" if all else "failed"})


def jobs(limit: int) -> Call[tuple[Job, ...]]:
    """GET of the latest jobs."""
    adapter = TypeAdapter(tuple[Job, ...])
    return Call("GET", "/v1/jobs", lambda r: _valid(adapter, _member(r, "jobs")), {"limit": limit})


def cancel(id: str) -> Call[Job]:
    """Stop a job."""
    return Call("POST", f"/v1/jobs/{_quoted(id)}/cancel", reading(Job))


def follow(id: str) -> Call[None]:
    """The events of a job."""
    return Call("GET", f"/v1/jobs/{_quoted(id)}/events", _nothing)


def collections() -> Call[tuple[Collection, ...]]:
    """GET of all collections."""
    adapter = TypeAdapter(tuple[Collection, ...])
    return Call("GET", "/v1/collections", lambda r: _valid(adapter, _member(r, "collections")))


def remove_collection(name: str) -> Call[None]:
    """DELETE of a collection."""
    return Call("DELETE", f"/v1/collections/{_quoted(name)}", _nothing)


def ask(question: str, stream: bool, given: Mapping[str, Any]) -> Call[Answer]:
    """POST of a question. given: other fields of the request; those that are None are left out."""
    body = {"question": question, "stream": stream, **{k: v for k, v in given.items() if v is not None}}
    return Call("POST", "/v1/answers", reading(Answer), json=body)


def answers(limit: int, before: float | None) -> Call[Briefs]:
    """GET of a page of remembered answers."""
    params: dict[str, str | int] = {"limit": limit}
    if before is not None:
        params["before"] = repr(before)  # every digit counts: it names a moment
    return Call("GET", "/v1/answers", reading(Briefs), params)


def recall(id: str) -> Call[Recalled]:
    """GET of a remembered answer."""
    return Call("GET", f"/v1/answers/{quote(id, safe='')}", reading(Recalled))


def answer_map(id: str) -> Call[AnswerMap]:
    """GET of what it was read from."""
    return Call("GET", f"/v1/answers/{quote(id, safe='')}/map", reading(AnswerMap))


def conversation(id: str, collection: str) -> Call[Conversation]:
    """GET of a conversation."""
    return Call("GET", f"/v1/conversations/{_quoted(id)}", reading(Conversation), {"collection": collection})


def forget(id: str, collection: str) -> Call[None]:
    """DELETE of a conversation."""
    return Call("DELETE", f"/v1/conversations/{_quoted(id)}", _nothing, {"collection": collection})


def ready() -> Call[bool]:
    """Whether questions are answered now."""
    return Call("GET", "/readyz", lambda response: response.status_code == 200)


def refused(response: httpx2.Response) -> Refused | None:
    """What a response says went wrong, None where nothing did. The body must have been read."""
    if response.is_success:
        return None
    said = f"the service answered {response.status_code} {response.reason_phrase}"
    return _refusal(response.text, response.status_code, said, _retry_after(response))


def again(fault: Refused, tries: int) -> float | None:
    """Seconds to wait before the request is sent once more, None where that would not help. Only a service that is
    busy, and says for how long, is asked again: it has done nothing yet."""
    if fault.status != 429 or fault.retry_after is None or tries <= 0:
        return None
    return min(fault.retry_after, LONGEST_WAIT)


def unreachable(url: str, error: Exception) -> Unreachable:
    """What a fault of the connection means."""
    reason = str(error) or type(error).__name__
    return Unreachable(f"no answer from {url} ({reason}); is `ragkv serve` running there?")


def event_of(event: httpx2.ServerSentEvent) -> Event | None:
    """An event of a streamed answer, None for one that is not known. Raises Refused for `error`."""
    if event.event == "error":
        raise _refusal(event.data, 500, "the answer broke off", None)
    read = _EVENTS.get(event.event)
    return read(event.json()) if read else None


def job_of(event: httpx2.ServerSentEvent) -> Job | None:
    """The job as an event of it says."""
    return _valid(_JOB, event.json()) if event.event in ("progress", "done") else None


_JOB = TypeAdapter(Job)
_EVENTS: dict[str, Callable[[Any], Event]] = {
    "retrieval": lambda found: _valid(TypeAdapter(Retrieved), found),
    "token": lambda found: _valid(TypeAdapter(Said), found),
    "citation": lambda found: Cited(_valid(TypeAdapter(Citation), found)),
    "report": lambda found: Reported(_valid(TypeAdapter(Report), found)),
    "done": lambda found: Done(_valid(TypeAdapter(Answer), found)),
}


def metrics() -> Call[str]:
    """GET of the metrics, as Prometheus text."""
    return Call("GET", "/metrics", _prometheus)


def _prometheus(response: httpx2.Response) -> str:
    kind = response.headers.get("content-type", "")
    if not kind.startswith("text/plain"):
        raise _strange(f"metrics of type {kind!r}")
    return response.text


def _job_id(response: httpx2.Response) -> str:
    return str(_member(response, "job_id"))


def _member(response: httpx2.Response, name: str) -> Any:
    found = _json(response)
    if not isinstance(found, dict) or name not in found:
        raise _strange(f"no {name}")
    return found[name]


def _nothing(response: httpx2.Response) -> None:
    return None


def _json(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise _strange(response.text[:80]) from None


def _valid(adapter: TypeAdapter[T], found: Any) -> T:
    try:
        return adapter.validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise _strange(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _strange(what: str) -> Refused:
    return Refused(502, "strange", f"what came is not what a ragkv service says ({what}); is the address right?", None)


def _refusal(text: str, status: int, otherwise: str, retry_after: float | None) -> Refused:
    """Of a problem as JSON text, where it is one."""
    try:
        problem = json.loads(text)
    except ValueError:
        problem = None
    problem = problem if isinstance(problem, dict) else {}
    detail = str(problem.get("detail") or otherwise)
    return Refused(int(problem.get("status", status)), str(problem.get("code", "")), detail, retry_after)


def _retry_after(response: httpx2.Response) -> float | None:
    given = response.headers.get("retry-after", "")
    return float(given) if given.isascii() and given.isdigit() else None


def _quoted(name: str) -> str:
    return quote(name, safe="/")


def _flag(value: bool) -> str:
    return "true" if value else "false"
